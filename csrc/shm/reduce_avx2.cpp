// reduce.h on AVX2.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "shm/reduce.h"

MCP_TARGET_BEGIN("avx2,fma,f16c")
namespace mcp::shm::avx2 {
namespace {

inline void widen_half(const uint16_t* from, float* to) {
  for (int i = 0; i < 64; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(bits));
  }
}

inline void narrow_half(const float* from, uint16_t* to) {
  for (int i = 0; i < 64; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
}

#include "shm/reduce-inl.h"

}  // namespace

ReduceFunction find_reduce(Type type, Reduction reduction) { return choose(type, reduction); }

}  // namespace mcp::shm::avx2
MCP_TARGET_END

#endif  // MCP_X86
