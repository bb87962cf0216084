// CUDA's words on a host, so that a kernel's protocol runs where no GPU is.
//
// A warp is 32 coroutines on one thread. A lane runs until it reaches a collective, leaves its
// value there and hands over to the next lane; when all have arrived, each reads what it needs. A
// lane that misses a collective, or takes another one, shows as a wrong result or as an abort.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

namespace host {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Dim {
  unsigned x = 0;
};

// One warp of one thread block, run to its end.
class Warp {
 public:
  explicit Warp(std::function<void(int lane)> body) : body_(std::move(body)) {
    for (int lane = 0; lane < kLanes; ++lane) {
      stacks_[lane].resize(kStackBytes);
      getcontext(&lanes_[lane]);
      lanes_[lane].uc_stack.ss_sp = stacks_[lane].data();
      lanes_[lane].uc_stack.ss_size = kStackBytes;
      lanes_[lane].uc_link = &scheduler_;
      makecontext(&lanes_[lane], &Warp::enter, 0);
    }
  }

  void run() {
    current = this;
    while (finished_ < kLanes) {
      const int before = finished_;
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
        if (!done_[lane_]) swapcontext(&scheduler_, &lanes_[lane_]);
      }
      if (finished_ != before && finished_ != kLanes) {
        std::fprintf(stderr, "some lanes of a warp returned before a collective of the others\n");
        std::abort();
      }
      ++turn_;
    }
  }

  // Leaves `value`, waits until every lane has, and gives all values back.
  const uint64_t* exchange(uint64_t value) {
    uint64_t* slots = slots_[turn_ % 2];  // lanes still read the last one while we write this one
    slots[lane_] = value;
    swapcontext(&lanes_[lane_], &scheduler_);
    return slots;
  }

  int lane() const { return lane_; }

  static Warp* current;

 private:
  static void enter() {
    current->body_(current->lane_);
    current->done_[current->lane_] = true;
    ++current->finished_;
  }

  std::function<void(int)> body_;
  ucontext_t scheduler_{};
  ucontext_t lanes_[kLanes]{};
  std::vector<char> stacks_[kLanes];
  uint64_t slots_[2][kLanes] = {};
  bool done_[kLanes] = {};
  int finished_ = 0;
  int lane_ = 0;
  int64_t turn_ = 0;
};

inline Warp* Warp::current = nullptr;

// threadIdx reads the running lane; block and warp are set by launch().
inline unsigned first_thread = 0;
struct ThreadIndex {
  struct X {
    operator unsigned() const { return first_thread + Warp::current->lane(); }
  } x;
};

}  // namespace host

inline host::Dim blockIdx, blockDim;
inline host::ThreadIndex threadIdx;

namespace host {

// kernel<<<grid, threads>>>(), a warp after the other.
inline void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (first_thread = 0; first_thread < threads; first_thread += kLanes) {
      Warp([&](int) { kernel(); }).run();
    }
  }
}

}  // namespace host

inline uint32_t __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = host::Warp::current->exchange(vote);
  uint32_t ballot = 0;
  for (int lane = 0; lane < host::kLanes; ++lane)
    ballot |= static_cast<uint32_t>(votes[lane]) << lane;
  return ballot;
}

inline double __shfl_xor_sync(unsigned, double value, int mask) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint64_t other = host::Warp::current->exchange(bits)[host::Warp::current->lane() ^ mask];
  std::memcpy(&value, &other, sizeof value);
  return value;
}

inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
  const uint64_t* values = host::Warp::current->exchange(value);
  return static_cast<uint32_t>(values[host::Warp::current->lane() ^ mask]);
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyintf(a)); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }

inline float __int_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float __uint_as_float(uint32_t bits) { return __int_as_float(bits); }

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
  return __int_as_float(static_cast<uint32_t>(value.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
  _Float16 value;
};
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

using std::isfinite;
using std::max;
using std::min;
