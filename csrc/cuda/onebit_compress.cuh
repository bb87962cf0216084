// Device code of onebit_compress: a warp does a block, and the 32 lanes of the sum are its lanes.
//
// The formula, the order of additions and the cost are those of cpu/onebit_compress.h; bits,
// scales and errors equal the CPU's. A block of up to 1024 elements stays in registers between the
// sweeps; a larger one is read twice, the second time from the L2 cache while it fits there.
//
// Includes no CUDA header and no torch: the file that includes it brings the CUDA words. In tests
// that is a host file, whose warp is 32 threads.
#pragma once

#include "cpu/onebit_compress.h"

namespace mcp::cuda {
namespace {

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

}  // namespace
}  // namespace mcp::cuda
