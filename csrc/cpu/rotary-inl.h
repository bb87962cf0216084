// The algorithm of rotary over the vectors of an instruction set.
//
// Included inside the namespace of an instruction set, after block_vectors-inl.h.

// One head. No fused products: the bits are to be those of the definition.
template <class S, class E, bool kBack>
inline void rotate_head(const E* x, E* y, const typename S::Scalar* cos,
                        const typename S::Scalar* sin, int64_t half) {
  for_vectors<S>(half, [&](int64_t i, auto n) {
    const auto a = take<S>(x + i, n), b = take<S>(x + half + i, n);
    const auto c = take<S>(cos + i, n), s = take<S>(sin + i, n);
    put<S>(y + i, kBack ? a * c + b * s : a * c - b * s, n);
    put<S>(y + half + i, kBack ? b * c - a * s : b * c + a * s, n);
  });
}

template <class S, class E, bool kBack>
void rotate_rows(const RotaryArgs& args, int64_t first, int64_t last) {
  using T = typename S::Scalar;
  const E* x = static_cast<const E*>(args.x);
  const int64_t row_size = args.heads * 2 * args.half;
  for (int64_t row = first; row < last; ++row) {
    const int64_t batch = row / args.seq_len, position = row % args.seq_len;
    const E* from = x + batch * args.batch_stride + position * args.row_stride;
    E* to = static_cast<E*>(args.y) + row * row_size;
    const T* cos = static_cast<const T*>(args.cos) + position * args.half;
    const T* sin = static_cast<const T*>(args.sin) + position * args.half;
    for (int64_t head = 0; head < args.heads; ++head) {
      rotate_head<S, E, kBack>(from + head * args.head_stride, to + head * 2 * args.half, cos, sin,
                               args.half);
    }
  }
}

template <class S, class E>
void rotate_either(const RotaryArgs& args, int64_t first, int64_t last) {
  args.back ? rotate_rows<S, E, true>(args, first, last)
            : rotate_rows<S, E, false>(args, first, last);
}

// Half a small head is a whole number of narrower vectors, or else a rest of one.
template <class E>
void rotate_any(const RotaryArgs& args, int64_t first, int64_t last) {
  using S = ComputeOf<E>;
  if constexpr (S::kLanes > 4) {
    using Half = Vector<typename S::Scalar, sizeof(typename S::Vec) / 2>;
    if (args.half % S::kLanes != 0 && args.half % Half::kLanes == 0) {
      return rotate_either<Half, E>(args, first, last);
    }
  }
  rotate_either<S, E>(args, first, last);
}
