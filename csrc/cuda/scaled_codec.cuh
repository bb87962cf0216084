// Device code of int8, int4 and fp8: the formulas and the cost are those of cpu/scaled_codec.h.
#pragma once

#include "cpu/scaled_codec.h"
#include "cuda/codec_warp.cuh"

namespace mcp::cuda {
namespace {

__device__ constexpr float kMaxFloat = 3.402823466e+38f;

// Codes as the low bits of a word; encode takes what is in [-kLargest, kLargest].
struct Int8Code {
  static constexpr ScaledCodec kCodec = ScaledCodec::kInt8;
  static constexpr float kLargest = 127;
  static constexpr int kBits = 8;
  __device__ static uint32_t encode(float units) {
    return static_cast<uint32_t>(__float2int_rn(units)) & 0xff;
  }
  __device__ static float decode(uint32_t code) {
    return static_cast<float>(static_cast<int>(code ^ 0x80) - 0x80);
  }
};

struct Int4Code {
  static constexpr ScaledCodec kCodec = ScaledCodec::kInt4;
  static constexpr float kLargest = 7;
  static constexpr int kBits = 4;
  __device__ static uint32_t encode(float units) {
    return static_cast<uint32_t>(__float2int_rn(units)) & 0xf;
  }
  __device__ static float decode(uint32_t code) {
    return static_cast<float>(static_cast<int>(code ^ 8) - 8);
  }
};

// E4M3 as cpu/scaled_codec-inl.h has it, where the steps are explained.
struct Fp8Code {
  static constexpr ScaledCodec kCodec = ScaledCodec::kFp8;
  static constexpr float kLargest = 448;
  static constexpr int kBits = 8;
  __device__ static uint32_t encode(float units) {
    const uint32_t bits = __float_as_uint(units), magnitude = bits & 0x7fffffff;
    uint32_t code;
    if (magnitude < (121u << 23)) {
      const float anchored = __fadd_rn(__uint_as_float(magnitude), 16384.0f);
      code = __float_as_uint(anchored) - 0x46800000u;
    } else {
      code = (magnitude + (magnitude >> 20 & 1) + 0x7ffff - (120u << 23)) >> 20;
    }
    return code | (bits >> 24 & 0x80);
  }
  __device__ static float decode(uint32_t code) {
    const uint32_t magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    if (magnitude == 0x7f) return nan_float();
    const uint32_t small = __float_as_uint(__fmul_rn(static_cast<float>(magnitude), 0.001953125f));
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    return __uint_as_float((magnitude < 8 ? small : normal) | sign);
  }
};

template <class Code>
__device__ uint32_t load_code(const uint8_t* codes, int64_t i) {
  if (Code::kBits == 8) return codes[i];
  return codes[i / 2] >> (i % 2 * 4) & 0xf;
}

struct ScaledBlock {
  float* error;      // [count], updated
  uint8_t* codes;    //
  float* scale;      // one
  int64_t count;     // elements that are no padding
  int64_t elements;  // all
};

// Largest magnitude of the warp as bits: a NaN is above infinity.
__device__ inline uint32_t highest(uint32_t magnitude) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(kAllLanes, magnitude, half));
  }
  return magnitude;
}

// Codes a row of the block: the lanes of an even element store for two where a byte holds two.
template <class Code, class Carried>
__device__ void code_row(const ScaledBlock& block, const Carried& carried, int64_t i, float scale) {
  uint32_t code = 0;
  if (i < block.count) {
    const float c = carried(i);
    if (scale > 0) {
      const float units = __fdiv_rn(c, scale);
      code = Code::encode(fmaxf(fminf(units, Code::kLargest), -Code::kLargest));
      block.error[i] = __fsub_rn(c, __fmul_rn(Code::decode(code), scale));
    } else if (scale == 0) {
      block.error[i] = c;
    }
  }
  if (Code::kBits == 8) {
    if (i < block.elements) block.codes[i] = static_cast<uint8_t>(code);
  } else {
    const uint32_t next = __shfl_xor_sync(kAllLanes, code, 1);
    if (i % 2 == 0 && i < block.elements) {
      block.codes[i / 2] = static_cast<uint8_t>(code | next << 4);
    }
  }
}

// Codes a block. carried(i) must not change before error[i] is written.
template <class Code, class Carried>
__device__ void code_values(const ScaledBlock& block, const Carried& carried, bool good) {
  const int lane = threadIdx.x % kWarp;
  uint32_t magnitude = 0;
  for (int64_t i = lane; i < block.count; i += kWarp) {
    magnitude = max(magnitude, __float_as_uint(carried(i)) & 0x7fffffff);
  }
  const float amax = __uint_as_float(highest(magnitude));
  float scale = __fdiv_rn(amax, Code::kLargest);
  if (!good || !(__fmul_rn(scale, Code::kLargest) <= kMaxFloat)) scale = nan_float();
  if (lane == 0) *block.scale = scale;
  for (int64_t row = 0; row * kWarp < block.elements; ++row) {
    code_row<Code>(block, carried, row * kWarp + lane, scale);
  }
}

template <class T>
struct CarryScaledX {
  const T* x;
  const float* error;
  __device__ float operator()(int64_t i) const { return __fadd_rn(widen(x[i]), error[i]); }
};

template <class Code, class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    scaled_compress_kernel(ScaledCompressArgs args, int64_t num_blocks) {
  const int64_t block = warp_block();
  if (block >= num_blocks) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const int64_t count = min(args.block_size, args.numel - start);
  float* error = args.error + start;
  const ScaledBlock to{error, args.codes + start * Code::kBits / 8, args.scales + block, count,
                       count};
  code_values<Code>(to, CarryScaledX<T>{static_cast<const T*>(args.x) + start, error}, true);
}

template <class Code>
__global__ void scaled_decompress_kernel(ScaledDecompressArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.numel) return;
  const float scale = args.scales[i / args.block_size];
  const float value = Code::decode(load_code<Code>(args.codes, i));
  const bool good = isfinite(scale) && isfinite(value);
  args.x[i] = good ? __fmul_rn(value, scale) : nan_float();
}

template <class Code>
struct CarryScaledMean {
  const uint8_t* rank_codes;
  const float* rank_scales;
  int64_t num_ranks;
  int64_t rank_bytes;
  int64_t num_blocks;
  float share;
  const float* error;
  __device__ float operator()(int64_t i) const {
    float total = 0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const float units = Code::decode(load_code<Code>(rank_codes + rank * rank_bytes, i));
      const float value = __fmul_rn(units, rank_scales[rank * num_blocks]);
      total = rank == 0 ? value : __fadd_rn(total, value);
    }
    return __fadd_rn(__fmul_rn(total, share), error[i]);
  }
};

template <class Code>
__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    scaled_reduce_kernel(ScaledReduceArgs args, int64_t num_blocks, float share) {
  const int64_t block = warp_block();
  if (block >= num_blocks) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const int64_t elements = min(args.block_size, args.numel - start);
  int64_t count = elements;
  if (args.counts) count = max(int64_t{0}, min(int64_t{args.counts[block]}, elements));
  bool good = true;
  for (int64_t rank = 0; rank < args.num_ranks; ++rank) {
    good = good && isfinite(args.rank_scales[rank * num_blocks + block]);
  }
  float* error = args.error + start;
  const ScaledBlock to{error, args.codes + start * Code::kBits / 8, args.scales + block, count,
                       elements};
  const int64_t rank_bytes = (args.numel * Code::kBits + 7) / 8;
  code_values<Code>(
      to,
      CarryScaledMean<Code>{args.rank_codes + start * Code::kBits / 8, args.rank_scales + block,
                            args.num_ranks, rank_bytes, num_blocks, share, error},
      good || count == 0);
}

}  // namespace
}  // namespace mcp::cuda
