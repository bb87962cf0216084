// The torch side of onebit_adam_update on CPU: check, pick the instruction set, register.
#include "cpu/onebit_adam_update.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <utility>
#include <vector>

#include "common/check.h"
#include "cpu/codec_run.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_flat(const char* op, const char* name, const Tensor& flat, int64_t num_blocks,
                int64_t block_size) {
  check_dtype(op, name, flat, ScalarType::Float);
  check_numel(op, name, flat, num_blocks, block_size);
  STD_TORCH_CHECK(flat.is_cpu() && flat.is_contiguous(), op, ": ", name,
                  " must be contiguous, on cpu");
}

void onebit_adam_update(std::vector<Tensor> params, std::optional<Tensor> denom, Tensor bits,
                        Tensor scales, double lr, double step_size,
                        std::vector<double> weight_decays, int64_t block_size,
                        std::optional<Tensor> master, std::optional<Tensor> moves) {
  constexpr const char* kOp = "onebit_adam_update";
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  const int64_t num_blocks = scales.numel();
  check_numel(kOp, "bits", bits, num_blocks, block_size / 8);
  STD_TORCH_CHECK(bits.is_cpu() && scales.is_cpu(), kOp, ": every tensor must be on cpu");
  if (denom) check_flat(kOp, "denom", *denom, num_blocks, block_size);
  if (master) check_flat(kOp, "master", *master, num_blocks, block_size);
  STD_TORCH_CHECK(weight_decays.size() == params.size(), kOp, ": weight_decays must be ",
                  params.size(), " values, got ", weight_decays.size());

  std::vector<OnebitParam> list;
  std::vector<std::pair<Tensor, Tensor>> copied;  // a strided parameter and its dense copy
  list.reserve(params.size());
  int64_t block = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor dense = params[i];
    const FloatType type = float_type(kOp, dense);
    STD_TORCH_CHECK(dense.is_cpu(), kOp, ": params must be on cpu");
    STD_TORCH_CHECK(master.has_value() || type == FloatType::kFloat32, kOp,
                    ": params must be float32 without master");
    if (!dense.is_contiguous()) {
      dense = torch::stable::contiguous(params[i]);
      copied.emplace_back(params[i], dense);
    }
    const int64_t numel = dense.numel();
    const auto decay = static_cast<float>(1 - lr * weight_decays[i]);
    if (numel) list.push_back({dense.mutable_data_ptr(), type, decay, numel, block});
    block += ceil_div(numel, block_size);
  }
  STD_TORCH_CHECK(block <= num_blocks, kOp, ": params must fit ", num_blocks, " blocks, got ",
                  block);

  std::optional<Tensor> flat_moves;
  if (moves) {
    check_dtype(kOp, "moves", *moves, ScalarType::Byte);
    check_numel(kOp, "moves", *moves, bits.numel());
    STD_TORCH_CHECK(moves->is_cpu(), kOp, ": every tensor must be on cpu");
    flat_moves = torch::stable::contiguous(*moves);
  }
  const Tensor flat_bits = torch::stable::contiguous(bits);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  const OnebitAdamArgs args{
      list.data(),
      static_cast<int64_t>(list.size()),
      master ? static_cast<float*>(master->mutable_data_ptr()) : nullptr,
      denom ? static_cast<const float*>(denom->const_data_ptr()) : nullptr,
      flat_moves ? static_cast<const uint8_t*>(flat_moves->const_data_ptr()) : nullptr,
      static_cast<const uint8_t*>(flat_bits.const_data_ptr()),
      static_cast<const float*>(flat_scales.const_data_ptr()),
      static_cast<float>(step_size),
      block_size};
  const auto body = MCP_PICK(onebit_adam_update);
  for_blocks(block, block_size, [&](int64_t first, int64_t last) { body(args, first, last); });
  for (auto& [param, dense] : copied) torch::stable::copy_(param, dense);
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("onebit_adam_update", TORCH_BOX(&mcp::onebit_adam_update));
}
