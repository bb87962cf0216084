// The torch side of onebit_reduce on CPU: check, allocate, pick the instruction set, register.
#include "cpu/onebit_reduce.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "common/check.h"
#include "cpu/codec_reduce.h"
#include "cpu/codec_run.h"

namespace mcp {
namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> onebit_reduce(Tensor bits, Tensor scales, Tensor server_error,
                                         std::optional<Tensor> counts, int64_t block_size) {
  constexpr const char* kOp = "onebit_reduce";
  const ReduceCall call(kOp, bits, scales, server_error, counts, block_size, 1);
  const OnebitReduceArgs args{call.rank_codes(), call.rank_scales(), call.num_ranks,
                              call.counts(),     call.error(),       call.codes_out(),
                              call.scales_out(), call.numel,         block_size};
  const auto body = MCP_PICK(onebit_reduce);
  for_blocks_with_scratch(
      call.num_blocks, block_size, call.numel,
      [&](int64_t first, int64_t last, float* carried) { body(args, first, last, carried); });
  return {call.new_codes, call.new_scales};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("onebit_reduce", TORCH_BOX(&mcp::onebit_reduce));
}
