// The vectors of AVX-512: 32 registers of 16 float32 or 8 float64; a micro-tile holds 24 sums.
//
// Included inside the namespace of an instruction set.

#include "cpu/flash_attn_vector-inl.h"

struct Floats : Vector<float, 64> {
  static constexpr int kColumns = 4;
  static constexpr int rows(int columns) { return columns == 4 ? 6 : columns == 3 ? 8 : 12; }

  using Vector::load_as;
  using Vector::store_as;

  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vec v) { _mm512_storeu_ps(to, v); }
  static Vec set1(float value) { return _mm512_set1_ps(value); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
  static float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }

  static Vec exp2(Vec x) {
    const Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 kept = _mm512_cmp_ps_mask(x, set1(Format<float>::kLeast), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(kept, polynomial<Floats>(x - n), n);
  }

  static Vec select_range(Vec v, int64_t first, int64_t last, float fill) {
    const auto bits = [](int64_t n) {
      return (1u << std::min<int64_t>(std::max<int64_t>(n, 0), kLanes)) - 1;
    };
    return _mm512_mask_mov_ps(set1(fill), static_cast<__mmask16>(bits(last) & ~bits(first)), v);
  }

  static Vec load_as(const float* from) { return load(from); }
  static Vec load_as(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Vec load_as(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store_as(float* to, Vec v) { store(to, v); }
  static void store_as(BFloat16* to, Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i half =
        _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(
        _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16), is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
  }
  static void store_as(Float16* to, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static void transpose(Vec (&rows)[16]) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    __m512 quads[16];  // quads[4 g + c]: column c of each quarter, rows 4 g .. 4 g + 3
    for (int i = 0; i < 16; i += 4) {
      for (int c = 0; c < 2; ++c) {
        const __m512d a = _mm512_castps_pd(pairs[i + c]), b = _mm512_castps_pd(pairs[i + 2 + c]);
        quads[i + 2 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        quads[i + 2 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      }
    }
    for (int c = 0; c < 4; ++c) {
      const __m512 low02 = _mm512_shuffle_f32x4(quads[c], quads[c + 4], 0x88);
      const __m512 low13 = _mm512_shuffle_f32x4(quads[c], quads[c + 4], 0xdd);
      const __m512 high02 = _mm512_shuffle_f32x4(quads[c + 8], quads[c + 12], 0x88);
      const __m512 high13 = _mm512_shuffle_f32x4(quads[c + 8], quads[c + 12], 0xdd);
      rows[c] = _mm512_shuffle_f32x4(low02, high02, 0x88);
      rows[c + 4] = _mm512_shuffle_f32x4(low13, high13, 0x88);
      rows[c + 8] = _mm512_shuffle_f32x4(low02, high02, 0xdd);
      rows[c + 12] = _mm512_shuffle_f32x4(low13, high13, 0xdd);
    }
  }

  // Neighbours are added while they are interleaved: half the shuffles of a transpose.
  static Vec sum_rows(const Vec (&rows)[16]) {
    __m512 quads[4];  // lane 4 q + r of quads[i]: what quarter q holds of row 4 i + r
    for (int i = 0; i < 4; ++i) {
      const __m512* r = rows + 4 * i;
      const __m512 low =
          _mm512_add_ps(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
      const __m512 high =
          _mm512_add_ps(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
      const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
      quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
  }
  // Quarters of a and b, neighbours added.
  static Vec fold(Vec a, Vec b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

struct Doubles : Vector<double, 64> {
  static constexpr int kColumns = 4;
  static constexpr int rows(int columns) { return columns == 4 ? 6 : columns == 3 ? 8 : 12; }

  static Vec load(const double* from) { return _mm512_loadu_pd(from); }
  static void store(double* to, Vec v) { _mm512_storeu_pd(to, v); }
  static Vec set1(double value) { return _mm512_set1_pd(value); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
  static Vec exp2(Vec x) { return exp2_by<Doubles>(x); }
};
