// onebit_compress on CUDA, the torch side: check, allocate, launch, register.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/codec_launch.h"
// The words come first: the kernels are written in them.
#include "cuda/onebit_compress.cuh"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void launch_compress(const OnebitCompressArgs& args, cudaStream_t stream) {
  const int64_t num_blocks = ceil_div(args.numel, args.block_size);
  const auto grid = static_cast<unsigned>(ceil_div(num_blocks, kWarpsPerGroup));
  constexpr int kThreads = kWarp * kWarpsPerGroup;
  switch (args.x_type) {
    case FloatType::kFloat32:
      compress_kernel<float><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
    case FloatType::kBFloat16:
      compress_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
    case FloatType::kFloat16:
      compress_kernel<__half><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> onebit_compress(Tensor x, Tensor error, int64_t block_size) {
  constexpr const char* kOp = "onebit_compress";
  const FloatType x_type = float_type(kOp, x);
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);
  check_dtype(kOp, "error", error, ScalarType::Float);
  check_numel(kOp, "error", error, numel);
  STD_TORCH_CHECK(error.is_contiguous(), kOp, ": error must be contiguous");
  STD_TORCH_CHECK(error.get_device_index() == x.get_device_index() && error.is_cuda(), kOp,
                  ": error must be on the device of x");

  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor flat = torch::stable::contiguous(x);
  Tensor bits = torch::stable::new_empty(x, {ceil_div(numel, 8)}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, {ceil_div(numel, block_size)}, ScalarType::Float);
  if (numel == 0) return {bits, scales};
  const OnebitCompressArgs args{flat.const_data_ptr(),
                                x_type,
                                static_cast<float*>(error.mutable_data_ptr()),
                                static_cast<uint8_t*>(bits.mutable_data_ptr()),
                                static_cast<float*>(scales.mutable_data_ptr()),
                                numel,
                                block_size};
  launch_compress(args, current_stream(x.get_device_index()));
  return {bits, scales};
}

Tensor onebit_decompress(Tensor bits, Tensor scales, int64_t numel, int64_t block_size) {
  constexpr const char* kOp = "onebit_decompress";
  STD_TORCH_CHECK(numel >= 0, kOp, ": numel must be >= 0, got ", numel);
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  check_numel(kOp, "bits", bits, ceil_div(numel, 8));
  check_numel(kOp, "scales", scales, ceil_div(numel, block_size));
  STD_TORCH_CHECK(
      bits.is_cuda() && scales.is_cuda() && bits.get_device_index() == scales.get_device_index(),
      kOp, ": scales must be on the device of bits");

  const torch::stable::accelerator::DeviceGuard guard(bits.get_device_index());
  const Tensor flat_bits = torch::stable::contiguous(bits);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  Tensor x = torch::stable::new_empty(scales, {numel}, ScalarType::Float);
  if (numel == 0) return x;
  const OnebitDecompressArgs args{static_cast<const uint8_t*>(flat_bits.const_data_ptr()),
                                  static_cast<const float*>(flat_scales.const_data_ptr()),
                                  static_cast<float*>(x.mutable_data_ptr()), numel, block_size};
  constexpr int kThreads = 256;
  const auto grid = static_cast<unsigned>(ceil_div(ceil_div(numel, 8), kThreads));
  decompress_kernel<<<grid, kThreads, 0, current_stream(bits.get_device_index())>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return x;
}

}  // namespace
}  // namespace mcp::cuda

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CUDA, m) {
  m.impl("onebit_compress", TORCH_BOX(&mcp::cuda::onebit_compress));
  m.impl("onebit_decompress", TORCH_BOX(&mcp::cuda::onebit_decompress));
}
