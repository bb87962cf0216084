// The algorithm of onebit_compress_momentum over rows. Included inside the namespace of an
// instruction set, after codec_blocks-inl.h.

// First sweep: c into scratch, its bits, its scale.
template <class T, bool kPreconditioned>
float carry_momentum(const OnebitMomentumArgs& args, const T* grad, int64_t block, float* carried,
                     int64_t count, int64_t ahead) {
  const int64_t start = block * args.block_size;
  const uint8_t* old_bits = args.old_bits + start / 8;
  const float* error = args.error + start;
  const BFloat16* factors = kPreconditioned ? args.preconditioner + start : nullptr;
  uint8_t* bits = args.bits + start / 8;
  // beta1 * -s rounds to the negative of beta1 * s, so one product serves the block.
  const float kept = args.beta1 * args.old_scales[block];
  const Row grad_scale = broadcast(args.grad_scale), added = broadcast(args.one_minus_beta1);
  Sums sums;
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    prefetch_row(grad + i + ahead);
    Row g = multiply(load(grad + i), grad_scale);
    if (kPreconditioned) {
      prefetch_row(factors + i + ahead);
      g = multiply(g, load(factors + i));
    }
    const Row m = signed_scale(load_signs(old_bits + i / 8, kRow), kept);
    const Row c = add(add(m, multiply(g, added)), load(error + i));
    add_squares(sums, c);
    store(carried + i, c);
    store_signs(bits + i / 8, non_negative(c), kRow);
  }
  if (const int rest = static_cast<int>(count - i)) {
    Row g = multiply(load_part(grad + i, rest), grad_scale);
    if (kPreconditioned) g = multiply(g, load_part(factors + i, rest));
    const Row m = signed_scale(load_signs(old_bits + i / 8, rest), kept);
    Row c = add(add(m, multiply(g, added)), load_part(error + i, rest));
    c = load_part(reinterpret_cast<const float*>(&c), rest);  // no m in the padding
    add_squares(sums, c);
    store(carried + i, c);
    store_signs(bits + i / 8, non_negative(c) & first_signs(rest), rest);
  }
  return rms(sums, count);
}

template <class T>
void compress_momentum_block(const OnebitMomentumArgs& args, const OnebitGrad& tensor,
                             int64_t block, float* carried, bool more) {
  const int64_t inside = (block - tensor.first_block) * args.block_size;
  const int64_t count = std::min(args.block_size, tensor.numel - inside);
  const int64_t start = block * args.block_size;
  const int64_t ahead = more && inside + count < tensor.numel ? args.block_size : 0;
  const T* grad = static_cast<const T*>(tensor.grad) + inside;
  const float scale = args.preconditioner
                          ? carry_momentum<T, true>(args, grad, block, carried, count, ahead)
                          : carry_momentum<T, false>(args, grad, block, carried, count, ahead);
  finish_block(carried, args.error + start, args.bits + start / 8, scale, args.scales + block,
               count, args.block_size, ahead);
}

inline void compress_momentum_blocks(const OnebitMomentumArgs& args, int64_t first, int64_t last,
                                     float* carried) {
  const int64_t num_bytes = args.block_size / 8;
  int64_t tensor = 0, end = 0;  // the tensor of the block, and where its blocks end
  for (int64_t block = first; block < last; ++block) {
    while (tensor < args.num_grads && block >= end) {
      const OnebitGrad& grad = args.grads[tensor];
      end = grad.first_block + (grad.numel + args.block_size - 1) / args.block_size;
      if (block >= end) ++tensor;
    }
    if (tensor == args.num_grads) {  // padding alone
      std::memset(args.bits + block * num_bytes, 0, num_bytes);
      args.scales[block] = 0;
      continue;
    }
    const OnebitGrad& grad = args.grads[tensor];
    const bool more = block + 1 < last;
    switch (grad.type) {
      case FloatType::kFloat32:
        compress_momentum_block<float>(args, grad, block, carried, more);
        break;
      case FloatType::kBFloat16:
        compress_momentum_block<BFloat16>(args, grad, block, carried, more);
        break;
      case FloatType::kFloat16:
        compress_momentum_block<Float16>(args, grad, block, carried, more);
        break;
    }
  }
}
