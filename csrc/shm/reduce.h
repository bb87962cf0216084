// Elementwise reduction over the ranks' copies of a tensor.
//
//   out[i] = round(x_0[i] op x_1[i] op ... op x_{R-1}[i])       / R for an average
//
// Taken from left to right, 16-bit floats widened to float32 and rounded once at the end (nearest,
// ties to even; NaN stays NaN). Integers wrap; an average of integers is cut towards zero. So ranks
// that reduce the same copies hold the same bits, on every instruction set.
// Cost: R reads and 1 or 2 writes of each element, R - 1 operations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mcp::shm {

enum class Type : uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8
};
enum class Reduction : uint8_t { kSum, kProduct, kMin, kMax, kAnd, kOr, kXor };

struct ReduceArgs {
  const void* const* sources;  // [num_sources] of [n]; one of them may be `out`
  int num_sources;             // >= 1
  void* out;                   // [n]
  void* copy;                  // [n], gets the same as `out`; null for none
  size_t n;                    // elements
  bool average;                // divide by num_sources
};

using ReduceFunction = void (*)(const ReduceArgs&);

// Null where the reduction makes no sense for the type (bits of floats).
namespace scalar {
ReduceFunction find_reduce(Type type, Reduction reduction);
}
namespace avx2 {
ReduceFunction find_reduce(Type type, Reduction reduction);
}
namespace avx512 {
ReduceFunction find_reduce(Type type, Reduction reduction);
}

// The one of the instruction set in use.
ReduceFunction find_reduce(Type type, Reduction reduction);

size_t size_of(Type type);
const char* name_of(Type type);
const char* name_of(Reduction reduction);

}  // namespace mcp::shm
