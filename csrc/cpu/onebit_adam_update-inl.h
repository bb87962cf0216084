// The algorithm of onebit_adam_update over rows. Included inside the namespace of an instruction
// set, after codec_blocks-inl.h.

// Elements ahead of their use that memory is asked for: two pages of 4 KiB, past which a core's
// own prefetcher does not look.
constexpr int64_t kAdamAhead = 2048;

// Param is float, BFloat16 or Float16; without a master it is float.
template <class Param>
void update_block(const OnebitAdamArgs& args, const OnebitParam& tensor, int64_t block) {
  const int64_t inside = (block - tensor.first_block) * args.block_size;
  const int64_t count = std::min(args.block_size, tensor.numel - inside);
  const int64_t start = block * args.block_size;
  Param* param = static_cast<Param*>(tensor.param) + inside;
  float* weights = args.master ? args.master + start : reinterpret_cast<float*>(param);
  const float* denom = args.denom + start;
  const uint8_t* bits = args.bits + start / 8;
  // step_size * -s rounds to the negative of step_size * s, so one product serves the block.
  const float step = args.step_size * args.scales[block];
  const Row decay = broadcast(tensor.decay);
  for_rows(count, [&](int64_t i, auto n) {
    prefetch_row(weights + i + kAdamAhead);
    prefetch_row(denom + i + kAdamAhead);
    Row below = load_up_to(denom + i, n);
    const Row update = divide(signed_scale(load_signs(bits + i / 8, n), step), below);
    const Row moved = subtract(multiply(load_up_to(weights + i, n), decay), update);
    store_up_to(weights + i, moved, n);
    if (args.master) store_up_to(param + i, moved, n);
  });
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
        update_block<float>(args, param, block);
        break;
      case FloatType::kBFloat16:
        update_block<BFloat16>(args, param, block);
        break;
      case FloatType::kFloat16:
        update_block<Float16>(args, param, block);
        break;
    }
  }
}
