// CUDA's words on host threads: a rank is a GPU, each of its threads a real one.
//
// Ranks run one kernel at once, as GPUs do, and touch one memory; a memory model weaker than the
// kernel's words allow shows under ThreadSanitizer, which knows the C++ atomics behind them.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __launch_bounds__(threads)

namespace host {

struct Dim {
  unsigned x = 0;
};

// __syncthreads of one block.
class BlockBarrier {
 public:
  explicit BlockBarrier(int threads) : threads_(threads) {}

  bool arrive(bool vote) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    votes_ |= vote;
    if (++arrived_ == threads_) {
      result_ = votes_;
      votes_ = false;
      arrived_ = 0;
      ++turn_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return turn_ != turn; });
    }
    return result_;  // the next turn cannot end before every thread of this one has left
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const int threads_;
  int arrived_ = 0;
  bool votes_ = false;
  bool result_ = false;
  int64_t turn_ = 0;
};

struct Thread {
  BlockBarrier* barrier = nullptr;
  std::minstd_rand random;
  int delay_percent = 0;
  const std::vector<char*>* multicast = nullptr;  // the buffers behind a multicast address
};
inline thread_local Thread self;

struct LaunchOptions {
  unsigned grid = 1;
  unsigned threads = 1;
  unsigned seed = 0;
  int delay_percent = 0;
  const std::vector<char*>* multicast = nullptr;
};

}  // namespace host

inline thread_local host::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

// kernel<<<grid, threads>>>() and a wait for its end; all blocks run at once.
inline void launch(const LaunchOptions& options, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<BlockBarrier>> barriers;
  for (unsigned b = 0; b < options.grid; ++b) {
    barriers.push_back(std::make_unique<BlockBarrier>(options.threads));
  }
  std::vector<std::thread> threads;
  for (unsigned b = 0; b < options.grid; ++b) {
    for (unsigned t = 0; t < options.threads; ++t) {
      threads.emplace_back([&, b, t] {
        threadIdx.x = t;
        blockIdx.x = b;
        blockDim.x = options.threads;
        gridDim.x = options.grid;
        self.barrier = barriers[b].get();
        self.random.seed(options.seed * 1000003u + b * 1009u + t + 1);
        self.delay_percent = options.delay_percent;
        self.multicast = options.multicast;
        kernel();
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace host

inline void __syncthreads() { host::self.barrier->arrive(false); }
inline bool __syncthreads_or(bool vote) { return host::self.barrier->arrive(vote); }

inline float __int_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct uint4 {
  uint32_t x, y, z, w;
};

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
  return __int_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
  _Float16 value;
};
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

#include "cuda/elements.cuh"  // the switch adds as the kernels do

namespace mcp::cuda {

inline void store_release_system(uint64_t* at, uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

inline uint64_t load_acquire_system(const uint64_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline uint64_t add_acq_rel_device(uint64_t* at, uint64_t value) {
  return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}

inline uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void pause_spin() { std::this_thread::yield(); }

// A random thread loses its turn, for a moment or for long enough that peers overtake it.
inline void protocol_point() {
  const int drawn = static_cast<int>(host::self.random() % 100);
  if (drawn >= host::self.delay_percent) return;
  if (drawn % 2) {
    std::this_thread::yield();
  } else {
    const auto most = host::self.random() % 8 ? 200 : 4000;
    std::this_thread::sleep_for(std::chrono::microseconds(host::self.random() % most));
  }
}

// The switch: `at` is an offset into every rank's buffer.
template <class T>
uint4 multicast_sum(const char* at) {
  float sum[16 / sizeof(T)] = {};
  T terms[16 / sizeof(T)];
  for (const char* buffer : *host::self.multicast) {
    std::memcpy(terms, buffer + reinterpret_cast<uintptr_t>(at), 16);
    for (size_t i = 0; i < 16 / sizeof(T); ++i) sum[i] += widen_term(terms[i]);
  }
  for (size_t i = 0; i < 16 / sizeof(T); ++i) round_sum(sum[i], terms[i]);
  uint4 packed;
  std::memcpy(&packed, terms, 16);
  return packed;
}

inline void multicast_store(char* at, uint4 value) {
  for (char* buffer : *host::self.multicast) {
    std::memcpy(buffer + reinterpret_cast<uintptr_t>(at), &value, 16);
  }
}

inline void fence_aliases() {}

}  // namespace mcp::cuda
