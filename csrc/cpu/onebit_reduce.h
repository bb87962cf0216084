// The mean of W ranks' 1-bit codes, with the server's error, coded again.
//
//   u     = (v_0 + v_1 + ... in rank order) * (1 / W) + error     v_r = bit ? s_r : -s_r
//   bits, s', error' of u                  as onebit_compress; bits of padding are 0
//
// Source: Tang et al., "1-bit Adam", 2021, section 4.
// Cost: W / 8 + 4 B read and 4.125 B written an element, ~W + 8 flops.
#pragma once

#include <cstdint>

#include "cpu/codec_rows.h"

namespace mcp {

struct OnebitReduceArgs {
  const uint8_t* rank_bits;  // [num_ranks, ceil(numel / 8)]
  const float* rank_scales;  // [num_ranks, num_blocks]
  int64_t num_ranks;         // >= 1
  const int32_t* counts;     // [num_blocks], or null: every block is full up to numel
  float* error;              // [numel], updated in place
  uint8_t* bits;             // [ceil(numel / 8)]
  float* scales;             // [num_blocks]
  int64_t numel;             //
  int64_t block_size;        // a positive multiple of 8
};

// Each body does blocks [first, last); `carried` is scratch of a block.
#define MCP_DECLARE_REDUCE(isa)                                                                  \
  namespace isa {                                                                                \
  void onebit_reduce(const OnebitReduceArgs& args, int64_t first, int64_t last, float* carried); \
  }
MCP_DECLARE_REDUCE(scalar)
MCP_DECLARE_REDUCE(avx2)
MCP_DECLARE_REDUCE(avx512)
#undef MCP_DECLARE_REDUCE

}  // namespace mcp
