// Momentum update and sign compression with error feedback, many tensors in one flat layout.
//
//   g     = grad * grad_scale              times the preconditioner where there is one
//   m     = bit ? s : -s                   the momentum that the old codes say
//   c     = (beta1 * m + (1 - beta1) * g) + error          every operation rounded to float32
//   bits, s', error' of c                  as onebit_compress; bits of padding are 0
//
// Source: Tang et al., "1-bit Adam", 2021, section 4.
// Cost: 8.125 B read and 4.125 B written an element (float32 gradient), ~12 flops; 2 B more read
// of a preconditioner.
#pragma once

#include <cstdint>

#include "common/float_types.h"
#include "cpu/codec_rows.h"

namespace mcp {

// One tensor of the layout: it begins at a block and owns the blocks up to the next one's.
struct OnebitGrad {
  const void* grad;     // [numel] of type
  FloatType type;       //
  int64_t numel;        //
  int64_t first_block;  //
};

struct OnebitMomentumArgs {
  const OnebitGrad* grads;         // [num_grads], in the order of their blocks, none empty
  int64_t num_grads;               //
  const BFloat16* preconditioner;  // [num_blocks * block_size], or null
  const uint8_t* old_bits;         // [num_blocks * block_size / 8]
  const float* old_scales;         // [num_blocks]
  float* error;                    // [num_blocks * block_size], updated in place
  uint8_t* bits;                   // as old_bits
  float* scales;                   // as old_scales
  float beta1;                     //
  float one_minus_beta1;           // rounded once, from float64
  float grad_scale;                //
  int64_t num_blocks;              // those of padding alone, at the end, included
  int64_t block_size;              // a positive multiple of 8
};

// Each body does blocks [first, last), so that threads can share a call. `carried` is scratch of a
// block, which stays in the nearest cache up to 4096 elements.
#define MCP_DECLARE_MOMENTUM(isa)                                                            \
  namespace isa {                                                                            \
  void onebit_compress_momentum(const OnebitMomentumArgs& args, int64_t first, int64_t last, \
                                float* carried);                                             \
  }
MCP_DECLARE_MOMENTUM(scalar)
MCP_DECLARE_MOMENTUM(avx2)
MCP_DECLARE_MOMENTUM(avx512)
#undef MCP_DECLARE_MOMENTUM

}  // namespace mcp
