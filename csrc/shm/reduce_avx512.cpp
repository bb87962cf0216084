// reduce.h on AVX-512.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "shm/reduce.h"

MCP_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace mcp::shm::avx512 {
namespace {

inline void widen_half(const uint16_t* from, float* to) {
  for (int i = 0; i < 64; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(bits));
  }
}

inline void narrow_half(const float* from, uint16_t* to) {
  for (int i = 0; i < 64; i += 16) {
    const __m256i bits = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bits);
  }
}

#include "shm/reduce-inl.h"

}  // namespace

ReduceFunction find_reduce(Type type, Reduction reduction) { return choose(type, reduction); }

}  // namespace mcp::shm::avx512
MCP_TARGET_END

#endif  // MCP_X86
