// onebit_compress on CUDA: a warp does a block, and the 32 lanes of the sum are the warp's lanes.
//
// The formula, the order of additions and the cost are those of cpu/onebit_compress.h; bits,
// scales and errors equal the CPU's. A block of up to 1024 elements stays in registers between the
// sweeps; a larger one is read twice, the second time from the L2 cache while it fits there.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "common/check.h"
#include "cpu/onebit_compress.h"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarp = 32;
static_assert(kWarp == kRow, "the definition's lanes are a warp's");
constexpr int kWarpsPerGroup = 8;  // 256 threads: full occupancy with 64 registers a thread
constexpr int kCachedRows = 32;    // a block of 1024 elements is 32 registers a lane
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ float widen(float value) { return value; }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float widen(__half value) { return __half2float(value); }

// Lane l + lane l + 16, then 8, 4, 2, 1. Addition commutes, so every lane ends with the same bits.
__device__ double total(double lane_sum) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    lane_sum = __dadd_rn(lane_sum, __shfl_xor_sync(kAllLanes, lane_sum, half));
  }
  return lane_sum;
}

__device__ float block_scale(double lane_sum, int64_t count) {
  const double mean = __ddiv_rn(total(lane_sum), static_cast<double>(count));
  return __double2float_rn(__dsqrt_rn(mean));
}

__device__ void store_signs(uint8_t* to, uint32_t signs, int count) {
  for (int byte = 0; 8 * byte < count; ++byte) {
    to[byte] = static_cast<uint8_t>(signs >> (8 * byte));
  }
}

// One row of the first sweep: c of this lane, its square into the sum, the row's signs into the
// lane that will store them. Signs of 32 rows leave together, as one coalesced store.
template <class T>
__device__ float take_row(const T* x, const float* error, uint8_t* bits, int64_t row, int64_t count,
                          int lane, bool whole_words, double& lane_sum, uint32_t& signs) {
  const int64_t i = row * kWarp + lane;
  const float c = i < count ? __fadd_rn(widen(x[i]), error[i]) : 0.0f;
  const double wide = c;
  lane_sum = __dadd_rn(lane_sum, __dmul_rn(wide, wide));
  const uint32_t row_signs = __ballot_sync(kAllLanes, i < count && c >= 0);
  if (row % kWarp == lane) signs = row_signs;

  const bool last_row = (row + 1) * kWarp >= count;
  if (row % kWarp == kWarp - 1 || last_row) {
    const int64_t mine = row / kWarp * kWarp + lane;  // the row whose signs this lane holds
    if (mine <= row) {
      uint8_t* to = bits + mine * (kWarp / 8);
      if (whole_words && (mine + 1) * kWarp <= count) {
        *reinterpret_cast<uint32_t*>(to) = signs;
      } else {
        store_signs(to, signs, static_cast<int>(min(count - mine * kWarp, int64_t{kWarp})));
      }
    }
  }
  return c;
}

__device__ float residual(float c, float scale) { return __fsub_rn(c, c >= 0 ? scale : -scale); }

template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    compress_kernel(OnebitCompressArgs args, int64_t num_blocks) {
  const int lane = threadIdx.x % kWarp;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarpsPerGroup + threadIdx.x / kWarp;
  if (block >= num_blocks) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const int64_t count = min(args.block_size, args.numel - start);
  const int64_t num_rows = (count + kWarp - 1) / kWarp;
  const bool whole_words = args.block_size % kWarp == 0;  // then every block starts at a word
  const T* x = static_cast<const T*>(args.x) + start;
  float* error = args.error + start;
  uint8_t* bits = args.bits + start / 8;

  double lane_sum = 0;
  uint32_t signs = 0;
  float cached[kCachedRows];
  const bool fits = num_rows <= kCachedRows;
  if (fits) {
#pragma unroll
    for (int row = 0; row < kCachedRows; ++row) {
      if (row < num_rows) {
        cached[row] = take_row(x, error, bits, row, count, lane, whole_words, lane_sum, signs);
      }
    }
  } else {
    for (int64_t row = 0; row < num_rows; ++row) {
      take_row(x, error, bits, row, count, lane, whole_words, lane_sum, signs);
    }
  }

  const float scale = block_scale(lane_sum, count);
  if (!isfinite(scale)) {
    if (lane == 0) args.scales[block] = __int_as_float(0x7fc00000);
    return;
  }
  if (lane == 0) args.scales[block] = scale;
  if (fits) {
#pragma unroll
    for (int row = 0; row < kCachedRows; ++row) {
      const int64_t i = row * kWarp + lane;
      if (i < count) error[i] = residual(cached[row], scale);
    }
  } else {
    for (int64_t i = lane; i < count; i += kWarp) {
      error[i] = residual(__fadd_rn(widen(x[i]), error[i]), scale);
    }
  }
}

// A thread does a byte: its 8 elements share a block, since block sizes are multiples of 8.
__global__ void decompress_kernel(OnebitDecompressArgs args) {
  const int64_t byte = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t start = byte * 8;
  if (start >= args.numel) return;
  const uint32_t signs = args.bits[byte];
  const float scale = args.scales[start / args.block_size];
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = signs >> i & 1 ? scale : -scale;
  if (start + 8 <= args.numel) {
    float4* to = reinterpret_cast<float4*>(args.x + start);  // 32-byte aligned: 8 elements each
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (start + i < args.numel) args.x[start + i] = x[i];
    }
  }
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

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
