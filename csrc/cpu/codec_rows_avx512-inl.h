// Rows of 32 on AVX-512: 2 registers of float32, 4 of float64, signs in a mask register.
// The vocabulary and its meaning are in codec_rows.h. Included inside namespace mcp::avx512.

constexpr int kLanes = 16;  // float32 in a register
constexpr int kParts = kRow / kLanes;

struct Row {
  __m512 v[kParts];
};

struct IntRow {
  __m512i v[kParts];
};

struct Sums {
  __m512d v[2 * kParts] = {};
};

struct Peak {
  __m512i v[kParts] = {};
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

inline void store(Float16* to, const Row& row) {
  for (int p = 0; p < kParts; ++p) {
    const __m256i narrow = _mm512_cvtps_ph(row.v[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + p * kLanes), narrow);
  }
}

inline void store_halves(uint16_t* to, const IntRow& row) {
  for (int p = 0; p < kParts; ++p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + p * kLanes),
                        _mm512_cvtepi32_epi16(row.v[p]));
  }
}

inline Row broadcast(float value) {
  Row row;
  for (int p = 0; p < kParts; ++p) row.v[p] = _mm512_set1_ps(value);
  return row;
}

inline Row add(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_add_ps(a.v[p], b.v[p]);
  return out;
}

inline Row subtract(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_sub_ps(a.v[p], b.v[p]);
  return out;
}

inline Row multiply(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_mul_ps(a.v[p], b.v[p]);
  return out;
}

inline Row divide(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_div_ps(a.v[p], b.v[p]);
  return out;
}

inline Row clamp(const Row& a, float largest) {
  const __m512 high = _mm512_set1_ps(largest), low = _mm512_set1_ps(-largest);
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_max_ps(_mm512_min_ps(a.v[p], high), low);
  return out;
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

inline void raise(Peak& peak, const Row& row) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int p = 0; p < kParts; ++p) {
    peak.v[p] =
        _mm512_max_epi32(peak.v[p], _mm512_and_si512(_mm512_castps_si512(row.v[p]), magnitude));
  }
}

inline uint32_t highest(const Peak& peak) {
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(peak.v[0], peak.v[1])));
}

inline IntRow int_broadcast(uint32_t value) {
  IntRow row;
  for (int p = 0; p < kParts; ++p) row.v[p] = _mm512_set1_epi32(static_cast<int>(value));
  return row;
}

inline IntRow bits_of(const Row& row) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_castps_si512(row.v[p]);
  return out;
}

inline Row row_of(const IntRow& bits) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_castsi512_ps(bits.v[p]);
  return out;
}

inline IntRow to_int(const Row& row) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_cvtps_epi32(row.v[p]);
  return out;
}

inline Row to_float(const IntRow& row) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_cvtepi32_ps(row.v[p]);
  return out;
}

inline IntRow int_add(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_add_epi32(a.v[p], b.v[p]);
  return out;
}

inline IntRow int_and(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_and_si512(a.v[p], b.v[p]);
  return out;
}

inline IntRow int_or(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_or_si512(a.v[p], b.v[p]);
  return out;
}

template <int kShift>
inline IntRow shift_left(const IntRow& a) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_slli_epi32(a.v[p], kShift);
  return out;
}

template <int kShift>
inline IntRow shift_right(const IntRow& a) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm512_srli_epi32(a.v[p], kShift);
  return out;
}

inline IntRow where_less(const IntRow& a, int32_t limit, const IntRow& yes, const IntRow& no) {
  IntRow row;
  for (int p = 0; p < kParts; ++p) {
    const __mmask16 less = _mm512_cmplt_epi32_mask(a.v[p], _mm512_set1_epi32(limit));
    row.v[p] = _mm512_mask_mov_epi32(no.v[p], less, yes.v[p]);
  }
  return row;
}

inline __m256i to_bytes(const IntRow& row) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(row.v[1]), _mm512_cvtepi32_epi8(row.v[0]));
}

inline IntRow from_bytes(__m256i bytes) {
  return {{_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)),
           _mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1))}};
}

inline IntRow from_signed_bytes(__m256i bytes) {
  return {{_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)),
           _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))}};
}

#include "cpu/codec_bytes_x86-inl.h"
