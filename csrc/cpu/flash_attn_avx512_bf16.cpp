// AVX-512 BF16: products of bfloat16 by vdpbf16ps, two multiply-adds a lane; all else is float32.
//
// Only bfloat16 tensors have this body. Their elements are packed as they are; P and dS are rounded
// to bfloat16 on their way into a product, and only there: row sums, lse and delta are of the
// float32 values. A result is then off by the roundings of many independent terms and by its own,
// each of relative size 2^-9 at most: 1.4 times one rounding where the terms have random signs.
//
// vdpbf16ps and vcvtne2ps2bf16 heed no MXCSR: they round to nearest even, take factors below 2^-126
// for 0 and flush such sums to 0. A tensor of such elements alone gives scores of 0; an infinity
// times such an element is NaN.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/float_types.h"
#include "cpu/flash_attn.h"

MCP_TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mcp::avx512_bf16 {
namespace {

#include "cpu/flash_attn_avx512-inl.h"

// Sums and scores in float32, factors in pairs of bfloat16.
struct Pairs : Floats {};

template <>
struct Factors<Pairs> {
  using Scalar = float;
  using Vec = Pairs::Vec;
  struct Unit {
    BFloat16 low, high;  // the earlier one is low
  };
  static constexpr int kDepth = 2;
  static constexpr int kLanes = Pairs::kLanes;

  static Vec load(const Unit* from) { return _mm512_loadu_ps(from); }
  static void store(Unit* to, Vec units) { _mm512_storeu_ps(to, units); }
  static Vec broadcast(const Unit* from) {
    int bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  }
  static Vec multiply_add(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static float factor(const Unit* from, int part) { return widen(part ? from->high : from->low); }
  static Vec factors(Vec units, int part) {
    const __m512i bits = _mm512_castps_si512(units);
    return _mm512_castsi512_ps(part ? high_of(bits) : _mm512_slli_epi32(bits, 16));
  }

  static Vec load_row(const BFloat16* from, int64_t stride, int64_t count) {
    constexpr int kWidth = kLanes * kDepth;
    if (count >= kWidth && stride == 1) return _mm512_loadu_ps(from);
    BFloat16 padded[kWidth] = {};
    const int64_t taken = std::min<int64_t>(count, kWidth);
    for (int64_t i = 0; i < taken; ++i) padded[i] = from[i * stride];
    return _mm512_loadu_ps(padded);
  }
  static void store_row(Unit* row, int64_t d, Vec wide) {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(wide), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + d / kDepth), _mm512_cvtepi32_epi16(bits));
  }
  static Vec join(const Vec (&rows)[kDepth]) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(rows[0]), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(low, high_of(_mm512_castps_si512(rows[1]))));
  }

  static const Unit* along_keys(float* tile, int rows, int64_t last) {
    for (int r = 0; r < rows; ++r) {
      float* row = tile + r * kAttnKeys;
      for (int64_t j = 0; j < last; j += kLanes * kDepth) {
        // What is written here was read: row j / 2 begins no later than row j.
        _mm512_storeu_si512(row + j / kDepth, narrow_pair(_mm512_loadu_ps(row + j),
                                                          _mm512_loadu_ps(row + j + kLanes)));
      }
    }
    return reinterpret_cast<const Unit*>(tile);
  }
  static const Unit* along_rows(const float* tile, int rows, int64_t first, int64_t last,
                                float* to) {
    // Places of the 16-bit words of [a, b] in pairs of a and b.
    alignas(64) static constexpr uint16_t kInterleave[] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i interleave = _mm512_load_si512(kInterleave);
    for (int r = 0; r < rows; r += kDepth) {
      const float* low = tile + r * kAttnKeys;
      for (int64_t j = first; j < last; j += kLanes) {
        const __m512 high = r + 1 < rows ? _mm512_loadu_ps(low + kAttnKeys + j) : __m512{};
        _mm512_storeu_si512(
            to + r / kDepth * kAttnKeys + j,
            _mm512_permutexvar_epi16(interleave, narrow_pair(_mm512_loadu_ps(low + j), high)));
      }
    }
    return reinterpret_cast<const Unit*>(to);
  }

 private:
  static __m512i high_of(__m512i bits) {
    return _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  }
  // a, then b, rounded to bfloat16.
  static __m512i narrow_pair(__m512 a, __m512 b) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
  }
};

#include "cpu/flash_attn-inl.h"

}  // namespace

const FlashAttnBody& flash_attn_body() {
  static constexpr FlashAttnBody kBody = make_body<Pairs, BFloat16, Floats>();
  return kBody;
}

}  // namespace mcp::avx512_bf16
MCP_TARGET_END

#endif  // MCP_X86
