// The algorithm of onebit_compress over rows. Included inside the namespace of an instruction set,
// after codec_blocks-inl.h.

// Loops and their rests are written out: through for_rows the same instructions run 10 to 14 %
// slower (GCC 12), here where memory is all but reached.

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
    store_signs(bits + i / 8, non_negative(c) & first_signs(rest), rest);
  }
  return rms(sums, count);
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
    if (scale <= kMaxFloat) {
      args.scales[block] = scale;
      keep_error(x + start, args.error + start, bits, scale, count, ahead);
    } else {
      args.scales[block] = kNan;
    }
  }
}

inline void decompress_blocks(const OnebitDecompressArgs& args, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * args.block_size;
    const int64_t count = std::min(args.block_size, args.numel - start);
    const float scale = args.scales[block];
    for_rows(count, [&](int64_t i, auto n) {
      const Row row = signed_scale(load_signs(args.bits + (start + i) / 8, n), scale);
      store_up_to(args.x + start + i, row, n);
    });
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
