// The torch side of onebit_compress_momentum on CPU: check, allocate, pick the instruction set.
#include "cpu/onebit_compress_momentum.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/check.h"
#include "cpu/codec_run.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> onebit_compress_momentum(std::vector<Tensor> grads, Tensor bits,
                                                    Tensor scales, Tensor error, double beta1,
                                                    double grad_scale, int64_t block_size,
                                                    std::optional<Tensor> preconditioner) {
  constexpr const char* kOp = "onebit_compress_momentum";
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  check_dtype(kOp, "error", error, ScalarType::Float);
  const int64_t num_blocks = scales.numel();
  check_numel(kOp, "bits", bits, num_blocks, block_size / 8);
  check_numel(kOp, "error", error, num_blocks, block_size);
  STD_TORCH_CHECK(error.is_contiguous(), kOp, ": error must be contiguous");
  STD_TORCH_CHECK(bits.is_cpu() && scales.is_cpu() && error.is_cpu(), kOp,
                  ": every tensor must be on cpu");
  const BFloat16* factors = nullptr;
  if (preconditioner) {
    check_dtype(kOp, "preconditioner", *preconditioner, ScalarType::BFloat16);
    check_numel(kOp, "preconditioner", *preconditioner, num_blocks, block_size);
    STD_TORCH_CHECK(preconditioner->is_cpu() && preconditioner->is_contiguous(), kOp,
                    ": preconditioner must be contiguous, on cpu");
    factors = static_cast<const BFloat16*>(preconditioner->const_data_ptr());
  }

  std::vector<OnebitGrad> list;
  list.reserve(grads.size());
  int64_t block = 0;
  for (Tensor& grad : grads) {
    STD_TORCH_CHECK(grad.is_cpu(), kOp, ": grads must be on cpu");
    grad = torch::stable::contiguous(grad);
    const int64_t numel = grad.numel();
    if (numel) list.push_back({grad.const_data_ptr(), float_type(kOp, grad), numel, block});
    block += ceil_div(numel, block_size);
  }
  STD_TORCH_CHECK(block <= num_blocks, kOp, ": grads must fit ", num_blocks, " blocks, got ",
                  block);

  const Tensor old_bits = torch::stable::contiguous(bits);
  const Tensor old_scales = torch::stable::contiguous(scales);
  Tensor new_bits = torch::stable::new_empty(bits, {bits.numel()}, ScalarType::Byte);
  Tensor new_scales = torch::stable::new_empty(scales, {num_blocks}, ScalarType::Float);
  const OnebitMomentumArgs args{list.data(),
                                static_cast<int64_t>(list.size()),
                                factors,
                                static_cast<const uint8_t*>(old_bits.const_data_ptr()),
                                static_cast<const float*>(old_scales.const_data_ptr()),
                                static_cast<float*>(error.mutable_data_ptr()),
                                static_cast<uint8_t*>(new_bits.mutable_data_ptr()),
                                static_cast<float*>(new_scales.mutable_data_ptr()),
                                static_cast<float>(beta1),
                                static_cast<float>(1 - beta1),
                                static_cast<float>(grad_scale),
                                num_blocks,
                                block_size};
  const auto body = MCP_PICK(onebit_compress_momentum);
  for_blocks_with_scratch(
      num_blocks, block_size, block_size,
      [&](int64_t first, int64_t last, float* carried) { body(args, first, last, carried); });
  return {new_bits, new_scales};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("onebit_compress_momentum", TORCH_BOX(&mcp::onebit_compress_momentum));
}
