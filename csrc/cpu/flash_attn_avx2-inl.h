// The vectors of AVX2: 16 registers of 8 float32 or 4 float64; a micro-tile holds 12 sums.
//
// Included inside the namespace of an instruction set.

#include "cpu/flash_attn_vector-inl.h"

struct Floats : Vector<float, 32> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }

  using Vector::load_as;
  using Vector::store_as;

  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vec v) { _mm256_storeu_ps(to, v); }
  static Vec set1(float value) { return _mm256_set1_ps(value); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

  static Vec exp2(Vec x) { return exp2_by<Floats>(x); }

  static Vec load_as(const float* from) { return load(from); }
  static Vec load_as(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Vec load_as(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_as(float* to, Vec v) { store(to, v); }
  static void store_as(Float16* to, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static void transpose(Vec (&rows)[8]) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // quads[4 g + c]: column c of each half, rows 4 g .. 4 g + 3
      for (int c = 0; c < 2; ++c) {
        const __m256d a = _mm256_castps_pd(pairs[i + c]), b = _mm256_castps_pd(pairs[i + 2 + c]);
        quads[i + 2 * c] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        quads[i + 2 * c + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
      }
    }
    for (int c = 0; c < 4; ++c) {
      rows[c] = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x20);
      rows[c + 4] = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x31);
    }
  }

  static Vec sum_rows(const Vec (&rows)[8]) {
    const auto half = [&](int i) {  // of rows i .. i + 3, low and high lanes apart
      return _mm256_hadd_ps(_mm256_hadd_ps(rows[i], rows[i + 1]),
                            _mm256_hadd_ps(rows[i + 2], rows[i + 3]));
    };
    const __m256 a = half(0), b = half(4);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
};

struct Doubles : Vector<double, 32> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }

  static Vec load(const double* from) { return _mm256_loadu_pd(from); }
  static void store(double* to, Vec v) { _mm256_storeu_pd(to, v); }
  static Vec set1(double value) { return _mm256_set1_pd(value); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static Vec exp2(Vec x) { return exp2_by<Doubles>(x); }
};
