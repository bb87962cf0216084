// The algorithms of int8, int4 and fp8 over rows. Included inside the namespace of an instruction
// set, after codec_blocks-inl.h.

// A codec: the largest magnitude, bytes of codes, units to codes (giving back the values that they
// stand for), and codes to values.
struct Int8 {
  static constexpr float kLargest = 127;
  static constexpr int kPerByte = 1;
  static ByteRow load_codes(const uint8_t* from) { return load_bytes(from); }
  static void store_codes(uint8_t* to, ByteRow codes) { store_bytes(to, codes); }
  static ByteRow encode(const Row& units) { return to_bytes(to_int(units)); }
  static Row decode(ByteRow codes) { return to_float(from_signed_bytes(codes)); }
};

struct Int4 {
  static constexpr float kLargest = 7;
  static constexpr int kPerByte = 2;
  static ByteRow load_codes(const uint8_t* from) { return sign_extend_nibbles(load_nibbles(from)); }
  static void store_codes(uint8_t* to, ByteRow codes) { store_nibbles(to, codes); }
  static ByteRow encode(const Row& units) { return to_bytes(to_int(units)); }
  static Row decode(ByteRow codes) { return to_float(from_signed_bytes(codes)); }
};

// E4M3: sign, 4 bits of exponent with bias 7, 3 of fraction; no infinity, 0x7f is NaN.
struct Fp8 {
  static constexpr float kLargest = 448;
  static constexpr int kPerByte = 1;
  static constexpr int kFractionDrop = 20;           // 23 bits of fraction to 3
  static constexpr uint32_t kBiasDrop = 120u << 23;  // bias 127 to 7
  static ByteRow load_codes(const uint8_t* from) { return load_bytes(from); }
  static void store_codes(uint8_t* to, ByteRow codes) { store_bytes(to, codes); }

  static ByteRow encode(const Row& units) {
    const IntRow bits = bits_of(units);
    const IntRow sign = shift_right<24>(int_and(bits, int_broadcast(0x80000000)));
    const IntRow magnitude = int_and(bits, int_broadcast(0x7fffffff));
    // To nearest, ties to even: half a step less one, and one more where the kept part is odd.
    const IntRow odd = int_and(shift_right<kFractionDrop>(magnitude), int_broadcast(1));
    const IntRow rounded = int_add(int_add(magnitude, odd), int_broadcast(0x7ffff - kBiasDrop));
    // Below 2^-6 the step is 2^-9, which is that of a float32 at 2^14: adding 2^14 rounds to it.
    const IntRow anchor = int_broadcast(0x46800000);
    const Row anchored = add(row_of(magnitude), row_of(anchor));
    const IntRow small = int_add(bits_of(anchored), int_broadcast(0u - 0x46800000u));
    const IntRow code =
        where_less(magnitude, 121 << 23, small, shift_right<kFractionDrop>(rounded));
    return to_bytes(int_or(code, sign));
  }

  static Row decode(ByteRow codes) {
    const IntRow code = from_bytes(codes);
    const IntRow magnitude = int_and(code, int_broadcast(0x7f));
    const IntRow sign = shift_left<24>(int_and(code, int_broadcast(0x80)));
    const IntRow normal = int_add(shift_left<kFractionDrop>(magnitude), int_broadcast(kBiasDrop));
    const IntRow small = bits_of(multiply(to_float(magnitude), broadcast(0x1p-9f)));
    const IntRow value = int_or(where_less(magnitude, 8, small, normal), sign);
    return row_of(where_less(magnitude, 0x7f, value, int_broadcast(0x7fc00000)));
  }
};

// Codes of up to a row: `count` elements of it.
template <class Codec>
inline ByteRow load_codes_up_to(const uint8_t* from, int count) {
  if (count == kRow) return Codec::load_codes(from);
  uint8_t padded[kRow] = {};
  std::memcpy(padded, from, (count + Codec::kPerByte - 1) / Codec::kPerByte);
  return Codec::load_codes(padded);
}

template <class Codec>
inline void store_codes_up_to(uint8_t* to, ByteRow codes, int count) {
  if (count == kRow) return Codec::store_codes(to, codes);
  uint8_t padded[kRow];
  Codec::store_codes(padded, codes);
  std::memcpy(to, padded, (count + Codec::kPerByte - 1) / Codec::kPerByte);
}

// The block's scale from the largest magnitude's bits; NaN for a bad block.
template <class Codec>
inline float scale_of(uint32_t highest_bits) {
  float amax;
  std::memcpy(&amax, &highest_bits, sizeof amax);
  const float scale = amax / Codec::kLargest;
  return scale * Codec::kLargest <= kMaxFloat ? scale : kNan;
}

// Second sweep: codes of what was carried, and the new error where one is kept; padding has code 0.
template <class Codec, bool kKeepsError = true>
void code_block(const float* carried, float* error, uint8_t* codes, float scale, int64_t count,
                int64_t elements, int64_t ahead) {
  const int64_t all = (elements + Codec::kPerByte - 1) / Codec::kPerByte;
  if (!(scale > 0)) {
    std::memset(codes, 0, all);
    if (kKeepsError && scale == 0) std::memcpy(error, carried, count * sizeof(float));
    return;
  }
  const int64_t used = (count + Codec::kPerByte - 1) / Codec::kPerByte;
  std::memset(codes + used, 0, all - used);
  const Row scales = broadcast(scale);
  for_rows(count, [&](int64_t i, auto n) {
    if constexpr (kKeepsError) prefetch_row(error + i + ahead);
    const Row c = load(carried + i);
    const ByteRow row = Codec::encode(clamp(divide(c, scales), Codec::kLargest));
    store_codes_up_to<Codec>(codes + i / Codec::kPerByte, row, n);
    if constexpr (kKeepsError) {
      store_up_to(error + i, subtract(c, multiply(Codec::decode(row), scales)), n);
    }
  });
}

template <class Codec, class T>
void scaled_compress_blocks(const ScaledCompressArgs& args, int64_t first, int64_t last,
                            float* carried) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = std::min(args.block_size, args.numel - start);
    const int64_t ahead = block + 1 < last ? count : 0;
    const T* x = static_cast<const T*>(args.x) + start;
    float* error = args.error + start;
    Peak peak;
    for_rows(count, [&](int64_t i, auto n) {
      prefetch_row(x + i + ahead);
      const Row c = add(load_up_to(x + i, n), load_up_to(error + i, n));
      raise(peak, c);
      store(carried + i, c);
    });
    const float scale = scale_of<Codec>(highest(peak));
    args.scales[block] = scale;
    code_block<Codec>(carried, error, args.codes + start / Codec::kPerByte, scale, count, count,
                      ahead);
  }
}

template <class Codec, class T>
void scaled_quantize_blocks(const ScaledQuantizeArgs& args, int64_t first, int64_t last,
                            float* carried) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = std::min(args.block_size, args.numel - start);
    const T* x = static_cast<const T*>(args.x) + start;
    const Row zero = broadcast(0);  // as an error of zeros: -0 becomes +0, whose fp8 code differs
    Peak peak;
    for_rows(count, [&](int64_t i, auto n) {
      const Row c = add(load_up_to(x + i, n), zero);
      raise(peak, c);
      store(carried + i, c);
    });
    const float scale = scale_of<Codec>(highest(peak));
    args.scales[block] = scale;
    uint8_t* codes = args.codes + start / Codec::kPerByte;
    code_block<Codec, false>(carried, nullptr, codes, scale, count, count, 0);
  }
}

template <class Codec>
void scaled_decompress_blocks(const ScaledDecompressArgs& args, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = std::min(args.block_size, args.numel - start);
    const float scale = args.scales[block];
    float* x = args.x + start;
    if (!(std::fabs(scale) <= kMaxFloat)) {
      std::fill(x, x + count, kNan);
      continue;
    }
    const uint8_t* codes = args.codes + start / Codec::kPerByte;
    const Row scales = broadcast(scale);
    for_rows(count, [&](int64_t i, auto n) {
      const ByteRow row = load_codes_up_to<Codec>(codes + i / Codec::kPerByte, n);
      store_up_to(x + i, multiply(Codec::decode(row), scales), n);
    });
  }
}

template <class Codec>
void scaled_reduce_blocks(const ScaledReduceArgs& args, int64_t first, int64_t last,
                          float* carried) {
  const int64_t rank_bytes = (args.numel + Codec::kPerByte - 1) / Codec::kPerByte;
  const int64_t num_blocks = (args.numel - 1) / args.block_size + 1;
  const Row share = broadcast(static_cast<float>(1.0 / static_cast<double>(args.num_ranks)));
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = count_of(args, block), elements = elements_of(args, block);
    const int64_t ahead = block + 1 < last ? elements : 0;
    const float* rank_scales = args.rank_scales + block;
    const uint8_t* rank_codes = args.rank_codes + start / Codec::kPerByte;
    float* error = args.error + start;
    bool all_finite = true;  // an infinite scale times code 0 would be NaN all the same
    for (int64_t rank = 0; rank < args.num_ranks; ++rank) {
      all_finite &= std::fabs(rank_scales[rank * num_blocks]) <= kMaxFloat;
    }
    Peak peak;
    for_rows(count, [&](int64_t i, auto n) {
      prefetch_row(error + i + ahead);
      Row total;
      for (int64_t rank = 0; rank < args.num_ranks; ++rank) {
        const uint8_t* codes = rank_codes + rank * rank_bytes + i / Codec::kPerByte;
        const Row values = Codec::decode(load_codes_up_to<Codec>(codes, n));
        const Row value = multiply(values, broadcast(rank_scales[rank * num_blocks]));
        total = rank == 0 ? value : add(total, value);
      }
      Row u = add(multiply(total, share), load_up_to(error + i, n));
      if (n != kRow) u = load_part(reinterpret_cast<const float*>(&u), n);  // no padding
      raise(peak, u);
      store(carried + i, u);
    });
    const float scale = all_finite || count == 0 ? scale_of<Codec>(highest(peak)) : kNan;
    args.scales[block] = scale;
    code_block<Codec>(carried, error, args.codes + start / Codec::kPerByte, scale, count, elements,
                      ahead);
  }
}

template <class Codec>
void scaled_compress_any(const ScaledCompressArgs& args, int64_t first, int64_t last,
                         float* carried) {
  switch (args.x_type) {
    case FloatType::kFloat32:
      return scaled_compress_blocks<Codec, float>(args, first, last, carried);
    case FloatType::kBFloat16:
      return scaled_compress_blocks<Codec, BFloat16>(args, first, last, carried);
    case FloatType::kFloat16:
      return scaled_compress_blocks<Codec, Float16>(args, first, last, carried);
  }
}

template <class Codec>
void scaled_quantize_any(const ScaledQuantizeArgs& args, int64_t first, int64_t last,
                         float* carried) {
  switch (args.x_type) {
    case FloatType::kFloat32:
      return scaled_quantize_blocks<Codec, float>(args, first, last, carried);
    case FloatType::kBFloat16:
      return scaled_quantize_blocks<Codec, BFloat16>(args, first, last, carried);
    case FloatType::kFloat16:
      return scaled_quantize_blocks<Codec, Float16>(args, first, last, carried);
  }
}

// body<Codec>(args...) for the codec that was asked for.
#define MCP_FOR_CODEC(codec, body, ...) \
  switch (codec) {                      \
    case ScaledCodec::kInt8:            \
      return body<Int8>(__VA_ARGS__);   \
    case ScaledCodec::kInt4:            \
      return body<Int4>(__VA_ARGS__);   \
    case ScaledCodec::kFp8:             \
      return body<Fp8>(__VA_ARGS__);    \
  }
