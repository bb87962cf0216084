// The algorithm of onebit_reduce over rows. Included inside the namespace of an instruction set,
// after codec_blocks-inl.h.

// First sweep: u into scratch, its bits, its scale.
inline float carry_mean(const OnebitReduceArgs& args, int64_t block, float* carried, int64_t count,
                        int64_t ahead) {
  const int64_t start = block * args.block_size;
  const int64_t rank_bytes = (args.numel + 7) / 8;
  const int64_t num_blocks = (args.numel - 1) / args.block_size + 1;
  const uint8_t* rank_bits = args.rank_bits + start / 8;
  const float* rank_scales = args.rank_scales + block;
  const float* error = args.error + start;
  uint8_t* bits = args.bits + start / 8;
  const Row share = broadcast(static_cast<float>(1.0 / static_cast<double>(args.num_ranks)));
  Sums sums;
  for_rows(count, [&](int64_t i, auto n) {
    prefetch_row(error + i + ahead);
    Row total = signed_scale(load_signs(rank_bits + i / 8, n), rank_scales[0]);
    for (int64_t rank = 1; rank < args.num_ranks; ++rank) {
      const uint32_t signs = load_signs(rank_bits + rank * rank_bytes + i / 8, n);
      total = add(total, signed_scale(signs, rank_scales[rank * num_blocks]));
    }
    Row u = add(multiply(total, share), load_up_to(error + i, n));
    if (n != kRow) u = load_part(reinterpret_cast<const float*>(&u), n);  // no codes of padding
    add_squares(sums, u);
    store(carried + i, u);
    store_signs(bits + i / 8, signs_up_to(u, n), n);
  });
  return count ? rms(sums, count) : 0;
}

inline void reduce_blocks(const OnebitReduceArgs& args, int64_t first, int64_t last,
                          float* carried) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t count = count_of(args, block), elements = elements_of(args, block);
    const int64_t ahead = block + 1 < last ? elements : 0;
    const int64_t start = block * args.block_size;
    const float scale = carry_mean(args, block, carried, count, ahead);
    finish_block(carried, args.error + start, args.bits + start / 8, scale, args.scales + block,
                 count, elements, ahead);
  }
}
