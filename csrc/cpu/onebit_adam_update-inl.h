// The algorithm of onebit_adam_update over rows. Included inside the namespace of an instruction
// set, after codec_blocks-inl.h.

// Elements ahead of their use that memory is asked for: two pages of 4 KiB, past which a core's
// own prefetcher does not look.
constexpr int64_t kAdamAhead = 2048;

// The first `count` steps of a row: `step` with the signs at `byte`, over denom, where it moves.
template <bool kDivides>
inline Row step_of(const OnebitAdamArgs& args, int64_t at, float step, int count) {
  Row moved = signed_scale(load_signs(args.bits + at / 8, count), step);
  if (kDivides) moved = divide(moved, load_up_to(args.denom + at, count));
  if (args.moves) {
    const IntRow masked = bits_of(signed_scale(load_signs(args.moves + at / 8, count), 1.0f));
    moved = row_of(where_less(masked, 0, int_broadcast(0), bits_of(moved)));
  }
  return moved;
}

// Param is float, BFloat16 or Float16; without a master it is float.
template <class Param, bool kDivides>
void update_block(const OnebitAdamArgs& args, const OnebitParam& tensor, int64_t block) {
  const int64_t inside = (block - tensor.first_block) * args.block_size;
  const int64_t count = std::min(args.block_size, tensor.numel - inside);
  const int64_t start = block * args.block_size;
  Param* param = static_cast<Param*>(tensor.param) + inside;
  float* weights = args.master ? args.master + start : reinterpret_cast<float*>(param);
  // step_size * -s rounds to the negative of step_size * s, so one product serves the block.
  const float step = args.step_size * args.scales[block];
  const Row decay = broadcast(tensor.decay);
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    prefetch_row(weights + i + kAdamAhead);
    if (kDivides) prefetch_row(args.denom + start + i + kAdamAhead);
    const Row update = step_of<kDivides>(args, start + i, step, kRow);
    const Row moved = subtract(multiply(load(weights + i), decay), update);
    store(weights + i, moved);
    if (args.master) store(param + i, moved);
  }
  if (const int rest = static_cast<int>(count - i)) {
    const Row update = step_of<kDivides>(args, start + i, step, rest);
    const Row moved = subtract(multiply(load_part(weights + i, rest), decay), update);
    store_part(weights + i, moved, rest);
    if (args.master) store_part(param + i, moved, rest);
  }
}

template <class Param>
void update_any(const OnebitAdamArgs& args, const OnebitParam& tensor, int64_t block) {
  args.denom ? update_block<Param, true>(args, tensor, block)
             : update_block<Param, false>(args, tensor, block);
}

inline void update_blocks(const OnebitAdamArgs& args, int64_t first, int64_t last) {
  int64_t tensor = 0, end = 0;  // the tensor of the block, and where its blocks end
  for (int64_t block = first; block < last; ++block) {
    while (block >= end) {
      const OnebitParam& param = args.params[tensor];
      end = param.first_block + (param.numel + args.block_size - 1) / args.block_size;
      if (block >= end) ++tensor;
    }
    const OnebitParam& param = args.params[tensor];
    switch (param.type) {
      case FloatType::kFloat32:
        update_any<float>(args, param, block);
        break;
      case FloatType::kBFloat16:
        update_any<BFloat16>(args, param, block);
        break;
      case FloatType::kFloat16:
        update_any<Float16>(args, param, block);
        break;
    }
  }
}
