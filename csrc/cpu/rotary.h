// Rotary position embedding in half-rotation form. No torch here.
//
//   a, b = x[j], x[j + K / 2]              a pair of one head, j < K / 2
//   y[j], y[j + K / 2] = a cos - b sin, b cos + a sin
//
// with the angle of its position and j. The gradient is the rotation back: sin negated.
//
// Source: Su et al., "RoFormer", 2021, section 3.4.2.
// Cost: 8 bytes an element in float32 (tables stay in cache), 3 flops.
//
// Computed in float32, in float64 for float64, every product and sum rounded: the bits of every
// instruction set are those of the definition.
#pragma once

#include <cstdint>

#include "cpu/element_type.h"

namespace mcp {

struct RotaryArgs {
  ElementType type;
  const void* x;                                  // [B, S, H, K] with neighbouring features
  int64_t batch_stride, row_stride, head_stride;  // in elements
  void* y;                                        // [B, S, H, K]
  const void* cos;                                // [S, K / 2] scalars that it is computed in
  const void* sin;                                // [S, K / 2]
  int64_t seq_len, heads, half;                   // half = K / 2
  bool back;                                      // rotate the other way
};

// Positions [first, last) of the B * S.
#define MCP_DECLARE_ROTARY(isa)                                     \
  namespace isa {                                                   \
  void rotary(const RotaryArgs& args, int64_t first, int64_t last); \
  }
MCP_DECLARE_ROTARY(scalar)
MCP_DECLARE_ROTARY(avx2)
MCP_DECLARE_ROTARY(avx512)
#undef MCP_DECLARE_ROTARY

}  // namespace mcp
