// Sign compression with error feedback, one scale a block.
//
//   c     = x + error                      float32
//   bits  = c >= 0                         bit i of byte j is element 8j + i; spare bits are 0
//   s     = sqrt(sum(c^2) / count)         one for each block, rounded to float32 once
//   error = c - (bit ? s : -s)             kept as it was where s is not finite; s is NaN there
//
// Source: Tang et al., "1-bit Adam", 2021, section 4.
// Cost: 8 B read and 4.125 B written an element (float32 x), ~6 flops.
//
// Equal bits on every path: the sum of squares runs in 32 float64 lanes by index mod 32, then lane
// l adds lane l + 16, l + 8, + 4, + 2, + 1. See mcp_kernels/ops/onebit_compress.py, the definition.
#pragma once

#include <cstdint>

#include "common/float_types.h"
#include "cpu/codec_rows.h"

namespace mcp {

struct OnebitCompressArgs {
  const void* x;       // [numel] of x_type
  FloatType x_type;    //
  float* error;        // [numel], updated in place; may be x itself
  uint8_t* bits;       // [ceil(numel / 8)]
  float* scales;       // [ceil(numel / block_size)]
  int64_t numel;       //
  int64_t block_size;  // a positive multiple of 8
};

struct OnebitDecompressArgs {
  const uint8_t* bits;  // [ceil(numel / 8)]
  const float* scales;  // [ceil(numel / block_size)]
  float* x;             // [numel]
  int64_t numel;        //
  int64_t block_size;   // a positive multiple of 8
};

// Each body does blocks [first, last), so that threads can share a call.
#define MCP_DECLARE_ONEBIT(isa)                                                          \
  namespace isa {                                                                        \
  void onebit_compress(const OnebitCompressArgs& args, int64_t first, int64_t last);     \
  void onebit_decompress(const OnebitDecompressArgs& args, int64_t first, int64_t last); \
  }
MCP_DECLARE_ONEBIT(scalar)
MCP_DECLARE_ONEBIT(avx2)
MCP_DECLARE_ONEBIT(avx512)
#undef MCP_DECLARE_ONEBIT

}  // namespace mcp
