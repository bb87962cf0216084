// What symmetric-memory kernels need of a GPU beyond CUDA's own words, in PTX.
// tests/cuda_on_host/threads.h has the same words on host threads.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace mcp::cuda {
namespace {

__device__ inline void store_release_system(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ inline uint64_t load_acquire_system(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline uint64_t add_acq_rel_device(uint64_t* at, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(at), "l"(value)
               : "memory");
  return old;
}

__device__ inline uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void pause_spin() { __nanosleep(20); }

// Where a test delays a thread at random; nothing on a GPU.
__device__ inline void protocol_point() {}

// The sum over all ranks of 16 bytes behind a multicast address, added in float32 by the switch.
template <class T>
__device__ inline uint4 multicast_sum(const char* at) {
  uint4 v{};
#if __CUDA_ARCH__ >= 900
  if constexpr (sizeof(T) == 4) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
  } else {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
  }
#else
  __trap();  // the host gives no multicast address to such a GPU
#endif
  return v;
}

// 16 bytes to every rank at once.
__device__ inline void multicast_store(char* at, uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  __trap();
#endif
}

// Orders accesses to one memory through two addresses: a rank's own and the multicast one.
__device__ inline void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace
}  // namespace mcp::cuda
