// The parameter step of 1-bit Adam after the switch, many tensors in one flat layout.
//
//   m = bit ? s : -s
//   p = p * decay - (step_size * m) / denom         decay = 1 - lr * weight_decay, rounded once
//
// Without denom the momentum is of preconditioned gradients; where a bit of `moves` is 0, m is.
// Source: Tang et al., "1-bit Adam", 2021, algorithm 1; decoupled decay as torch's AdamW.
// Cost: 4.125 B read and 4 B written an element; 4 B more for denom, whose division hides.
#pragma once

#include <cstdint>

#include "common/float_types.h"
#include "cpu/codec_rows.h"

namespace mcp {

// One tensor of the layout: it begins at a block and owns the blocks up to the next one's.
struct OnebitParam {
  void* param;          // [numel] of type
  FloatType type;       // float32 where there is no master
  float decay;          //
  int64_t numel;        //
  int64_t first_block;  //
};

struct OnebitAdamArgs {
  const OnebitParam* params;  // [num_params], in the order of their blocks, none empty
  int64_t num_params;         //
  float* master;              // [num_blocks * block_size], or null
  const float* denom;         // [num_blocks * block_size], or null
  const uint8_t* moves;       // as bits, or null
  const uint8_t* bits;        // [num_blocks * block_size / 8]
  const float* scales;        // [num_blocks]
  float step_size;            //
  int64_t block_size;         // a positive multiple of 8
};

// Each body does blocks [first, last) of those that hold a tensor's elements.
#define MCP_DECLARE_ADAM(isa)                                                       \
  namespace isa {                                                                   \
  void onebit_adam_update(const OnebitAdamArgs& args, int64_t first, int64_t last); \
  }
MCP_DECLARE_ADAM(scalar)
MCP_DECLARE_ADAM(avx2)
MCP_DECLARE_ADAM(avx512)
#undef MCP_DECLARE_ADAM

}  // namespace mcp
