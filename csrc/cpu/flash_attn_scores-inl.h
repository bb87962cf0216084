// Rows of scores: who sees whom, and what is done to a score between the two products.
//
// Included inside the namespace of an instruction set, after flash_attn_vector-inl.h.

constexpr double kLog2E = 1.4426950408889634;

// The keys that a row sees, as the window has it: [first, last), empty where it sees none.
struct KeyRange {
  int64_t first, last;
};

struct RowPlace {
  int64_t position, head;  // query position, query head
};

inline RowPlace attn_place(const FlashAttnArgs& args, int64_t kv_head, int64_t m) {
  const int64_t group = args.heads / args.kv_heads;
  return {m / group, kv_head * group + m % group};
}

// The place of row m + 1.
inline RowPlace next_place(RowPlace place, int64_t group) {
  const bool is_last = group == 1 || (place.head + 1) % group == 0;
  return is_last ? RowPlace{place.position + 1, place.head + 1 - group}
                 : RowPlace{place.position, place.head + 1};
}

inline int64_t attn_offset(const FlashAttnArgs& args, const AttnSequence& seq) {
  return args.top_left ? 0 : seq.num_keys - seq.num_rows;
}

inline KeyRange visible_keys(const FlashAttnArgs& args, const AttnSequence& seq, int64_t position) {
  const int64_t diagonal = position + attn_offset(args, seq);
  KeyRange range{0, seq.num_keys};
  if (args.window_left >= 0 && args.window_left < diagonal)
    range.first = diagonal - args.window_left;
  // Compared without a sum: a window may be as large as an int64.
  if (args.window_right >= 0 && args.window_right < seq.num_keys - diagonal) {
    range.last = std::max<int64_t>(0, diagonal + args.window_right + 1);
  }
  range.first = std::min(range.first, range.last);
  return range;
}

// The same as places in a tile of `count` keys.
inline KeyRange in_tile(KeyRange keys, int64_t tile_key, int64_t count) {
  const auto place = [&](int64_t key) {
    return std::min(std::max<int64_t>(key - tile_key, 0), count);
  };
  return {place(keys.first), place(keys.last)};
}

// What all rows [first, last) of a KV head see together.
inline KeyRange visible_keys(const FlashAttnArgs& args, const AttnSequence& seq, int64_t first,
                             int64_t last) {
  const int64_t group = args.heads / args.kv_heads;
  const KeyRange low = visible_keys(args, seq, first / group);
  const KeyRange high = visible_keys(args, seq, (last - 1) / group);
  return {std::min(low.first, high.last), high.last};
}

// Scores that only want scaling are scaled on the way through the exponential.
inline bool is_plain(const FlashAttnArgs& args) {
  return args.scale > 0 && args.softcap == 0 && args.bias.data == nullptr && args.slopes == nullptr;
}

inline bool hides(const FlashAttnArgs& args) {
  return args.window_left >= 0 || args.window_right >= 0 || args.bias.data != nullptr;
}

// tanh, to an ulp or two of the result. Source of the rational form: Cephes (Moshier), tanh.c.
template <class S>
typename S::Vec tanh_of(typename S::Vec x) {
  using T = typename S::Scalar;
  constexpr T kSmall = static_cast<T>(0.625);  // above it 1 - 2 / (e^2x + 1) loses no digit
  constexpr T kLarge = 20;                     // above it tanh is 1
  const auto size = x < 0 ? -x : x;
  const auto z = x * x;
  auto p = S::set1(static_cast<T>(-9.64399179425052238628e-1));
  p = S::fma(p, z, S::set1(static_cast<T>(-9.92877231001918586564e1)));
  p = S::fma(p, z, S::set1(static_cast<T>(-1.61468768441708447952e3)));
  auto q = z + static_cast<T>(1.12811678491632931402e2);
  q = S::fma(q, z, S::set1(static_cast<T>(2.23548839060100448583e3)));
  q = S::fma(q, z, S::set1(static_cast<T>(4.84406305325125486048e3)));
  const auto small = S::fma(x * z, p / q, x);
  const auto power = S::exp2((size > kLarge ? S::set1(kLarge) : size) * static_cast<T>(2 * kLog2E));
  const auto large = 1 - 2 / (power + 1);
  return size < kSmall ? small : x < 0 ? -large : large;
}

// row[j] += bias[j * stride]; a hidden score is -inf whatever it was: NaN + -inf would be NaN.
template <class T, class B>
void add_bias(T* row, const B* bias, int64_t stride, int64_t count) {
  constexpr T kHidden = -std::numeric_limits<T>::infinity();
  const auto add = [&](int64_t j, B value) {
    const T wide = static_cast<T>(widen(value));
    row[j] = wide == kHidden ? kHidden : row[j] + wide;
  };
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) add(j, bias[j]);
  } else {
    for (int64_t j = 0; j < count; ++j) add(j, bias[j * stride]);
  }
}

// row[j] becomes -inf where mask[j * stride] is 0. Bytes, not bool: a tensor of bool may hold
// others than 0 and 1, which no bool of C++ may be.
template <class S>
void apply_mask(typename S::Scalar* row, const uint8_t* mask, int64_t stride, int64_t count) {
  constexpr auto kHidden = -std::numeric_limits<typename S::Scalar>::infinity();
  typedef uint8_t Bytes __attribute__((vector_size(S::kLanes)));
  int64_t j = 0;
  for (; stride == 1 && j + S::kLanes <= count; j += S::kLanes) {
    Bytes bytes;
    std::memcpy(&bytes, mask + j, sizeof bytes);
    const auto is_shown = __builtin_convertvector(bytes, typename S::IntVec) != 0;
    S::store(row + j, is_shown ? S::load(row + j) : S::set1(kHidden));
  }
  for (; j < count; ++j) row[j] = mask[j * stride] != 0 ? row[j] : kHidden;
}

template <class S>
void add_any_bias(const AttnBias& bias, int64_t at, typename S::Scalar* row, int64_t count) {
  switch (bias.type) {
    case AttnType::kFloat64:
      return add_bias(row, static_cast<const double*>(bias.data) + at, bias.key, count);
    case AttnType::kFloat32:
      return add_bias(row, static_cast<const float*>(bias.data) + at, bias.key, count);
    case AttnType::kBFloat16:
      return add_bias(row, static_cast<const BFloat16*>(bias.data) + at, bias.key, count);
    case AttnType::kFloat16:
      return add_bias(row, static_cast<const Float16*>(bias.data) + at, bias.key, count);
    case AttnType::kBool:
      return apply_mask<S>(row, static_cast<const uint8_t*>(bias.data) + at, bias.key, count);
  }
}

// row[j] -= slope * |diagonal - j|, [first, last) in whole registers.
template <class S>
void subtract_distances(typename S::Scalar slope, int64_t diagonal, int64_t first, int64_t last,
                        typename S::Scalar* row) {
  // Lengths are below 2^31, so that the difference is exact before it becomes a floating number.
  const auto lanes = S::lane_numbers();
  const auto factor = S::set1(slope);
  for (int64_t j = first / S::kLanes * S::kLanes; j < last; j += S::kLanes) {
    const auto signed_distance = static_cast<typename S::Int>(diagonal - j) - lanes;
    const auto distance = signed_distance < 0 ? -signed_distance : signed_distance;
    S::store(row + j,
             S::load(row + j) - factor * __builtin_convertvector(distance, typename S::Vec));
  }
}

// Raw products times the scale, through the softcap; [first, last) in whole registers. tanh, where
// given, is what the softcap's tanh was.
template <class S>
void scale_row(const FlashAttnArgs& args, int64_t first, int64_t last, typename S::Scalar* row,
               typename S::Scalar* tanh) {
  using T = typename S::Scalar;
  const bool has_cap = args.softcap > 0;
  const auto scale = S::set1(static_cast<T>(args.scale));
  const auto cap = S::set1(static_cast<T>(args.softcap));
  for (int64_t j = first / S::kLanes * S::kLanes; j < last; j += S::kLanes) {
    auto s = S::load(row + j) * scale;
    if (has_cap) {
      const auto value = tanh_of<S>(s / cap);
      if (tanh != nullptr) S::store(tanh + j, value);
      s = cap * value;
    }
    S::store(row + j, s);
  }
}

// One row of raw products made into natural scores, keys [first, last) of the tile that begins at
// key `tile_key`.
template <class S>
void score_row(const FlashAttnArgs& args, const AttnSequence& seq, RowPlace place, int64_t tile_key,
               int64_t first, int64_t last, typename S::Scalar* row, typename S::Scalar* tanh) {
  using T = typename S::Scalar;
  if (first >= last) return;
  scale_row<S>(args, first, last, row, tanh);
  if (args.bias.data != nullptr) {
    const int64_t at = seq.batch * args.bias.batch + place.head * args.bias.head +
                       place.position * args.bias.row + (tile_key + first) * args.bias.key;
    add_any_bias<S>(args.bias, at, row + first, last - first);
  }
  if (args.slopes != nullptr) {
    const T slope = static_cast<T>(args.slopes[seq.batch * args.slopes_batch + place.head]);
    const int64_t diagonal = place.position + attn_offset(args, seq) - tile_key;
    subtract_distances<S>(slope, diagonal, first, last, row);
  }
}

// factors[j - first], j in [first, last): 0 where dropout drops key j, else 1 / (1 - p).
//
// The word of (b, h, i, j) is word j % 4 of Philox4x32-10 at counter (j / 4, i, h + 2^16 b, offset)
// under the key seed; see mcp_kernels/ops/attention_mask.py.
template <class T>
void dropout_factors(const FlashAttnArgs& args, const AttnSequence& seq, RowPlace place,
                     int64_t first, int64_t last, T* factors) {
  constexpr int kQuads = kAttnKeys / 4 + 1;
  const auto threshold = static_cast<uint64_t>(std::nearbyint(args.dropout_p * 4294967296.0));
  const T kept = args.dropout_p < 1 ? static_cast<T>(1 / (1 - args.dropout_p)) : T{0};
  uint32_t c0[kQuads], c1[kQuads], c2[kQuads], c3[kQuads];
  for (int i = 0; i < kQuads; ++i) {  // all quads side by side, for the compiler's vectors
    c0[i] = static_cast<uint32_t>(first / 4 + i);
    c1[i] = static_cast<uint32_t>(place.position);
    c2[i] = static_cast<uint32_t>(place.head + (seq.batch << 16));
    c3[i] = static_cast<uint32_t>(args.offset);
  }
  uint32_t key0 = static_cast<uint32_t>(args.seed), key1 = static_cast<uint32_t>(args.seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int i = 0; i < kQuads; ++i) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0[i];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<uint32_t>(product1);
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<uint32_t>(product0);
    }
  }
  T all[4 * kQuads];
  for (int i = 0; i < kQuads; ++i) {
    all[4 * i] = c0[i] >= threshold ? kept : T{0};
    all[4 * i + 1] = c1[i] >= threshold ? kept : T{0};
    all[4 * i + 2] = c2[i] >= threshold ? kept : T{0};
    all[4 * i + 3] = c3[i] >= threshold ? kept : T{0};
  }
  std::copy(all + first % 4, all + first % 4 + (last - first), factors);
}
