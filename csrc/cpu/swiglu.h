// SwiGLU's gate and its gradient. No torch here.
//
//   e = exp(-|gate|)                       sigma(gate) = 1 / (1 + e), or e / (1 + e) below 0
//   y      = gate sigma up
//   d_up   = dy gate sigma
//   d_gate = dy up sigma (1 + gate (1 - sigma))
//
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.
// Cost: 12 bytes an element forward and 20 backward in float32, ~20 and ~25 flops.
//
// Computed in float32, in float64 for float64, and rounded once. e is within (0.75 |gate| + 4) eps
// of exact, relatively: the exponent is rounded before the power is taken.
#pragma once

#include <cstdint>

#include "cpu/element_type.h"

namespace mcp {

struct SwigluArgs {
  ElementType type;
  ConstRows gate, up;
  void* y;  // [num_rows, width]
  int64_t width;
};

struct SwigluBackwardArgs {
  ElementType type;
  ConstRows dy, gate, up;
  void* dgate;  // [num_rows, width]
  void* dup;    // [num_rows, width]
  int64_t width;
};

// Elements [first, last) of the rows laid end to end; one row may be all of them.
#define MCP_DECLARE_SWIGLU(isa)                                                 \
  namespace isa {                                                               \
  void swiglu(const SwigluArgs& args, int64_t first, int64_t last);             \
  void swiglu_bwd(const SwigluBackwardArgs& args, int64_t first, int64_t last); \
  }
MCP_DECLARE_SWIGLU(scalar)
MCP_DECLARE_SWIGLU(avx2)
MCP_DECLARE_SWIGLU(avx512)
#undef MCP_DECLARE_SWIGLU

}  // namespace mcp
