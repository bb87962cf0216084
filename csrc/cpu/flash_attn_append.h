// Rows of new keys, values and queries on their way into a cache: rotated, rounded, written.
// No torch here.
//
//   (a, b) -> (a cos - b sin, a sin + b cos)     for each pair of the first 2 * num_pairs elements
//
// Source: Su et al., "RoFormer", 2021, section 3.4.2. mcp_kernels/ops/rotary.py is the definition.
// Products and sums are rounded one by one, in float32 (float64 for float64), as there.
#pragma once

#include "cpu/flash_attn.h"

namespace mcp {

// The angles of one position, as floats (doubles for float64).
struct Rotation {
  const void *cos, *sin;  // [num_pairs]; null: nothing is rotated
  int64_t num_pairs;
  bool is_interleaved;  // pairs are (0, 1), (2, 3), ..; else (0, num_pairs), (1, num_pairs + 1), ..
};

// Writes one row of `width` elements, from_dim and to_dim elements apart.
void write_row(AttnType type, const Rotation& rotation, const void* from, int64_t from_dim,
               void* to, int64_t to_dim, int64_t width);

int64_t attn_element_bytes(AttnType type);

}  // namespace mcp
