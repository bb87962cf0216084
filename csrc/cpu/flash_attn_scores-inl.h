// Rows of scores: who sees whom, and what is done to a score between the two products.
//
// Included inside the namespace of an instruction set, after flash_attn_vector-inl.h.

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

inline double bias_value(const AttnBias& bias, int64_t at) {
  switch (bias.type) {
    case AttnType::kFloat64:
      return static_cast<const double*>(bias.data)[at];
    case AttnType::kFloat32:
      return static_cast<const float*>(bias.data)[at];
    case AttnType::kBFloat16:
      return widen(static_cast<const BFloat16*>(bias.data)[at]);
    case AttnType::kFloat16:
      return widen(static_cast<const Float16*>(bias.data)[at]);
    case AttnType::kBool:
      break;
  }
  return static_cast<const bool*>(bias.data)[at] ? 0.0 : -std::numeric_limits<double>::infinity();
}

// tanh, to an ulp or two of the result also near 0.
template <class T>
T tanh_of(T x) {
  return std::tanh(x);
}

// One row of raw products made into natural scores, keys [first, last) of the tile that begins at
// key `tile_key`. tanh, where given, is what the softcap's tanh was.
template <class S>
void score_row(const FlashAttnArgs& args, const AttnSequence& seq, RowPlace place, int64_t tile_key,
               int64_t first, int64_t last, typename S::Scalar* row, typename S::Scalar* tanh) {
  using T = typename S::Scalar;
  const T scale = static_cast<T>(args.scale);
  for (int64_t j = first; j < last; ++j) row[j] *= scale;
  if (args.softcap > 0) {
    const T cap = static_cast<T>(args.softcap);
    for (int64_t j = first; j < last; ++j) {
      const T value = tanh_of(row[j] / cap);
      if (tanh != nullptr) tanh[j] = value;
      row[j] = cap * value;
    }
  }
  if (args.bias.data != nullptr) {
    int64_t at = seq.batch * args.bias.batch + place.head * args.bias.head +
                 place.position * args.bias.row + (tile_key + first) * args.bias.key;
    for (int64_t j = first; j < last; ++j, at += args.bias.key) {
      if (args.bias.type == AttnType::kBool) {
        // A hidden score is -inf whatever it was: NaN + -inf would be NaN.
        if (!static_cast<const bool*>(args.bias.data)[at])
          row[j] = -std::numeric_limits<T>::infinity();
        continue;
      }
      const T bias = static_cast<T>(bias_value(args.bias, at));
      row[j] = bias == -std::numeric_limits<T>::infinity() ? bias : row[j] + bias;
    }
  }
  if (args.slopes != nullptr) {
    const T slope = static_cast<T>(args.slopes[seq.batch * args.slopes_batch + place.head]);
    const int64_t diagonal = place.position + attn_offset(args, seq) - tile_key;
    for (int64_t j = first; j < last; ++j) row[j] -= slope * static_cast<T>(std::abs(diagonal - j));
  }
}

// factors[j - first], j in [first, last): 0 where dropout drops key j, else 1 / (1 - p).
//
// The word of (b, h, i, j) is word j % 4 of Philox4x32-10 at counter (j / 4, i, h + 2^16 b, offset)
// under the key seed; see mcp_kernels/ops/attention_mask.py.
template <class T>
void dropout_factors(const FlashAttnArgs& args, const AttnSequence& seq, RowPlace place,
                     int64_t first, int64_t last, T* factors) {
  const auto threshold = static_cast<uint64_t>(std::nearbyint(args.dropout_p * 4294967296.0));
  const T kept = args.dropout_p < 1 ? static_cast<T>(1 / (1 - args.dropout_p)) : T{0};
  for (int64_t quad = first / 4; quad * 4 < last; ++quad) {
    uint32_t c[4] = {static_cast<uint32_t>(quad), static_cast<uint32_t>(place.position),
                     static_cast<uint32_t>(place.head + (seq.batch << 16)),
                     static_cast<uint32_t>(args.offset)};
    uint32_t key0 = static_cast<uint32_t>(args.seed), key1 = static_cast<uint32_t>(args.seed >> 32);
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c[0];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * c[2];
      const uint32_t next[4] = {
          static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(product0)};
      std::memcpy(c, next, sizeof c);
    }
    for (int64_t word = 0; word < 4; ++word) {
      const int64_t j = quad * 4 + word;
      if (j >= first && j < last) factors[j - first] = c[word] >= threshold ? kept : T{0};
    }
  }
}
