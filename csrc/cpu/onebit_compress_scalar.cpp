// Any CPU: plain loops over 32 lanes, which the compiler vectorises for its baseline.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/onebit_compress.h"

namespace mcp::scalar {
namespace {

struct Row {
  float v[kRow];
};

struct Sums {
  double v[kRow] = {};
};

// 1 << i for each lane: a table, since the baseline of x86-64 cannot shift lanes apart.
struct BitTable {
  uint32_t v[kRow] = {};
  constexpr BitTable() {
    for (int i = 0; i < kRow; ++i) v[i] = 1u << i;
  }
};
constexpr BitTable kBits;

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float widen(float value) { return value; }

float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

// Exponent and fraction move up; the exponent is rebiased from 15 to 127 by an exact product.
// Infinity and NaN keep the largest exponent.
float widen(Float16 value) {
  constexpr float kRebias = 5.192296858534828e+33f;  // 2^112
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  if ((value.bits & 0x7c00) == 0x7c00) return from_bits(sign | magnitude | 0x7f800000);
  const float scaled = from_bits(magnitude) * kRebias;
  return sign ? -scaled : scaled;
}

template <class T>
Row load(const T* from) {
  Row row;
  for (int i = 0; i < kRow; ++i) row.v[i] = widen(from[i]);
  return row;
}

void store(float* to, const Row& row) { std::memcpy(to, row.v, sizeof row.v); }

Row add(const Row& a, const Row& b) {
  Row sum;
  for (int i = 0; i < kRow; ++i) sum.v[i] = a.v[i] + b.v[i];
  return sum;
}

Row subtract(const Row& a, const Row& b) {
  Row difference;
  for (int i = 0; i < kRow; ++i) difference.v[i] = a.v[i] - b.v[i];
  return difference;
}

uint32_t non_negative(const Row& row) {
  uint32_t signs = 0;
  for (int i = 0; i < kRow; ++i) signs |= row.v[i] >= 0 ? kBits.v[i] : 0;
  return signs;
}

Row signed_scale(uint32_t signs, float scale) {
  Row row;
  for (int i = 0; i < kRow; ++i) row.v[i] = (signs & kBits.v[i]) ? scale : -scale;
  return row;
}

void add_squares(Sums& sums, const Row& row) {
  for (int i = 0; i < kRow; ++i) {
    const double wide = row.v[i];
    sums.v[i] += wide * wide;
  }
}

double total(Sums sums) {
  for (int half = kRow / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums.v[i] += sums.v[i + half];
  }
  return sums.v[0];
}

#include "cpu/onebit_compress-inl.h"

}  // namespace

void onebit_compress(const OnebitCompressArgs& args, int64_t first, int64_t last) {
  compress_any(args, first, last);
}

void onebit_decompress(const OnebitDecompressArgs& args, int64_t first, int64_t last) {
  decompress_blocks(args, first, last);
}

}  // namespace mcp::scalar
