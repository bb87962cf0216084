// onebit_compress_momentum, onebit_reduce and onebit_adam_update on CUDA, the torch side.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/codec_launch.h"
// The words come first: the kernels are written in them.
#include "cuda/onebit_step.cuh"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

constexpr int kThreads = kWarp * kWarpsPerGroup;

// Calls launch(table, first, last) for kTableSize items at a time, so that every block of
// [0, end) is done once; blocks behind the last item belong to the last call.
template <class Item, class Launch>
void in_tables(const std::vector<Item>& items, int64_t end, Launch launch) {
  size_t done = 0;
  int64_t first = 0;
  do {
    Table<Item> table{};
    while (done < items.size() && table.count < kTableSize) {
      table.items[table.count++] = items[done++];
    }
    const int64_t last = done < items.size() ? items[done].first_block : end;
    if (last > first) launch(table, first, last);
    first = last;
  } while (done < items.size());
}

std::tuple<Tensor, Tensor> onebit_compress_momentum(std::vector<Tensor> grads, Tensor bits,
                                                    Tensor scales, Tensor error, double beta1,
                                                    double grad_scale, int64_t block_size,
                                                    std::optional<Tensor> preconditioner) {
  constexpr const char* kOp = "onebit_compress_momentum";
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  const int64_t num_blocks = scales.numel();
  check_numel(kOp, "bits", bits, num_blocks, block_size / 8);
  check_device(kOp, "scales", scales, bits);
  check_flat(kOp, "error", error, bits, num_blocks * block_size);
  const BFloat16* factors = nullptr;
  if (preconditioner) {
    check_dtype(kOp, "preconditioner", *preconditioner, ScalarType::BFloat16);
    check_numel(kOp, "preconditioner", *preconditioner, num_blocks, block_size);
    check_device(kOp, "preconditioner", *preconditioner, bits);
    STD_TORCH_CHECK(preconditioner->is_contiguous(), kOp, ": preconditioner must be contiguous");
    factors = static_cast<const BFloat16*>(preconditioner->const_data_ptr());
  }

  const DeviceGuard guard(bits.get_device_index());
  std::vector<OnebitGrad> list;
  int64_t block = 0;
  for (Tensor& grad : grads) {
    check_device(kOp, "grads", grad, bits);
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
  const OnebitMomentumArgs args{nullptr,
                                0,
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
  const cudaStream_t stream = current_stream(bits.get_device_index());
  in_tables(list, num_blocks, [&](const Table<OnebitGrad>& table, int64_t first, int64_t last) {
    momentum_kernel<<<groups_of(last - first, kWarpsPerGroup), kThreads, 0, stream>>>(args, table,
                                                                                      first, last);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {new_bits, new_scales};
}

std::tuple<Tensor, Tensor> onebit_reduce(Tensor bits, Tensor scales, Tensor server_error,
                                         std::optional<Tensor> counts, int64_t block_size) {
  constexpr const char* kOp = "onebit_reduce";
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  STD_TORCH_CHECK(bits.dim() == 2 && bits.size(0) >= 1, kOp, ": bits must be [W, bytes]");
  const int64_t numel = server_error.numel(), num_ranks = bits.size(0);
  const int64_t num_blocks = ceil_div(numel, block_size);
  check_numel(kOp, "bits", bits, num_ranks, ceil_div(numel, 8));
  check_numel(kOp, "scales", scales, num_ranks, num_blocks);
  check_device(kOp, "scales", scales, bits);
  check_flat(kOp, "server_error", server_error, bits, numel);

  const DeviceGuard guard(bits.get_device_index());
  const Tensor flat_bits = torch::stable::contiguous(bits);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  std::optional<Tensor> flat_counts;
  if (counts.has_value()) {
    check_dtype(kOp, "counts", *counts, ScalarType::Int);
    check_numel(kOp, "counts", *counts, num_blocks);
    check_device(kOp, "counts", *counts, bits);
    flat_counts = torch::stable::contiguous(*counts);
  }
  Tensor new_bits = torch::stable::new_empty(bits, {ceil_div(numel, 8)}, ScalarType::Byte);
  Tensor new_scales = torch::stable::new_empty(scales, {num_blocks}, ScalarType::Float);
  if (num_blocks == 0) return {new_bits, new_scales};
  const OnebitReduceArgs args{
      static_cast<const uint8_t*>(flat_bits.const_data_ptr()),
      static_cast<const float*>(flat_scales.const_data_ptr()),
      num_ranks,
      flat_counts ? static_cast<const int32_t*>(flat_counts->const_data_ptr()) : nullptr,
      static_cast<float*>(server_error.mutable_data_ptr()),
      static_cast<uint8_t*>(new_bits.mutable_data_ptr()),
      static_cast<float*>(new_scales.mutable_data_ptr()),
      numel,
      block_size};
  const auto share = static_cast<float>(1.0 / static_cast<double>(num_ranks));
  const cudaStream_t stream = current_stream(bits.get_device_index());
  reduce_kernel<<<groups_of(num_blocks, kWarpsPerGroup), kThreads, 0, stream>>>(args, num_blocks,
                                                                                share);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {new_bits, new_scales};
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
  check_device(kOp, "scales", scales, bits);
  if (denom) check_flat(kOp, "denom", *denom, bits, num_blocks * block_size);
  if (master) check_flat(kOp, "master", *master, bits, num_blocks * block_size);
  STD_TORCH_CHECK(weight_decays.size() == params.size(), kOp, ": weight_decays must be ",
                  params.size(), " values, got ", weight_decays.size());

  const DeviceGuard guard(bits.get_device_index());
  std::vector<OnebitParam> list;
  std::vector<std::pair<Tensor, Tensor>> copied;  // a strided parameter and its dense copy
  int64_t block = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor dense = params[i];
    const FloatType type = float_type(kOp, dense);
    check_device(kOp, "params", dense, bits);
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
    check_device(kOp, "moves", *moves, bits);
    flat_moves = torch::stable::contiguous(*moves);
  }
  const Tensor flat_bits = torch::stable::contiguous(bits);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  const OnebitAdamArgs args{
      nullptr,
      0,
      master ? static_cast<float*>(master->mutable_data_ptr()) : nullptr,
      denom ? static_cast<const float*>(denom->const_data_ptr()) : nullptr,
      flat_moves ? static_cast<const uint8_t*>(flat_moves->const_data_ptr()) : nullptr,
      static_cast<const uint8_t*>(flat_bits.const_data_ptr()),
      static_cast<const float*>(flat_scales.const_data_ptr()),
      static_cast<float>(step_size),
      block_size};
  const cudaStream_t stream = current_stream(bits.get_device_index());
  in_tables(list, block, [&](const Table<OnebitParam>& table, int64_t first, int64_t last) {
    adam_kernel<<<groups_of(last - first, kWarpsPerGroup), kThreads, 0, stream>>>(args, table,
                                                                                  first, last);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  for (auto& [param, dense] : copied) torch::stable::copy_(param, dense);
}

}  // namespace
}  // namespace mcp::cuda

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CUDA, m) {
  m.impl("onebit_compress_momentum", TORCH_BOX(&mcp::cuda::onebit_compress_momentum));
  m.impl("onebit_reduce", TORCH_BOX(&mcp::cuda::onebit_reduce));
  m.impl("onebit_adam_update", TORCH_BOX(&mcp::cuda::onebit_adam_update));
}
