// AVX2: a row is 4 registers of float32, the sums are 8 of float64 (12 of 16 registers).
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/onebit_compress.h"

MCP_TARGET_BEGIN("avx2,fma,f16c")
namespace mcp::avx2 {
namespace {

constexpr int kLanes = 8;  // float32 in a register
constexpr int kParts = kRow / kLanes;

struct Row {
  __m256 v[kParts];
};

struct Sums {
  __m256d v[2 * kParts] = {};
};

inline __m256 load_lanes(const float* from) { return _mm256_loadu_ps(from); }

inline __m256 load_lanes(const BFloat16* from) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline __m256 load_lanes(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <class T>
inline Row load(const T* from) {
  Row row;
  for (int p = 0; p < kParts; ++p) row.v[p] = load_lanes(from + p * kLanes);
  return row;
}

inline void store(float* to, const Row& row) {
  for (int p = 0; p < kParts; ++p) _mm256_storeu_ps(to + p * kLanes, row.v[p]);
}

inline Row add(const Row& a, const Row& b) {
  Row sum;
  for (int p = 0; p < kParts; ++p) sum.v[p] = _mm256_add_ps(a.v[p], b.v[p]);
  return sum;
}

inline Row subtract(const Row& a, const Row& b) {
  Row difference;
  for (int p = 0; p < kParts; ++p) difference.v[p] = _mm256_sub_ps(a.v[p], b.v[p]);
  return difference;
}

inline uint32_t non_negative(const Row& row) {
  uint32_t signs = 0;
  for (int p = 0; p < kParts; ++p) {
    const __m256 positive = _mm256_cmp_ps(row.v[p], _mm256_setzero_ps(), _CMP_GE_OQ);
    signs |= static_cast<uint32_t>(_mm256_movemask_ps(positive)) << (p * kLanes);
  }
  return signs;
}

inline Row signed_scale(uint32_t signs, float scale) {
  // The sign bit of each lane: the inverse of its bit, moved to the top.
  const __m256i shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i sign_bit = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i wide_scale = _mm256_castps_si256(_mm256_set1_ps(scale));
  Row row;
  for (int p = 0; p < kParts; ++p) {
    const __m256i negative = _mm256_set1_epi32(static_cast<int>(~signs >> (p * kLanes)));
    const __m256i flip = _mm256_and_si256(_mm256_sllv_epi32(negative, shifts), sign_bit);
    row.v[p] = _mm256_castsi256_ps(_mm256_xor_si256(wide_scale, flip));
  }
  return row;
}

inline void add_squares(Sums& sums, const Row& row) {
  for (int p = 0; p < kParts; ++p) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(row.v[p]));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(row.v[p], 1));
    sums.v[2 * p] = _mm256_fmadd_pd(low, low, sums.v[2 * p]);  // the product is exact
    sums.v[2 * p + 1] = _mm256_fmadd_pd(high, high, sums.v[2 * p + 1]);
  }
}

inline double total(Sums sums) {
  for (int half = kParts; half > 0; half /= 2) {  // 32 lanes to 4
    for (int p = 0; p < half; ++p) sums.v[p] = _mm256_add_pd(sums.v[p], sums.v[p + half]);
  }
  const __m128d two =
      _mm_add_pd(_mm256_castpd256_pd128(sums.v[0]), _mm256_extractf128_pd(sums.v[0], 1));
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

}  // namespace mcp::avx2
MCP_TARGET_END

#endif  // MCP_X86
