// Rows of 32 on AVX2: 4 registers of float32, 8 of float64 (12 of the 16 there are).
// The vocabulary and its meaning are in codec_rows.h. Included inside namespace mcp::avx2.

constexpr int kLanes = 8;  // float32 in a register
constexpr int kParts = kRow / kLanes;

struct Row {
  __m256 v[kParts];
};

struct IntRow {
  __m256i v[kParts];
};

struct Sums {
  __m256d v[2 * kParts] = {};
};

struct Peak {
  __m256i v[kParts] = {};
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

inline void store(Float16* to, const Row& row) {
  for (int p = 0; p < kParts; ++p) {
    const __m128i narrow = _mm256_cvtps_ph(row.v[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + p * kLanes), narrow);
  }
}

// Two registers to one of halves: packing works on each 128-bit side, so the middle is swapped.
inline __m256i pack_halves(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0b11011000);
}

inline void store_halves(uint16_t* to, const IntRow& row) {
  for (int p = 0; p < kParts; p += 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + p * kLanes),
                        pack_halves(row.v[p], row.v[p + 1]));
  }
}

inline Row broadcast(float value) {
  Row row;
  for (int p = 0; p < kParts; ++p) row.v[p] = _mm256_set1_ps(value);
  return row;
}

inline Row add(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_add_ps(a.v[p], b.v[p]);
  return out;
}

inline Row subtract(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_sub_ps(a.v[p], b.v[p]);
  return out;
}

inline Row multiply(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_mul_ps(a.v[p], b.v[p]);
  return out;
}

inline Row divide(const Row& a, const Row& b) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_div_ps(a.v[p], b.v[p]);
  return out;
}

inline Row clamp(const Row& a, float largest) {
  const __m256 high = _mm256_set1_ps(largest), low = _mm256_set1_ps(-largest);
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_max_ps(_mm256_min_ps(a.v[p], high), low);
  return out;
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

inline void raise(Peak& peak, const Row& row) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int p = 0; p < kParts; ++p) {
    peak.v[p] =
        _mm256_max_epi32(peak.v[p], _mm256_and_si256(_mm256_castps_si256(row.v[p]), magnitude));
  }
}

inline uint32_t highest(Peak peak) {
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) peak.v[p] = _mm256_max_epi32(peak.v[p], peak.v[p + half]);
  }
  alignas(32) int32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), peak.v[0]);
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return static_cast<uint32_t>(most);
}

inline IntRow int_broadcast(uint32_t value) {
  IntRow row;
  for (int p = 0; p < kParts; ++p) row.v[p] = _mm256_set1_epi32(static_cast<int>(value));
  return row;
}

inline IntRow bits_of(const Row& row) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_castps_si256(row.v[p]);
  return out;
}

inline Row row_of(const IntRow& bits) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_castsi256_ps(bits.v[p]);
  return out;
}

inline IntRow to_int(const Row& row) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_cvtps_epi32(row.v[p]);
  return out;
}

inline Row to_float(const IntRow& row) {
  Row out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_cvtepi32_ps(row.v[p]);
  return out;
}

inline IntRow int_add(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_add_epi32(a.v[p], b.v[p]);
  return out;
}

inline IntRow int_and(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_and_si256(a.v[p], b.v[p]);
  return out;
}

inline IntRow int_or(const IntRow& a, const IntRow& b) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_or_si256(a.v[p], b.v[p]);
  return out;
}

template <int kShift>
inline IntRow shift_left(const IntRow& a) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_slli_epi32(a.v[p], kShift);
  return out;
}

template <int kShift>
inline IntRow shift_right(const IntRow& a) {
  IntRow out;
  for (int p = 0; p < kParts; ++p) out.v[p] = _mm256_srli_epi32(a.v[p], kShift);
  return out;
}

inline IntRow where_less(const IntRow& a, int32_t limit, const IntRow& yes, const IntRow& no) {
  IntRow row;
  for (int p = 0; p < kParts; ++p) {
    const __m256i less = _mm256_cmpgt_epi32(_mm256_set1_epi32(limit), a.v[p]);
    row.v[p] = _mm256_blendv_epi8(no.v[p], yes.v[p], less);
  }
  return row;
}

inline __m256i to_bytes(const IntRow& row) {
  const __m256i low_byte = _mm256_set1_epi32(255);
  __m256i v[kParts];
  for (int p = 0; p < kParts; ++p) v[p] = _mm256_and_si256(row.v[p], low_byte);
  const __m256i low = pack_halves(v[0], v[1]), high = pack_halves(v[2], v[3]);
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0b11011000);
}

inline IntRow from_bytes(__m256i bytes) {
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  return {{_mm256_cvtepu8_epi32(low), _mm256_cvtepu8_epi32(_mm_srli_si128(low, 8)),
           _mm256_cvtepu8_epi32(high), _mm256_cvtepu8_epi32(_mm_srli_si128(high, 8))}};
}

inline IntRow from_signed_bytes(__m256i bytes) {
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  return {{_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(_mm_srli_si128(low, 8)),
           _mm256_cvtepi8_epi32(high), _mm256_cvtepi8_epi32(_mm_srli_si128(high, 8))}};
}

#include "cpu/codec_bytes_x86-inl.h"
