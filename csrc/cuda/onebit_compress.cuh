// Device code of onebit_compress: the formula and the cost are those of cpu/onebit_compress.h.
#pragma once

#include "cpu/onebit_compress.h"
#include "cuda/codec_warp.cuh"

namespace mcp::cuda {
namespace {

template <class T>
struct CarryX {
  const T* x;
  const float* error;
  __device__ float operator()(int64_t i) const { return __fadd_rn(widen(x[i]), error[i]); }
};

template <class T>
__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    compress_kernel(OnebitCompressArgs args, int64_t num_blocks) {
  const int64_t block = warp_block();
  if (block >= num_blocks) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const int64_t count = min(args.block_size, args.numel - start);
  float* error = args.error + start;
  const SignBlock to{error, args.bits + start / 8,       args.scales + block, count,
                     count, args.block_size % kWarp == 0};
  code_signs(to, CarryX<T>{static_cast<const T*>(args.x) + start, error});
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
