// int8, int4 and fp8 on CUDA, the torch side: check, allocate, launch, register.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "cuda/codec_launch.h"
// The words come first: the kernels are written in them.
#include "cuda/scaled_codec.cuh"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

constexpr int kThreads = kWarp * kWarpsPerGroup;

template <class Code>
int64_t num_code_bytes(int64_t numel) {
  return ceil_div(numel * Code::kBits, 8);
}

template <class Code>
std::tuple<Tensor, Tensor> compress(Tensor x, Tensor error, int64_t block_size) {
  constexpr const char* kOp = names_of(Code::kCodec).compress;
  const FloatType x_type = float_type(kOp, x);
  const int64_t numel = x.numel(), num_blocks = ceil_div(numel, block_size);
  check_block_size(kOp, block_size);
  check_flat(kOp, "error", error, x, numel);

  const DeviceGuard guard(x.get_device_index());
  const Tensor flat = torch::stable::contiguous(x);
  Tensor codes = torch::stable::new_empty(x, {num_code_bytes<Code>(numel)}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, {num_blocks}, ScalarType::Float);
  if (numel == 0) return {codes, scales};
  const ScaledCompressArgs args{flat.const_data_ptr(),
                                x_type,
                                static_cast<float*>(error.mutable_data_ptr()),
                                static_cast<uint8_t*>(codes.mutable_data_ptr()),
                                static_cast<float*>(scales.mutable_data_ptr()),
                                numel,
                                block_size};
  const unsigned grid = groups_of(num_blocks, kWarpsPerGroup);
  const cudaStream_t stream = current_stream(x.get_device_index());
  switch (x_type) {
    case FloatType::kFloat32:
      scaled_compress_kernel<Code, float><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
    case FloatType::kBFloat16:
      scaled_compress_kernel<Code, __nv_bfloat16><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
    case FloatType::kFloat16:
      scaled_compress_kernel<Code, __half><<<grid, kThreads, 0, stream>>>(args, num_blocks);
      break;
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {codes, scales};
}

template <class Code>
Tensor decompress(Tensor codes, Tensor scales, int64_t numel, int64_t block_size) {
  constexpr const char* kOp = names_of(Code::kCodec).decompress;
  STD_TORCH_CHECK(numel >= 0, kOp, ": numel must be >= 0, got ", numel);
  check_block_size(kOp, block_size);
  check_dtype(kOp, "codes", codes, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  check_numel(kOp, "codes", codes, num_code_bytes<Code>(numel));
  check_numel(kOp, "scales", scales, ceil_div(numel, block_size));
  check_device(kOp, "scales", scales, codes);

  const DeviceGuard guard(codes.get_device_index());
  const Tensor flat_codes = torch::stable::contiguous(codes);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  Tensor x = torch::stable::new_empty(scales, {numel}, ScalarType::Float);
  if (numel == 0) return x;
  const ScaledDecompressArgs args{static_cast<const uint8_t*>(flat_codes.const_data_ptr()),
                                  static_cast<const float*>(flat_scales.const_data_ptr()),
                                  static_cast<float*>(x.mutable_data_ptr()), numel, block_size};
  const auto grid = static_cast<unsigned>(ceil_div(numel, kThreads));
  const cudaStream_t stream = current_stream(codes.get_device_index());
  scaled_decompress_kernel<Code><<<grid, kThreads, 0, stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return x;
}

template <class Code>
std::tuple<Tensor, Tensor> reduce(Tensor codes, Tensor scales, Tensor server_error,
                                  std::optional<Tensor> counts, int64_t block_size) {
  constexpr const char* kOp = names_of(Code::kCodec).reduce;
  check_block_size(kOp, block_size);
  check_dtype(kOp, "codes", codes, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  STD_TORCH_CHECK(codes.dim() == 2 && codes.size(0) >= 1, kOp, ": codes must be [W, bytes]");
  const int64_t numel = server_error.numel(), num_ranks = codes.size(0);
  const int64_t num_blocks = ceil_div(numel, block_size);
  check_numel(kOp, "codes", codes, num_ranks, num_code_bytes<Code>(numel));
  check_numel(kOp, "scales", scales, num_ranks, num_blocks);
  check_device(kOp, "scales", scales, codes);
  check_flat(kOp, "server_error", server_error, codes, numel);

  const DeviceGuard guard(codes.get_device_index());
  const Tensor flat_codes = torch::stable::contiguous(codes);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  std::optional<Tensor> flat_counts;
  if (counts.has_value()) {
    check_dtype(kOp, "counts", *counts, ScalarType::Int);
    check_numel(kOp, "counts", *counts, num_blocks);
    check_device(kOp, "counts", *counts, codes);
    flat_counts = torch::stable::contiguous(*counts);
  }
  Tensor new_codes =
      torch::stable::new_empty(codes, {num_code_bytes<Code>(numel)}, ScalarType::Byte);
  Tensor new_scales = torch::stable::new_empty(scales, {num_blocks}, ScalarType::Float);
  if (num_blocks == 0) return {new_codes, new_scales};
  const ScaledReduceArgs args{
      static_cast<const uint8_t*>(flat_codes.const_data_ptr()),
      static_cast<const float*>(flat_scales.const_data_ptr()),
      num_ranks,
      flat_counts ? static_cast<const int32_t*>(flat_counts->const_data_ptr()) : nullptr,
      static_cast<float*>(server_error.mutable_data_ptr()),
      static_cast<uint8_t*>(new_codes.mutable_data_ptr()),
      static_cast<float*>(new_scales.mutable_data_ptr()),
      numel,
      block_size};
  const auto share = static_cast<float>(1.0 / static_cast<double>(num_ranks));
  const cudaStream_t stream = current_stream(codes.get_device_index());
  scaled_reduce_kernel<Code>
      <<<groups_of(num_blocks, kWarpsPerGroup), kThreads, 0, stream>>>(args, num_blocks, share);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {new_codes, new_scales};
}

}  // namespace
}  // namespace mcp::cuda

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CUDA, m) {
  using namespace mcp::cuda;
  m.impl("int8_compress", TORCH_BOX(&compress<Int8Code>));
  m.impl("int8_decompress", TORCH_BOX(&decompress<Int8Code>));
  m.impl("int8_reduce", TORCH_BOX(&reduce<Int8Code>));
  m.impl("int4_compress", TORCH_BOX(&compress<Int4Code>));
  m.impl("int4_decompress", TORCH_BOX(&decompress<Int4Code>));
  m.impl("int4_reduce", TORCH_BOX(&reduce<Int4Code>));
  m.impl("fp8_compress", TORCH_BOX(&compress<Fp8Code>));
  m.impl("fp8_decompress", TORCH_BOX(&decompress<Fp8Code>));
  m.impl("fp8_reduce", TORCH_BOX(&reduce<Fp8Code>));
}
