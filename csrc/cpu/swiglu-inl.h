// The algorithm of swiglu over the vectors of an instruction set.
//
// Included inside the namespace of an instruction set, after block_vectors-inl.h.

// sigma and 1 - sigma, both to full relative precision: neither is taken from the other.
template <class S>
struct Sigmoid {
  typename S::Vec value, rest;

  explicit Sigmoid(typename S::Vec x) {
    using Vec = typename S::Vec;
    using T = typename S::Scalar;
    const Vec zero{};
    const Vec e = S::exp2((x < zero ? x : zero - x) * S::set1(T(1.4426950408889634)));  // 1 / ln 2
    const Vec large = S::set1(1) / (S::set1(1) + e);
    const Vec small = e * large;
    value = x < zero ? small : large;
    rest = x < zero ? large : small;
  }
};

// f(row, at, count) for each piece of a row that elements [first, last) of all rows touch.
template <class F>
inline void for_pieces(int64_t width, int64_t first, int64_t last, const F& f) {
  for (int64_t row = first / width, at = first % width; first < last; ++row, at = 0) {
    const int64_t count = std::min(width - at, last - first);
    f(row, at, count);
    first += count;
  }
}

template <class E>
void gate_elements(const SwigluArgs& args, int64_t first, int64_t last) {
  using S = ComputeOf<E>;
  for_pieces(args.width, first, last, [&](int64_t row, int64_t at, int64_t count) {
    const E* gate = row_of<E>(args.gate, row) + at;
    const E* up = row_of<E>(args.up, row) + at;
    E* y = static_cast<E*>(args.y) + row * args.width + at;
    for_vectors<S>(count, [&](int64_t i, auto n) {
      const auto g = take<S>(gate + i, n);
      put<S>(y + i, g * Sigmoid<S>(g).value * take<S>(up + i, n), n);
    });
  });
}

template <class E>
void gate_elements_bwd(const SwigluBackwardArgs& args, int64_t first, int64_t last) {
  using S = ComputeOf<E>;
  for_pieces(args.width, first, last, [&](int64_t row, int64_t at, int64_t count) {
    const E* dy = row_of<E>(args.dy, row) + at;
    const E* gate = row_of<E>(args.gate, row) + at;
    const E* up = row_of<E>(args.up, row) + at;
    E* dgate = static_cast<E*>(args.dgate) + row * args.width + at;
    E* dup = static_cast<E*>(args.dup) + row * args.width + at;
    for_vectors<S>(count, [&](int64_t i, auto n) {
      const auto d = take<S>(dy + i, n), g = take<S>(gate + i, n);
      const Sigmoid<S> sigma(g);
      put<S>(dup + i, d * (g * sigma.value), n);
      const auto slope = sigma.value * S::fma(g, sigma.rest, S::set1(1));
      put<S>(dgate + i, d * take<S>(up + i, n) * slope, n);
    });
  });
}
