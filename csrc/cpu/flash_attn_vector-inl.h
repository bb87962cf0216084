// Vectors of one register and what attention needs of them, for any instruction set.
//
// Included inside the namespace of an instruction set. Vector<T, kBytes> is written over the vector
// extension of GCC and Clang (a * b, a < b ? a : b); an instruction set derives from it and
// replaces what it does better: load, store, fma, reduce_*, exp2, transpose, load_as, store_as.
//
// No include guard: each instruction set compiles its own copy.

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

inline float widen(BFloat16 value) {
  return float_of_bits(static_cast<uint32_t>(value.bits) << 16);
}

// Exponent and fraction move up; the exponent is rebiased from 15 to 127 by an exact product.
inline float widen(Float16 value) {
  constexpr float kRebias = 5.192296858534828e+33f;  // 2^112
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  if ((value.bits & 0x7c00) == 0x7c00) return float_of_bits(sign | magnitude | 0x7f800000);
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude) * kRebias));
}

// Rounded to nearest, ties to even; NaN stays NaN.
template <class E>
E narrow(float value);

template <>
inline float narrow<float>(float value) {
  return value;
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline Float16 narrow<Float16>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and above
  if (magnitude < 0x38800000) {  // below 2^-14: counts of 2^-24, which is what 0.5 is spaced by
    const uint32_t counts = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    return {static_cast<uint16_t>(sign | counts)};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

template <class E>
inline E narrow(double value) {
  return value;
}

// Constants of floating-point formats and of 2^f on [-0.5, 0.5], as 1 + f (c0 + f (c1 + ...)).
template <class T>
struct Format;

template <>
struct Format<float> {
  using Int = int32_t;
  static constexpr int kFraction = 23;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLeast = -126.0f;      // exponent of the least normal number
  // Minimax, relative error 1.6e-8: a quarter of an ulp.
  static constexpr float kExp2[] = {0x1.62e43p-1f,  0x1.ebfbdcp-3f,  0x1.c6aee8p-5f,
                                    0x1.3b2d4cp-7f, 0x1.5f3e54p-10f, 0x1.41fbbcp-13f};
};

template <>
struct Format<double> {
  using Int = int64_t;
  static constexpr int kFraction = 52;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLeast = -1022.0;
  // ln(2)^k / k!, k = 1 .. 13: the first term left out is 4e-18 at 0.5.
  static constexpr double kExp2[] = {
      6.9314718055994531e-1, 2.4022650695910071e-1, 5.5504108664821580e-2,  9.6181291076284772e-3,
      1.3333558146428443e-3, 1.5403530393381609e-4, 1.5252733804059840e-5,  1.3215486790144309e-6,
      1.0178086009239699e-7, 7.0549116208011233e-9, 4.4455382718708116e-10, 2.5678435993488206e-11,
      1.3691488853904129e-12};
};

template <class T, int kBytes>
struct Vector {
  using Scalar = T;
  using Int = typename Format<T>::Int;
  static constexpr int kLanes = kBytes / sizeof(T);
  typedef T Vec __attribute__((vector_size(kBytes)));
  typedef Int IntVec __attribute__((vector_size(kBytes)));
  typedef std::make_unsigned_t<Int> BitsVec __attribute__((vector_size(kBytes)));

  static Vec load(const T* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(T* to, Vec v) { std::memcpy(to, &v, sizeof v); }
  static Vec set1(T value) { return value - Vec{}; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  // b where either is NaN.
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }

  static T reduce_max(Vec v) {
    T best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
  }
  static T reduce_add(Vec v) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) v[i] += v[i + half];
    }
    return v[0];
  }

  // 2^x for x not far above 0; exactly 0 where that is no normal number, NaN where x is NaN.
  static Vec exp2(Vec x) { return exp2_by<Vector>(x); }

  // The same with the fma of S.
  template <class S>
  static Vec exp2_by(Vec x) {
    constexpr int kFraction = Format<T>::kFraction;
    const Vec shifted = x + Format<T>::kRound;
    const Vec f = x - (shifted - Format<T>::kRound);
    BitsVec bits;  // the integer nearest to x in the low bits, made an exponent
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << kFraction) + (std::make_unsigned_t<Int>(1 - Format<T>::kLeast) << kFraction);
    Vec power;
    std::memcpy(&power, &bits, sizeof power);
    return x < Format<T>::kLeast ? Vec{} : polynomial<S>(f) * power;
  }

  template <class S>
  static Vec polynomial(Vec f) {
    constexpr int kTerms = sizeof(Format<T>::kExp2) / sizeof(T);
    Vec sum = S::set1(Format<T>::kExp2[kTerms - 1]);
    for (int i = kTerms - 2; i >= 0; --i) sum = S::fma(sum, f, S::set1(Format<T>::kExp2[i]));
    return S::fma(sum, f, S::set1(1));
  }

  static IntVec lane_numbers() {
    IntVec numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = i;
    return numbers;
  }
  // v in lanes [first, last), fill elsewhere.
  static Vec select_range(Vec v, int64_t first, int64_t last, T fill) {
    const Int low = static_cast<Int>(std::max<int64_t>(first, 0));
    const Int high = static_cast<Int>(std::min<int64_t>(last, kLanes));
    const IntVec lane = lane_numbers();
    return (lane >= low) & (lane < high) ? v : set1(fill);
  }

  template <class E>
  static Vec load_as(const E* from) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v[i] = widen(from[i]);
    return v;
  }
  template <class E>
  static void store_as(E* to, Vec v) {
    for (int i = 0; i < kLanes; ++i) to[i] = narrow<E>(static_cast<T>(v[i]));
  }

  static void transpose(Vec (&rows)[kLanes]) {
    Vec columns[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < kLanes; ++j) columns[i][j] = rows[j][i];
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = columns[i];
  }
  // Lane i is the sum of rows[i].
  static Vec sum_rows(const Vec (&rows)[kLanes]) {
    Vec sums;
    for (int i = 0; i < kLanes; ++i) sums[i] = reduce_add(rows[i]);
    return sums;
  }
};

// Up to a register of elements `stride` apart; the rest is 0.
template <class S, class E>
typename S::Vec load_part(const E* from, int64_t stride, int64_t count) {
  if (count >= S::kLanes && stride == 1) return S::load_as(from);
  E padded[S::kLanes] = {};
  const int64_t taken = std::min<int64_t>(count, S::kLanes);
  for (int64_t i = 0; i < taken; ++i) padded[i] = from[i * stride];
  return S::load_as(static_cast<const E*>(padded));
}

template <class S, class E>
void store_part(E* to, typename S::Vec v, int64_t count) {
  if (count >= S::kLanes) return S::store_as(to, v);
  E padded[S::kLanes];
  S::store_as(static_cast<E*>(padded), v);
  std::memcpy(to, padded, count * sizeof(E));
}

#include "cpu/flash_attn_factors-inl.h"
