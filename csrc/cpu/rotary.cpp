// The torch side of rotary on CPU.
#include "cpu/rotary.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cpu/rows.h"

namespace mcp {
namespace {

using torch::stable::Tensor;

void check_table(const char* name, const Tensor& table, const Tensor& q) {
  STD_TORCH_CHECK(table.dim() == 2 && table.size(0) == q.size(1) && 2 * table.size(1) == q.size(3),
                  "rotary: ", name, " must be [", q.size(1), ", ", q.size(3) / 2,
                  "] for q's positions and pairs");
  STD_TORCH_CHECK(table.is_cpu(), "rotary: ", name, " must be on cpu as q is");
  check_dtype("rotary", name, table, compute_type(q));
}

void check_heads(const char* name, const Tensor& x, const Tensor& q) {
  STD_TORCH_CHECK(x.dim() == 4 && x.is_cpu(), "rotary: ", name,
                  " must have 4 dimensions, [B, S, H, K], on cpu");
  check_dtype("rotary", name, x, q.scalar_type());
  for (int dim : {0, 1, 3}) {
    STD_TORCH_CHECK(x.size(dim) == q.size(dim), "rotary: ", name, " must be ", q.size(dim),
                    " in dimension ", dim, " as q is, got ", x.size(dim));
  }
}

Tensor turned(const Tensor& heads, const Tensor& cos, const Tensor& sin, bool back) {
  Tensor y = new_like(heads);
  if (y.numel() == 0) return y;
  const bool has_neighbours = heads.stride(3) == 1;
  const Tensor x = has_neighbours ? heads : torch::stable::contiguous(heads);
  const RotaryArgs args{element_type("rotary", "q", x),
                        x.const_data_ptr(),
                        x.stride(0),
                        x.stride(1),
                        x.stride(2),
                        y.mutable_data_ptr(),
                        cos.const_data_ptr(),
                        sin.const_data_ptr(),
                        x.size(1),
                        x.size(2),
                        x.size(3) / 2,
                        back};
  const auto body = MCP_PICK(rotary);
  for_blocks(x.size(0) * x.size(1), x.size(2) * x.size(3),
             [&](int64_t first, int64_t last) { body(args, first, last); });
  return y;
}

std::tuple<Tensor, Tensor> rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) {
  check_heads("q", q, q);
  check_heads("k", k, q);
  element_type("rotary", "q", q);
  check_table("cos", cos, q);
  check_table("sin", sin, q);
  const Tensor dense_cos = torch::stable::contiguous(cos),
               dense_sin = torch::stable::contiguous(sin);
  return {turned(q, dense_cos, dense_sin, back), turned(k, dense_cos, dense_sin, back)};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) { m.impl("rotary", TORCH_BOX(&mcp::rotary)); }
