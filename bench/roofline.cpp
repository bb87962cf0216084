// What one core can do at most: multiply-adds in registers, and reading memory.
//
// Compiled for the machine that measures, by roofline.py. Each function returns what it computed,
// so that none of it is left out.
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / sizeof(float);
constexpr int kSums = 12;  // enough chains for two units of latency 4 to 5

}  // namespace

extern "C" {

// Flops of one repetition of the two kernels below; 0 where the CPU lacks the instruction.
int64_t fma_flops() { return 2 * kSums * kLanes; }
int64_t dpbf16_flops() {
#if defined(__AVX512BF16__)
  return 4 * kSums * kLanes;
#else
  return 0;
#endif
}

float run_fma(int64_t repetitions) {
  Floats sums[kSums] = {};
  // Opaque from the start: chains that are known to be alike would become one.
  for (Floats& sum : sums) asm volatile("" : "+x"(sum));
  Floats a = 0.5f - Floats{}, b = 0.25f - Floats{};
  for (int64_t i = 0; i < repetitions; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] = a * sums[s] + b;
    asm volatile("" : "+x"(a), "+x"(b));
  }
  float total = 0;
  for (const Floats& sum : sums) {
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  }
  return total;
}

float run_dpbf16(int64_t repetitions) {
  float total = 0;
#if defined(__AVX512BF16__)
  __m512 sums[kSums] = {};
  for (__m512& sum : sums) asm volatile("" : "+x"(sum));
  __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f003f00);
  for (int64_t i = 0; i < repetitions; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] = _mm512_dpbf16_ps(sums[s], a, a);
    asm volatile("" : "+x"(a));
  }
  for (const __m512& sum : sums) total += _mm512_reduce_add_ps(sum);
#else
  (void)repetitions;
#endif
  return total;
}

uint64_t read_bytes(const char* from, int64_t bytes) {
  constexpr int kStep = 4 * kBytes;
  Words sums[4] = {};
  for (int64_t at = 0; at + kStep <= bytes; at += kStep) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      Words words;
      std::memcpy(&words, from + at + s * kBytes, sizeof words);
      sums[s] ^= words;
    }
  }
  uint64_t total = 0;
  for (const Words& sum : sums) {
    for (int lane = 0; lane < kBytes / 8; ++lane) total ^= sum[lane];
  }
  return total;
}
}
