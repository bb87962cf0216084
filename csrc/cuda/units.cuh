// Slots of a symmetric buffer in units of 16 bytes: what the collectives of csrc/cuda move.
//
// Includes no CUDA header: the file that includes it brings the CUDA words.
#pragma once

#include "cuda/elements.cuh"
#include "cuda/symmetric.cuh"

namespace mcp::cuda {
namespace {

template <class T>
struct alignas(16) Unit {
  static constexpr int kSize = 16 / sizeof(T);
  T v[kSize];
};

// Calls body(i) for this thread's share of [0, count).
template <class Body>
__device__ void for_share(int64_t count, Body body) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    body(i);
  }
}

// The first `left` of a unit's elements, zeros behind them. `aligned`: `from` is to 16 bytes.
template <class T>
__device__ Unit<T> read_unit(const T* from, int64_t left, bool aligned) {
  if (aligned && left >= Unit<T>::kSize) return *reinterpret_cast<const Unit<T>*>(from);
  Unit<T> read{};
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) {
    if (i < left) read.v[i] = from[i];
  }
  return read;
}

template <class T>
__device__ void write_unit(T* to, int64_t left, bool aligned, const Unit<T>& value) {
  if (aligned && left >= Unit<T>::kSize) {
    *reinterpret_cast<Unit<T>*>(to) = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) {
    if (i < left) to[i] = value.v[i];
  }
}

// A function of its own: ThreadSanitizer sees the store, which it does not in `*at = f()`.
template <class T>
__device__ void put(Unit<T>* at, const Unit<T>& value) {
  *at = value;
}

template <class T>
__device__ Unit<T>* slot_of(const Call& call, int rank) {
  return reinterpret_cast<Unit<T>*>(call.channel.buffers[rank] + call.slot_at());
}

// What a block writes where a peer did not come: nobody takes it for a result.
template <class T>
__device__ Unit<T> nan_unit() {
  const decltype(widen_term(T{})) nan = __int_as_float(0x7fc00000);
  Unit<T> bad;
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) round_sum(nan, bad.v[i]);
  return bad;
}

}  // namespace
}  // namespace mcp::cuda
