// What ranks on host threads give to a collective, and how it changes from call to call.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>

#include "threads.h"

// As torch's allocator gives it, 16 bytes aligned, and poisoned.
struct Buffer {
  explicit Buffer(size_t bytes, int fill)
      : units((bytes + 15) / 16 + 1), data(new (std::align_val_t{64}) uint4[units]) {
    std::memset(data, fill, units * 16);
  }
  ~Buffer() { ::operator delete[](data, std::align_val_t{64}); }
  Buffer(const Buffer&) = delete;
  char* bytes() { return reinterpret_cast<char*>(data); }
  size_t units;
  uint4* data;
};

template <class T>
inline T value_of(int rank, int call, int64_t i) {
  T value;
  const auto mixed = static_cast<uint32_t>(rank * 7919 + call * 104729 + i * 31) * 2654435761u;
  mcp::cuda::round_sum(static_cast<decltype(mcp::cuda::widen_term(T{}))>(
                           static_cast<int32_t>(mixed) * 0x1p-28f + 0.1f * rank),
                       value);
  return value;
}

// Both are the same on all ranks, and change from call to call.
inline int64_t numel_of(int call, int64_t most) {
  constexpr int64_t kSizes[] = {1, 37, 1 << 20, 8, 129};  // one is as many as the slot holds
  return std::min(kSizes[call % 5], most);
}
inline unsigned grid_of(int call) { return call % 3 == 1 ? 1 : 2; }
