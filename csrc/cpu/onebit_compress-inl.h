// The algorithm of onebit_compress, written once over a small vocabulary of vectors.
//
// Included inside the namespace of an instruction set, after these were defined there:
//   Row, Sums                                  32 float32; 32 float64, zero when made
//   Row load(const T*), void store(float*, Row)
//   Row add(Row, Row)
//   uint32_t non_negative(Row)                 bit i: element i >= 0, so 0 for NaN
//   Row signed_scale(uint32_t bits, float s)   element i: bit i ? s : -s
//   Row subtract(Row, Row)
//   void add_squares(Sums&, Row)
//   double total(Sums)                         lane l + lane l + 16, then 8, 4, 2, 1
//
// No include guard: each instruction set compiles its own copy.

template <class T>
Row load_part(const T* from, int count) {
  T padded[kRow] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

inline void store_part(float* to, Row row, int count) {
  float padded[kRow];
  store(padded, row);
  std::memcpy(to, padded, count * sizeof(float));
}

// Packed signs of up to a row; the host is little-endian, so byte j holds elements 8j .. 8j + 7.
inline void store_signs(uint8_t* to, uint32_t signs, int count) {
  std::memcpy(to, &signs, (count + 7) / 8);
}

inline uint32_t load_signs(const uint8_t* from, int count) {
  uint32_t signs = 0;
  std::memcpy(&signs, from, (count + 7) / 8);
  return signs;
}

// Asks memory for one row, a block ahead of its use. Each sweep asks for one of the two streams, so
// that memory is busy all the time, though only the first sweep would have to wait for it.
template <class T>
inline void prefetch_row(const T* row) {
  constexpr int kLine = 64;
  for (size_t byte = 0; byte < kRow * sizeof(T); byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
  }
}

// First sweep: bits and scale. The block is in the nearest cache afterwards.
template <class T>
float pack_block(const T* x, const float* error, uint8_t* bits, int64_t count, int64_t ahead) {
  Sums sums;
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    prefetch_row(x + i + ahead);
    const Row c = add(load(x + i), load(error + i));
    add_squares(sums, c);
    store_signs(bits + i / 8, non_negative(c), kRow);
  }
  if (const int rest = static_cast<int>(count - i)) {
    const Row c = add(load_part(x + i, rest), load_part(error + i, rest));
    add_squares(sums, c);
    store_signs(bits + i / 8, non_negative(c) & ((1u << rest) - 1), rest);
  }
  return static_cast<float>(std::sqrt(total(sums) / static_cast<double>(count)));
}

// Second sweep: the new error, from the packed bits.
template <class T>
void keep_error(const T* x, float* error, const uint8_t* bits, float scale, int64_t count,
                int64_t ahead) {
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    prefetch_row(error + i + ahead);
    const Row c = add(load(x + i), load(error + i));
    store(error + i, subtract(c, signed_scale(load_signs(bits + i / 8, kRow), scale)));
  }
  if (const int rest = static_cast<int>(count - i)) {
    const Row c = add(load_part(x + i, rest), load_part(error + i, rest));
    const Row sent = signed_scale(load_signs(bits + i / 8, rest), scale);
    store_part(error + i, subtract(c, sent), rest);
  }
}

template <class T>
void compress_blocks(const OnebitCompressArgs& args, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(args.x);
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = std::min(args.block_size, args.numel - start);
    uint8_t* bits = args.bits + start / 8;
    const int64_t ahead = block + 1 < last ? count : 0;
    const float scale = pack_block(x + start, args.error + start, bits, count, ahead);
    if (scale <= std::numeric_limits<float>::max()) {
      args.scales[block] = scale;
      keep_error(x + start, args.error + start, bits, scale, count, ahead);
    } else {
      args.scales[block] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

inline void decompress_blocks(const OnebitDecompressArgs& args, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t end = std::min(start + args.block_size, args.numel);
    const float scale = args.scales[block];
    int64_t i = start;
    for (; i + kRow <= end; i += kRow) {
      store(args.x + i, signed_scale(load_signs(args.bits + i / 8, kRow), scale));
    }
    if (const int rest = static_cast<int>(end - i)) {
      store_part(args.x + i, signed_scale(load_signs(args.bits + i / 8, rest), scale), rest);
    }
  }
}

inline void compress_any(const OnebitCompressArgs& args, int64_t first, int64_t last) {
  switch (args.x_type) {
    case FloatType::kFloat32:
      return compress_blocks<float>(args, first, last);
    case FloatType::kBFloat16:
      return compress_blocks<BFloat16>(args, first, last);
    case FloatType::kFloat16:
      return compress_blocks<Float16>(args, first, last);
  }
}
