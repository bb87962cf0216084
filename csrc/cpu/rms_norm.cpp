// The torch side of rms_norm, add_rms_norm and rms_norm_bwd on CPU.
#include "cpu/rms_norm.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "cpu/rows.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int64_t width_of(const char* op, const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, op,
                  ": x must have at least one feature in its last dimension");
  const int64_t width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == width && weight.is_cpu(), op,
                  ": weight must be [", width, "], on cpu as x is");
  element_type(op, "weight", weight);
  return width;
}

// The few elements of a weight as contiguous scalars that sums run in.
Tensor scalars_of(const Tensor& weight, ScalarType type) {
  return torch::stable::contiguous(weight.scalar_type() == type ? weight
                                                                : torch::stable::to(weight, type));
}

// [...] of [..., width], in the type of sums.
Tensor new_scales(const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.pop_back();
  return torch::stable::new_empty(
      x, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), compute_type(x));
}

struct Normed {
  Tensor y, sum, scale;
};

Normed norm(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight,
            double eps) {
  RmsNormArgs args{};
  args.type = element_type(op, "x", x);
  args.width = width_of(op, x, weight);
  args.eps = eps;
  if (residual != nullptr) check_like_x(op, "residual", *residual, "x", x);
  Normed out{new_like(x), residual != nullptr ? new_like(x) : x, new_scales(x)};
  if (x.numel() == 0) return out;
  const Tensor scalars = scalars_of(weight, compute_type(x));
  const Rows rows(x), residual_rows(residual != nullptr ? *residual : x);
  args.x = rows.view();
  args.weight = scalars.const_data_ptr();
  if (residual != nullptr) {
    args.residual = residual_rows.view();
    args.sum = out.sum.mutable_data_ptr();
  }
  args.y = out.y.mutable_data_ptr();
  args.scale = out.scale.mutable_data_ptr();
  const auto body = MCP_PICK(rms_norm);
  for_blocks(out.scale.numel(), args.width,
             [&](int64_t first, int64_t last) { body(args, first, last); });
  return out;
}

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  Normed out = norm("rms_norm", x, nullptr, weight, eps);
  return {out.y, out.scale};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight,
                                                double eps) {
  Normed out = norm("add_rms_norm", x, &residual, weight, eps);
  return {out.y, out.sum, out.scale};
}

// The parts of dw added in order, into the first.
template <class T>
void add_parts(T* parts, int64_t count, int64_t width) {
  for (int64_t part = 1; part < count; ++part) {
    for (int64_t i = 0; i < width; ++i) parts[i] += parts[part * width + i];
  }
}

std::tuple<Tensor, Tensor> rms_norm_bwd(Tensor dy, std::optional<Tensor> dsum, Tensor x,
                                        Tensor weight, Tensor scale,
                                        double /*eps: for a backward of this*/) {
  constexpr const char* kOp = "rms_norm_bwd";
  RmsNormBackwardArgs args{};
  args.type = element_type(kOp, "x", x);
  args.width = width_of(kOp, x, weight);
  args.num_rows = x.numel() / args.width;
  check_like_x(kOp, "dy", dy, "x", x);
  if (dsum) check_like_x(kOp, "dsum", *dsum, "x", x);
  check_dtype(kOp, "scale", scale, compute_type(x));
  check_numel(kOp, "scale", scale, args.num_rows);
  Tensor ds = new_like(x);
  const ScalarType type = compute_type(x);
  if (args.num_rows == 0) {
    return {ds, torch::stable::new_zeros(weight, {args.width})};
  }
  const int64_t num_parts = ceil_div(args.num_rows, norm_rows_of_part(args.num_rows));
  Tensor parts = torch::stable::new_empty(x, {num_parts, args.width}, type);
  const Tensor scalars = scalars_of(weight, type), scales = torch::stable::contiguous(scale);
  const Rows dy_rows(dy), rows(x), dsum_rows(dsum ? *dsum : x);
  args.dy = dy_rows.view();
  args.s = rows.view();
  if (dsum) args.dsum = dsum_rows.view();
  args.weight = scalars.const_data_ptr();
  args.scale = scales.const_data_ptr();
  args.ds = ds.mutable_data_ptr();
  args.dweight_parts = parts.mutable_data_ptr();
  const auto body = MCP_PICK(rms_norm_bwd);
  for_blocks(num_parts, args.width * norm_rows_of_part(args.num_rows),
             [&](int64_t first, int64_t last) { body(args, first, last); });
  if (type == ScalarType::Double) {
    add_parts(static_cast<double*>(args.dweight_parts), num_parts, args.width);
  } else {
    add_parts(static_cast<float*>(args.dweight_parts), num_parts, args.width);
  }
  // A copy, so that the gradient does not keep the other parts alive.
  Tensor first = torch::stable::select(parts, 0, 0);
  Tensor dweight = weight.scalar_type() == type ? torch::stable::clone(first)
                                                : torch::stable::to(first, weight.scalar_type());
  return {ds, dweight};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&mcp::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&mcp::add_rms_norm));
  m.impl("rms_norm_bwd", TORCH_BOX(&mcp::rms_norm_bwd));
}
