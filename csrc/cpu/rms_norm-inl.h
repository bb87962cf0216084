// The algorithm of rms_norm over the vectors of an instruction set.
//
// Included inside the namespace of an instruction set, after block_vectors-inl.h.

// s = x + residual, rounded to E and stored; s of the vector at i.
template <class S, class E, class N>
inline typename S::Vec add_rounded(const E* x, const E* residual, E* sum, int64_t i, N n) {
  put<S>(sum + i, take<S>(x + i, n) + take<S>(residual + i, n), n);
  return take<S>(static_cast<const E*>(sum) + i, n);
}

template <class E>
void norm_rows(const RmsNormArgs& args, int64_t first, int64_t last) {
  using S = ComputeOf<E>;
  using T = typename S::Scalar;
  using Vec = typename S::Vec;
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = first; row < last; ++row) {
    const E* s = row_of<E>(args.x, row);
    T squares;
    if (args.sum != nullptr) {
      const E* x = s;
      const E* residual = row_of<E>(args.residual, row);
      E* sum = static_cast<E*>(args.sum) + row * args.width;
      squares = sum_of<S>(args.width, [&](int64_t i, auto n, Vec total) {
        const Vec v = add_rounded<S>(x, residual, sum, i, n);
        return S::fma(v, v, total);
      });
      s = sum;
    } else {
      squares = sum_of<S>(args.width, [&](int64_t i, auto n, Vec total) {
        const Vec v = take<S>(s + i, n);
        return S::fma(v, v, total);
      });
    }
    const T scale = 1 / std::sqrt(squares / static_cast<T>(args.width) + static_cast<T>(args.eps));
    static_cast<T*>(args.scale)[row] = scale;
    E* y = static_cast<E*>(args.y) + row * args.width;
    for_vectors<S>(args.width, [&](int64_t i, auto n) {
      put<S>(y + i, take<S>(s + i, n) * S::set1(scale) * take<S>(weight + i, n), n);
    });
  }
}

// What the second pass over kRows rows needs of each.
template <class E, int kRows>
struct NormRows {
  using T = typename ComputeOf<E>::Scalar;
  const E* dy[kRows];
  const E* dsum[kRows];
  const E* s[kRows];
  E* ds[kRows];
  T scale[kRows], slope[kRows];
};

// Gradients of rows [row, row + kRows), their part of dw added to dweight. Several rows at a time,
// so that dweight is read and written once for all of them.
template <class E, int kRows>
void norm_rows_bwd(const RmsNormBackwardArgs& args, int64_t row,
                   typename ComputeOf<E>::Scalar* dweight) {
  using S = ComputeOf<E>;
  using T = typename S::Scalar;
  using Vec = typename S::Vec;
  const T* weight = static_cast<const T*>(args.weight);
  const bool has_dsum = args.dsum.data != nullptr;
  NormRows<E, kRows> rows;
  for (int r = 0; r < kRows; ++r) {
    const E* dy = rows.dy[r] = row_of<E>(args.dy, row + r);
    const E* s = rows.s[r] = row_of<E>(args.s, row + r);
    rows.dsum[r] = has_dsum ? row_of<E>(args.dsum, row + r) : nullptr;
    rows.ds[r] = static_cast<E*>(args.ds) + (row + r) * args.width;
    const T scale = rows.scale[r] = static_cast<const T*>(args.scale)[row + r];
    const T projected = sum_of<S>(args.width, [&](int64_t i, auto n, Vec total) {
      return S::fma(take<S>(dy + i, n) * take<S>(weight + i, n), take<S>(s + i, n), total);
    });
    // One after the other: the cube alone leaves float32 before the square of s does.
    rows.slope[r] = projected / static_cast<T>(args.width) * scale * scale * scale;
  }
  for_vectors<S>(args.width, [&](int64_t i, auto n) {
    const Vec w = take<S>(weight + i, n);
    Vec dw = take<S>(static_cast<const T*>(dweight) + i, n);
    for (int r = 0; r < kRows; ++r) {
      const Vec scaled = take<S>(rows.dy[r] + i, n) * S::set1(rows.scale[r]);
      const Vec s = take<S>(rows.s[r] + i, n);
      dw = S::fma(scaled, s, dw);
      Vec ds = S::fma(s, S::set1(-rows.slope[r]), scaled * w);
      if (has_dsum) ds += take<S>(rows.dsum[r] + i, n);
      put<S>(rows.ds[r] + i, ds, n);
    }
    put<S>(dweight + i, dw, n);
  });
}

template <class E>
void norm_parts_bwd(const RmsNormBackwardArgs& args, int64_t first, int64_t last) {
  using T = typename ComputeOf<E>::Scalar;
  constexpr int kRows = 4;
  const int64_t rows_of_part = norm_rows_of_part(args.num_rows);
  for (int64_t part = first; part < last; ++part) {
    T* dweight = static_cast<T*>(args.dweight_parts) + part * args.width;
    std::fill(dweight, dweight + args.width, T(0));
    const int64_t end = std::min(args.num_rows, (part + 1) * rows_of_part);
    int64_t row = part * rows_of_part;
    for (; row + kRows <= end; row += kRows) norm_rows_bwd<E, kRows>(args, row, dweight);
    for (; row < end; ++row) norm_rows_bwd<E, 1>(args, row, dweight);
  }
}
