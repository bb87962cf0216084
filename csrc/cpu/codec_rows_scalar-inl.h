// Rows of 32 on any CPU: plain loops, which the compiler vectorises for its baseline.
// The vocabulary and its meaning are in codec_rows.h. Included inside namespace mcp::scalar.

struct Row {
  float v[kRow];
};

struct IntRow {
  int32_t v[kRow];
};

struct ByteRow {
  uint8_t v[kRow];
};

struct Sums {
  double v[kRow] = {};
};

struct Peak {
  int32_t v[kRow] = {};
};

// 1 << i for each lane: a table, since the baseline of x86-64 cannot shift lanes apart.
struct BitTable {
  uint32_t v[kRow] = {};
  constexpr BitTable() {
    for (int i = 0; i < kRow; ++i) v[i] = 1u << i;
  }
};
constexpr BitTable kBits;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast changes no size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Exponent and fraction move up; the exponent is rebiased from 15 to 127 by an exact product.
// Infinity and NaN keep the largest exponent.
inline float widen(Float16 value) {
  constexpr float kRebias = 5.192296858534828e+33f;  // 2^112
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  if ((value.bits & 0x7c00) == 0x7c00) return bit_cast<float>(sign | magnitude | 0x7f800000);
  const float scaled = bit_cast<float>(magnitude) * kRebias;
  return sign ? -scaled : scaled;
}

// To nearest, ties to even. Below 2^-14, float16 has a fixed step of 2^-24: adding 0.5 (a float32
// whose own step is 2^-24) rounds to it.
inline Float16 narrow(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000) {
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

template <class T>
inline Row load(const T* from) {
  Row row;
  for (int i = 0; i < kRow; ++i) row.v[i] = widen(from[i]);
  return row;
}

inline void store(float* to, const Row& row) { std::memcpy(to, row.v, sizeof row.v); }

inline void store(Float16* to, const Row& row) {
  for (int i = 0; i < kRow; ++i) to[i] = narrow(row.v[i]);
}

inline void store_halves(uint16_t* to, const IntRow& row) {
  for (int i = 0; i < kRow; ++i) to[i] = static_cast<uint16_t>(row.v[i]);
}

// A function of each lane of one or two rows.
template <class Out, class In, class F>
inline Out map(const In& a, F f) {
  Out out;
  for (int i = 0; i < kRow; ++i) out.v[i] = f(a.v[i]);
  return out;
}

template <class Out, class In, class F>
inline Out map(const In& a, const In& b, F f) {
  Out out;
  for (int i = 0; i < kRow; ++i) out.v[i] = f(a.v[i], b.v[i]);
  return out;
}

inline Row broadcast(float value) {
  Row row;
  for (int i = 0; i < kRow; ++i) row.v[i] = value;
  return row;
}

inline Row add(const Row& a, const Row& b) {
  return map<Row>(a, b, [](float x, float y) { return x + y; });
}

inline Row subtract(const Row& a, const Row& b) {
  return map<Row>(a, b, [](float x, float y) { return x - y; });
}

inline Row multiply(const Row& a, const Row& b) {
  return map<Row>(a, b, [](float x, float y) { return x * y; });
}

inline Row divide(const Row& a, const Row& b) {
  return map<Row>(a, b, [](float x, float y) { return x / y; });
}

inline Row clamp(const Row& a, float largest) {
  return map<Row>(a, [=](float x) {
    const float below = x < largest ? x : largest;
    return below > -largest ? below : -largest;
  });
}

inline uint32_t non_negative(const Row& row) {
  uint32_t signs = 0;
  for (int i = 0; i < kRow; ++i) signs |= row.v[i] >= 0 ? kBits.v[i] : 0;
  return signs;
}

inline Row signed_scale(uint32_t signs, float scale) {
  Row row;
  for (int i = 0; i < kRow; ++i) row.v[i] = (signs & kBits.v[i]) ? scale : -scale;
  return row;
}

inline void add_squares(Sums& sums, const Row& row) {
  for (int i = 0; i < kRow; ++i) {
    const double wide = row.v[i];
    sums.v[i] += wide * wide;
  }
}

inline double total(Sums sums) {
  for (int half = kRow / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums.v[i] += sums.v[i + half];
  }
  return sums.v[0];
}

inline void raise(Peak& peak, const Row& row) {
  for (int i = 0; i < kRow; ++i) {
    const int32_t magnitude = bit_cast<int32_t>(row.v[i]) & 0x7fffffff;
    peak.v[i] = peak.v[i] > magnitude ? peak.v[i] : magnitude;
  }
}

inline uint32_t highest(const Peak& peak) {
  int32_t most = 0;
  for (int i = 0; i < kRow; ++i) most = peak.v[i] > most ? peak.v[i] : most;
  return static_cast<uint32_t>(most);
}

inline IntRow int_broadcast(uint32_t value) {
  IntRow row;
  for (int i = 0; i < kRow; ++i) row.v[i] = static_cast<int32_t>(value);
  return row;
}

inline IntRow bits_of(const Row& row) { return bit_cast<IntRow>(row); }

inline Row row_of(const IntRow& bits) { return bit_cast<Row>(bits); }

// Adding 1.5 * 2^23, whose step is 1, rounds to a whole number, ties to even; the rest is the
// number. A call of rintf would cost ten times as much.
inline IntRow to_int(const Row& row) {
  constexpr float kMagic = 12582912.0f;
  return map<IntRow>(
      row, [](float x) { return bit_cast<int32_t>(x + kMagic) - bit_cast<int32_t>(kMagic); });
}

inline Row to_float(const IntRow& row) {
  return map<Row>(row, [](int32_t x) { return static_cast<float>(x); });
}

inline IntRow int_add(const IntRow& a, const IntRow& b) {
  return map<IntRow>(a, b, [](int32_t x, int32_t y) {
    return static_cast<int32_t>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y));
  });
}

inline IntRow int_and(const IntRow& a, const IntRow& b) {
  return map<IntRow>(a, b, [](int32_t x, int32_t y) { return x & y; });
}

inline IntRow int_or(const IntRow& a, const IntRow& b) {
  return map<IntRow>(a, b, [](int32_t x, int32_t y) { return x | y; });
}

template <int kShift>
inline IntRow shift_left(const IntRow& a) {
  return map<IntRow>(
      a, [](int32_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x) << kShift); });
}

template <int kShift>
inline IntRow shift_right(const IntRow& a) {
  return map<IntRow>(
      a, [](int32_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x) >> kShift); });
}

inline IntRow where_less(const IntRow& a, int32_t limit, const IntRow& yes, const IntRow& no) {
  IntRow row;
  for (int i = 0; i < kRow; ++i) row.v[i] = a.v[i] < limit ? yes.v[i] : no.v[i];
  return row;
}

inline ByteRow to_bytes(const IntRow& row) {
  return map<ByteRow>(row, [](int32_t x) { return static_cast<uint8_t>(x); });
}

inline IntRow from_bytes(const ByteRow& bytes) {
  return map<IntRow>(bytes, [](uint8_t x) { return static_cast<int32_t>(x); });
}

inline IntRow from_signed_bytes(const ByteRow& bytes) {
  return map<IntRow>(bytes, [](uint8_t x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
}

inline ByteRow load_bytes(const uint8_t* from) {
  ByteRow bytes;
  std::memcpy(bytes.v, from, kRow);
  return bytes;
}

inline void store_bytes(uint8_t* to, const ByteRow& bytes) { std::memcpy(to, bytes.v, kRow); }

inline void store_nibbles(uint8_t* to, const ByteRow& bytes) {
  for (int i = 0; i < kRow / 2; ++i) {
    to[i] = static_cast<uint8_t>((bytes.v[2 * i] & 15) | bytes.v[2 * i + 1] << 4);
  }
}

inline ByteRow load_nibbles(const uint8_t* from) {
  ByteRow bytes;
  for (int i = 0; i < kRow / 2; ++i) {
    bytes.v[2 * i] = from[i] & 15;
    bytes.v[2 * i + 1] = from[i] >> 4;
  }
  return bytes;
}

inline ByteRow sign_extend_nibbles(const ByteRow& nibbles) {
  return map<ByteRow>(nibbles, [](uint8_t x) { return static_cast<uint8_t>((x ^ 8) - 8); });
}
