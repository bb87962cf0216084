// Root-mean-square norm of rows, after an addition or not, and its gradient. No torch here.
//
//   s  = x + residual                      rounded to the type of x; x itself without a residual
//   r  = 1 / sqrt(mean(s^2) + eps)         one number a row
//   y  = s r w
//   p  = sum(dy w s) r^3 / D               of a row
//   ds = r dy w - s p + dsum               dsum: the gradient of s from elsewhere, where there is
//   dw = sum over rows of dy s r
//
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
// Cost: each tensor is read and written once from memory (a row stays in L1 for its second pass):
// 8 bytes an element forward and 12 backward in float32, ~4 and ~9 flops.
//
// Sums run in float32, in float64 for float64; each result is rounded once. The order of every sum
// follows from the shapes alone, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/element_type.h"

namespace mcp {

// Rows of dw that one task adds up: enough that the partial sums are a small part of the traffic,
// few enough that small batches have tasks for several threads.
constexpr int64_t kNormRowsOfPart = 64;
// And at most so many parts, however many rows there are.
constexpr int64_t kNormMostParts = 64;

constexpr int64_t norm_rows_of_part(int64_t num_rows) {
  const int64_t least = (num_rows + kNormMostParts - 1) / kNormMostParts;
  return least > kNormRowsOfPart ? least : kNormRowsOfPart;
}

struct RmsNormArgs {
  ElementType type;
  ConstRows x, residual;  // residual.data null: none
  const void* weight;     // [width] scalars that sums run in, as scale
  double eps;
  void* sum;      // [num_rows, width], null without a residual
  void* y;        // [num_rows, width]
  void* scale;    // [num_rows]: r
  int64_t width;  // >= 1
};

struct RmsNormBackwardArgs {
  ElementType type;
  ConstRows dy, dsum, s;  // dsum.data null: none
  const void* weight;     // [width] scalars, as scale and dweight_parts
  const void* scale;      // [num_rows]
  void* ds;               // [num_rows, width]
  void* dweight_parts;    // [parts, width]: sums over norm_rows_of_part(num_rows) rows each
  int64_t num_rows, width;
};

// rms_norm does rows [first, last), rms_norm_bwd parts [first, last).
#define MCP_DECLARE_RMS_NORM(isa)                                                  \
  namespace isa {                                                                  \
  void rms_norm(const RmsNormArgs& args, int64_t first, int64_t last);             \
  void rms_norm_bwd(const RmsNormBackwardArgs& args, int64_t first, int64_t last); \
  }
MCP_DECLARE_RMS_NORM(scalar)
MCP_DECLARE_RMS_NORM(avx2)
MCP_DECLARE_RMS_NORM(avx512)
#undef MCP_DECLARE_RMS_NORM

}  // namespace mcp
