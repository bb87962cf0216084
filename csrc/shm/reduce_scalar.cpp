// reduce.h for any CPU; defines the result of the others.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shm/reduce.h"

namespace mcp::shm::scalar {
namespace {

float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  float value;
  if (exponent == 0) {  // zero and subnormal: fraction * 2^-24, exact in float32
    value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  uint32_t bits = sign | (fraction << 13);
  if (exponent == 0x1f) {
    bits |= 0x7f800000u | (fraction ? 0x400000u : 0u);  // NaN becomes quiet, as the hardware does
  } else {
    bits |= (exponent + 127 - 15) << 23;
  }
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x1ffu));
  }
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    float positive;
    std::memcpy(&positive, &magnitude, sizeof magnitude);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(positive * 0x1p24f)));
  }
  const uint32_t rebased = magnitude - ((127 - 15) << 23);
  return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

float bfloat_to_float(uint16_t bfloat) {
  const uint32_t bits = static_cast<uint32_t>(bfloat) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry NaN into infinity
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

constexpr size_t kVectorBytes = 16;  // what every 64-bit CPU has
constexpr int kFloats = kVectorBytes / sizeof(float);

inline void widen_half(const uint16_t* from, float* to) {
  for (int i = 0; i < kFloats; ++i) to[i] = half_to_float(from[i]);
}

inline void narrow_half(const float* from, uint16_t* to) {
  for (int i = 0; i < kFloats; ++i) to[i] = float_to_half(from[i]);
}

inline void widen_bfloat(const uint16_t* from, float* to) {
  for (int i = 0; i < kFloats; ++i) to[i] = bfloat_to_float(from[i]);
}

inline void narrow_bfloat(const float* from, uint16_t* to) {
  for (int i = 0; i < kFloats; ++i) to[i] = float_to_bfloat(from[i]);
}

#include "shm/reduce-inl.h"

}  // namespace

ReduceFunction find_reduce(Type type, Reduction reduction) { return choose(type, reduction); }

}  // namespace mcp::shm::scalar
