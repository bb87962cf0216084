// Argument checks of the torch side: what a body needs so that it never leaves its buffers.
// The public Python functions say the same in more words; these hold for torch.ops callers.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/float_types.h"

namespace mcp {

inline FloatType float_type(const char* op, const torch::stable::Tensor& x) {
  using torch::headeronly::ScalarType;
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, op,
      ": x must be float32, bfloat16 or float16, got dtype code ", static_cast<int>(type));
  if (type == ScalarType::BFloat16) return FloatType::kBFloat16;
  return type == ScalarType::Half ? FloatType::kFloat16 : FloatType::kFloat32;
}

inline void check_block_size(const char* op, int64_t block_size) {
  STD_TORCH_CHECK(block_size > 0 && block_size % 8 == 0, op,
                  ": block_size must be a positive multiple of 8, got ", block_size);
}

inline void check_numel(const char* op, const char* name, const torch::stable::Tensor& tensor,
                        int64_t expected) {
  STD_TORCH_CHECK(tensor.numel() == expected, op, ": ", name, " must have ", expected,
                  " elements, got ", tensor.numel());
}

// The same of a product, which may be more than an int64 holds: what wrapped around would pass for
// a small number.
inline void check_numel(const char* op, const char* name, const torch::stable::Tensor& tensor,
                        int64_t count, int64_t each) {
  int64_t expected = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(count, each, &expected), op, ": ", name, " must have ",
                  count, " times ", each, " elements, got ", tensor.numel());
  check_numel(op, name, tensor, expected);
}

inline void check_dtype(const char* op, const char* name, const torch::stable::Tensor& tensor,
                        torch::headeronly::ScalarType expected) {
  STD_TORCH_CHECK(tensor.scalar_type() == expected, op, ": ", name, " must have dtype code ",
                  static_cast<int>(expected), ", got ", static_cast<int>(tensor.scalar_type()));
}

// What an op writes its result to.
inline void check_out(const char* op, const torch::stable::Tensor& out) {
  check_dtype(op, "out", out, torch::headeronly::ScalarType::Float);
  STD_TORCH_CHECK(out.is_cpu() && out.is_contiguous(), op, ": out must be contiguous, on cpu");
}

// a / b rounded up; written so that it cannot overflow for the largest b.
inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace mcp
