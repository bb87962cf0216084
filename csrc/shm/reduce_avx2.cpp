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

constexpr size_t kVectorBytes = 32;

inline void widen_half(const uint16_t* from, float* to) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm256_storeu_ps(to, _mm256_cvtph_ps(bits));
}

inline void narrow_half(const float* from, uint16_t* to) {
  const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
}

inline void widen_bfloat(const uint16_t* from, float* to) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  _mm256_storeu_ps(to, _mm256_castsi256_ps(wide));
}

inline void narrow_bfloat(const float* from, uint16_t* to) {
  const __m256 value = _mm256_loadu_ps(from);
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
  // Packs within each half of the register; the quarters of interest are the first and third.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

#include "shm/reduce-inl.h"

}  // namespace

ReduceFunction find_reduce(Type type, Reduction reduction) { return choose(type, reduction); }

}  // namespace mcp::shm::avx2
MCP_TARGET_END

#endif  // MCP_X86
