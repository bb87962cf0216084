// The torch side of swiglu and swiglu_bwd on CPU.
#include "cpu/swiglu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cpu/rows.h"

namespace mcp {
namespace {

using torch::stable::Tensor;

// What one task does is a whole number of these.
constexpr int64_t kPieceElements = 1024;

// body(args, first, last) over all elements, shared among threads. Rows that lie end to end in
// every tensor are one row: the rest of a vector in each would cost more.
template <class Args, class Body>
void run_elements(const Body& body, Args args, bool are_dense, const Tensor& gate) {
  const int64_t numel = gate.numel();
  args.width = are_dense ? numel : gate.size(gate.dim() - 1);
  for_blocks(ceil_div(numel, kPieceElements), kPieceElements, [&](int64_t first, int64_t last) {
    body(args, first * kPieceElements, std::min(last * kPieceElements, numel));
  });
}

ElementType check_inputs(const char* op, const Tensor& gate, const Tensor& up) {
  const ElementType type = element_type(op, "gate", gate);
  STD_TORCH_CHECK(gate.dim() >= 1, op, ": gate must have at least 1 dimension, got 0");
  check_like_x(op, "up", up, "gate", gate);
  return type;
}

Tensor swiglu(Tensor gate, Tensor up) {
  SwigluArgs args{};
  args.type = check_inputs("swiglu", gate, up);
  Tensor y = new_like(gate);
  if (y.numel() == 0) return y;
  const Rows gates(gate), ups(up);
  args.gate = gates.view();
  args.up = ups.view();
  args.y = y.mutable_data_ptr();
  run_elements(MCP_PICK(swiglu), args, gates.are_dense() && ups.are_dense(), gate);
  return y;
}

std::tuple<Tensor, Tensor> swiglu_bwd(Tensor dy, Tensor gate, Tensor up) {
  constexpr const char* kOp = "swiglu_bwd";
  SwigluBackwardArgs args{};
  args.type = check_inputs(kOp, gate, up);
  check_like_x(kOp, "dy", dy, "gate", gate);
  Tensor dgate = new_like(gate), dup = new_like(up);
  if (gate.numel() == 0) return {dgate, dup};
  const Rows dys(dy), gates(gate), ups(up);
  args.dy = dys.view();
  args.gate = gates.view();
  args.up = ups.view();
  args.dgate = dgate.mutable_data_ptr();
  args.dup = dup.mutable_data_ptr();
  const bool are_dense = dys.are_dense() && gates.are_dense() && ups.are_dense();
  run_elements(MCP_PICK(swiglu_bwd), args, are_dense, gate);
  return {dgate, dup};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&mcp::swiglu));
  m.impl("swiglu_bwd", TORCH_BOX(&mcp::swiglu_bwd));
}
