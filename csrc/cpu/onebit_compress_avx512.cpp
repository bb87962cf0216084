// AVX-512: a row is 2 registers of float32, the sums are 4 of float64, signs are a mask register.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/onebit_compress.h"

MCP_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mcp::avx512 {
namespace {

constexpr int kLanes = 16;  // float32 in a register
constexpr int kParts = kRow / kLanes;

struct Row {
  __m512 v[kParts];
};

struct Sums {
  __m512d v[2 * kParts] = {};
};

inline __m512 load_lanes(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load_lanes(const BFloat16* from) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline __m512 load_lanes(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

template <class T>
inline Row load(const T* from) {
  Row row;
  for (int p = 0; p < kParts; ++p) row.v[p] = load_lanes(from + p * kLanes);
  return row;
}

inline void store(float* to, const Row& row) {
  for (int p = 0; p < kParts; ++p) _mm512_storeu_ps(to + p * kLanes, row.v[p]);
}

inline Row add(const Row& a, const Row& b) {
  Row sum;
  for (int p = 0; p < kParts; ++p) sum.v[p] = _mm512_add_ps(a.v[p], b.v[p]);
  return sum;
}

inline Row subtract(const Row& a, const Row& b) {
  Row difference;
  for (int p = 0; p < kParts; ++p) difference.v[p] = _mm512_sub_ps(a.v[p], b.v[p]);
  return difference;
}

inline uint32_t non_negative(const Row& row) {
  uint32_t signs = 0;
  for (int p = 0; p < kParts; ++p) {
    const __mmask16 positive = _mm512_cmp_ps_mask(row.v[p], _mm512_setzero_ps(), _CMP_GE_OQ);
    signs |= static_cast<uint32_t>(positive) << (p * kLanes);
  }
  return signs;
}

inline Row signed_scale(uint32_t signs, float scale) {
  const __m512i wide_scale = _mm512_castps_si512(_mm512_set1_ps(scale));
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  Row row;
  for (int p = 0; p < kParts; ++p) {
    const __mmask16 negative = static_cast<__mmask16>(~signs >> (p * kLanes));
    row.v[p] =
        _mm512_castsi512_ps(_mm512_mask_xor_epi32(wide_scale, negative, wide_scale, sign_bit));
  }
  return row;
}

inline void add_squares(Sums& sums, const Row& row) {
  for (int p = 0; p < kParts; ++p) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(row.v[p]));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(row.v[p], 1));
    sums.v[2 * p] = _mm512_fmadd_pd(low, low, sums.v[2 * p]);  // the product is exact
    sums.v[2 * p + 1] = _mm512_fmadd_pd(high, high, sums.v[2 * p + 1]);
  }
}

inline double total(const Sums& sums) {
  const __m512d sixteen_low = _mm512_add_pd(sums.v[0], sums.v[2]);
  const __m512d sixteen_high = _mm512_add_pd(sums.v[1], sums.v[3]);
  const __m512d eight = _mm512_add_pd(sixteen_low, sixteen_high);
  const __m256d four =
      _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

#include "cpu/onebit_compress-inl.h"

}  // namespace

void onebit_compress(const OnebitCompressArgs& args, int64_t first, int64_t last) {
  compress_any(args, first, last);
}

void onebit_decompress(const OnebitDecompressArgs& args, int64_t first, int64_t last) {
  decompress_blocks(args, first, last);
}

}  // namespace mcp::avx512
MCP_TARGET_END

#endif  // MCP_X86
