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

constexpr size_t kVectorBytes = 64;

inline void widen_half(const uint16_t* from, float* to) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  _mm512_storeu_ps(to, _mm512_cvtph_ps(bits));
}

inline void narrow_half(const float* from, uint16_t* to) {
  const __m256i bits = _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
}

inline void widen_bfloat(const uint16_t* from, float* to) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  _mm512_storeu_ps(to, _mm512_castsi512_ps(wide));
}

// Not by AVX-512 BF16's own instruction, which takes subnormals for zero.
inline void narrow_bfloat(const float* from, uint16_t* to) {
  const __m512 value = _mm512_loadu_ps(from);
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __m512i quiet_nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_mov_epi32(rounded, is_nan, quiet_nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(chosen));
}

#include "shm/reduce-inl.h"

}  // namespace

ReduceFunction find_reduce(Type type, Reduction reduction) { return choose(type, reduction); }

}  // namespace mcp::shm::avx512
MCP_TARGET_END

#endif  // MCP_X86
