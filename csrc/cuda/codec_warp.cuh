// What the codecs' kernels share: a warp does a block, and its 32 lanes are the definition's.
//
// The order of additions is that of mcp_kernels/ops/_blocks.py; bits, scales and errors equal the
// CPU's. A block of up to 1024 elements stays in registers between the sweeps; a larger one is
// computed twice, the second time from the L2 cache while it fits there.
//
// Includes no CUDA header and no torch: the file that includes it brings the CUDA words. In tests
// that is a host file, whose warp is 32 coroutines.
#pragma once

#include <cstdint>

#include "common/float_types.h"
#include "cpu/codec_rows.h"

namespace mcp::cuda {
namespace {

constexpr int kWarp = 32;
static_assert(kWarp == kRow, "the definition's lanes are a warp's");
constexpr int kWarpsPerGroup = 8;  // 256 threads: full occupancy with 64 registers a thread
constexpr int kCachedRows = 32;    // a block of 1024 elements is 32 registers a lane
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }

__device__ inline float nan_float() { return __int_as_float(0x7fc00000); }

// Element i of x, whose type is known at run time; the branch is the same for the whole warp.
__device__ inline float read_as(FloatType type, const void* x, int64_t i) {
  if (type == FloatType::kFloat32) return static_cast<const float*>(x)[i];
  if (type == FloatType::kBFloat16) return widen(static_cast<const __nv_bfloat16*>(x)[i]);
  return widen(static_cast<const __half*>(x)[i]);
}

// scale where bit i of the packed signs is set, -scale elsewhere.
__device__ inline float decode_sign(const uint8_t* bits, int64_t i, float scale) {
  return bits[i / 8] >> (i % 8) & 1 ? scale : -scale;
}

// Lane l + lane l + 16, then 8, 4, 2, 1. Addition commutes, so every lane ends with the same bits.
__device__ inline double total(double lane_sum) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    lane_sum = __dadd_rn(lane_sum, __shfl_xor_sync(kAllLanes, lane_sum, half));
  }
  return lane_sum;
}

__device__ inline float block_scale(double lane_sum, int64_t count) {
  if (count == 0) return 0;
  const double mean = __ddiv_rn(total(lane_sum), static_cast<double>(count));
  return __double2float_rn(__dsqrt_rn(mean));
}

__device__ inline void store_signs(uint8_t* to, uint32_t signs, int count) {
  for (int byte = 0; 8 * byte < count; ++byte) {
    to[byte] = static_cast<uint8_t>(signs >> (8 * byte));
  }
}

// The block that this warp does, of a grid of kWarpsPerGroup warps a group.
__device__ inline int64_t warp_block() {
  return static_cast<int64_t>(blockIdx.x) * kWarpsPerGroup + threadIdx.x / kWarp;
}

// A block of codes in memory; what is carried comes from a function of the element.
struct SignBlock {
  float* error;      // [count], updated
  uint8_t* bits;     // [ceil(elements / 8)]
  float* scale;      // one
  int64_t count;     // elements that are no padding
  int64_t elements;  // all
  bool whole_words;  // every block starts at a word of signs
};

// One row of the first sweep: c of this lane, its square into the sum, the row's signs into the
// lane that will store them. Signs of 32 rows leave together, as one coalesced store.
template <class Carried>
__device__ float take_row(const SignBlock& block, const Carried& carried, int64_t row, int lane,
                          double& lane_sum, uint32_t& signs) {
  const int64_t i = row * kWarp + lane, count = block.count;
  const float c = i < count ? carried(i) : 0.0f;
  const double wide = c;
  lane_sum = __dadd_rn(lane_sum, __dmul_rn(wide, wide));
  const uint32_t row_signs = __ballot_sync(kAllLanes, i < count && c >= 0);
  if (row % kWarp == lane) signs = row_signs;

  const bool last_row = (row + 1) * kWarp >= count;
  if (row % kWarp == kWarp - 1 || last_row) {
    const int64_t mine = row / kWarp * kWarp + lane;  // the row whose signs this lane holds
    if (mine <= row) {
      uint8_t* to = block.bits + mine * (kWarp / 8);
      if (block.whole_words && (mine + 1) * kWarp <= count) {
        *reinterpret_cast<uint32_t*>(to) = signs;
      } else {
        store_signs(to, signs, static_cast<int>(min(count - mine * kWarp, int64_t{kWarp})));
      }
    }
  }
  return c;
}

__device__ inline float residual(float c, float scale) {
  return __fsub_rn(c, c >= 0 ? scale : -scale);
}

// Codes a block: bits, scale, new error. carried(i) must not change before error[i] is written.
template <class Carried>
__device__ void code_signs(const SignBlock& block, const Carried& carried) {
  const int lane = threadIdx.x % kWarp;
  const int64_t num_rows = (block.count + kWarp - 1) / kWarp;
  double lane_sum = 0;
  uint32_t signs = 0;
  float cached[kCachedRows];
  const bool fits = num_rows <= kCachedRows;
  if (fits) {
#pragma unroll
    for (int row = 0; row < kCachedRows; ++row) {
      if (row < num_rows) cached[row] = take_row(block, carried, row, lane, lane_sum, signs);
    }
  } else {
    for (int64_t row = 0; row < num_rows; ++row) {
      take_row(block, carried, row, lane, lane_sum, signs);
    }
  }
  for (int64_t byte = (block.count + 7) / 8 + lane; byte < (block.elements + 7) / 8;
       byte += kWarp) {
    block.bits[byte] = 0;
  }

  const float scale = block_scale(lane_sum, block.count);
  const bool good = isfinite(scale);
  if (lane == 0) *block.scale = good ? scale : nan_float();
  if (!good) return;
  if (fits) {
#pragma unroll
    for (int row = 0; row < kCachedRows; ++row) {
      const int64_t i = row * kWarp + lane;
      if (i < block.count) block.error[i] = residual(cached[row], scale);
    }
  } else {
    for (int64_t i = lane; i < block.count; i += kWarp) {
      block.error[i] = residual(carried(i), scale);
    }
  }
}

}  // namespace
}  // namespace mcp::cuda
