// The torch side of ops over rows: tensors as rows, rows shared among threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "cpu/codec_run.h"
#include "cpu/element_type.h"

namespace mcp {

inline ElementType element_type(const char* op, const char* name, const torch::stable::Tensor& x) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return ElementType::kFloat64;
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Half:
      return ElementType::kFloat16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name,
                      " must be float64, float32, bfloat16 or float16, got dtype code ",
                      static_cast<int>(x.scalar_type()));
  }
}

// The type of scalars that elements of x are computed in.
inline torch::headeronly::ScalarType compute_type(const torch::stable::Tensor& x) {
  using torch::headeronly::ScalarType;
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_like_x(const char* op, const char* name, const torch::stable::Tensor& tensor,
                         const char* like, const torch::stable::Tensor& x) {
  check_dtype(op, name, tensor, x.scalar_type());
  STD_TORCH_CHECK(tensor.is_cpu(), op, ": ", name, " must be on cpu as ", like, " is");
  const auto sizes = tensor.sizes(), expected = x.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), op,
                  ": ", name, " must have the shape of ", like);
}

// A tensor [..., width] as rows. Those that lie evenly in memory are read where they are (slices of
// features, parts of a packed tensor); others are copied first.
class Rows {
 public:
  explicit Rows(const torch::stable::Tensor& x) : tensor_(x) {
    if (!are_even(x, &stride_)) {
      tensor_ = torch::stable::contiguous(x);
      stride_ = x.size(x.dim() - 1);
    }
  }

  ConstRows view() const { return {tensor_.const_data_ptr(), stride_}; }
  // Nothing lies between one row and the next.
  bool are_dense() const { return stride_ == tensor_.size(tensor_.dim() - 1); }

 private:
  static bool are_even(const torch::stable::Tensor& x, int64_t* stride) {
    const int64_t last = x.dim() - 1;
    *stride = x.size(last);
    if (x.size(last) > 1 && x.stride(last) != 1) return false;
    int64_t rows = 1;  // below the dimension at hand
    for (int64_t dim = last - 1; dim >= 0; --dim) {
      if (x.size(dim) == 1) continue;
      if (rows == 1) *stride = x.stride(dim);
      if (x.stride(dim) != *stride * rows) return false;
      rows *= x.size(dim);
    }
    return true;
  }

  torch::stable::Tensor tensor_;
  int64_t stride_;
};

inline std::vector<int64_t> sizes_of(const torch::stable::Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}

// A new contiguous tensor of x's shape and type.
inline torch::stable::Tensor new_like(const torch::stable::Tensor& x) {
  const std::vector<int64_t> sizes = sizes_of(x);
  return torch::stable::new_empty(
      x, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

}  // namespace mcp
