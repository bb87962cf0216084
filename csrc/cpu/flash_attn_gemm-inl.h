// Small matrix products of attention, in micro-tiles that stay in registers.
//
// Included inside the namespace of an instruction set, after flash_attn_factors-inl.h. S, an
// instruction set's vector, also says how many registers a micro-tile may take:
//   S::kColumns            registers side by side
//   S::rows(columns)       rows for that many columns: rows * columns sums, columns of b, one of a
// Depths are in units of Factors<S>, and so are the strides of a and b; columns and c in scalars.

// How sums join what is in c.
enum class Into { kSet, kAdd, kScaledAdd };  // c = ab, c += ab, c = row_scale * c + ab

// Units [first, last) of a row of a; what lies outside is 0. Neither falls from row to row.
struct GemmSpan {
  int64_t first, last;
};

template <class T>
struct GemmTo {
  T* c;
  int64_t ldc;
  Into into;
  const T* row_scale;
  const GemmSpan* spans;  // by row; null: the whole depth of every row
};

// How is known here, not asked for each register: with short depths that would show.
template <class S, int R, int N, Into kInto>
inline void put_sums(const typename S::Vec (&sum)[R][N], GemmTo<typename S::Scalar> to) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    typename S::Scalar* c = to.c + r * to.ldc;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      typename S::Vec result = sum[r][n];
      if (kInto == Into::kAdd) result = result + S::load(c + n * S::kLanes);
      if (kInto == Into::kScaledAdd) {
        result = S::fma(S::set1(to.row_scale[r]), S::load(c + n * S::kLanes), result);
      }
      S::store(c + n * S::kLanes, result);
    }
  }
}

// Micro-tile: R rows, N registers of columns. a(r, k) is a[r * a_row + k * kStep].
template <class S, int R, int N, int kRow, int kStep>
inline void micro_tile(int64_t depth, const UnitOf<S>* a, int64_t a_row, const UnitOf<S>* b,
                       int64_t ldb, const GemmTo<typename S::Scalar>& to) {
  using Vec = typename S::Vec;
  using F = Factors<S>;
  const int64_t row = kRow ? kRow : a_row;
  Vec sum[R][N] = {};
  for (int64_t k = 0; k < depth; ++k, a += kStep, b += ldb) {
    Vec bk[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) bk[n] = F::load(b + n * S::kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec ak = F::broadcast(a + r * row);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = F::multiply_add(ak, bk[n], sum[r][n]);
    }
  }
  switch (to.into) {
    case Into::kSet:
      return put_sums<S, R, N, Into::kSet>(sum, to);
    case Into::kAdd:
      return put_sums<S, R, N, Into::kAdd>(sum, to);
    case Into::kScaledAdd:
      return put_sums<S, R, N, Into::kScaledAdd>(sum, to);
  }
}

// Rows [r, rows) in tiles of R; what is left goes to smaller tiles.
template <class S, int R, int N, int kRow, int kStep>
inline void gemm_rows(int64_t r, int64_t rows, int64_t depth, const UnitOf<S>* a, int64_t a_row,
                      const UnitOf<S>* b, int64_t ldb, GemmTo<typename S::Scalar> to) {
  for (; r + R <= rows; r += R) {
    GemmTo<typename S::Scalar> here = to;
    here.c += r * to.ldc;
    if (to.row_scale != nullptr) here.row_scale += r;
    if (to.spans != nullptr) {
      const int64_t first = to.spans[r].first;
      const int64_t taken = std::max<int64_t>(0, to.spans[r + R - 1].last - first);
      micro_tile<S, R, N, kRow, kStep>(taken, a + r * (kRow ? kRow : a_row) + first * kStep, a_row,
                                       b + first * ldb, ldb, here);
      continue;
    }
    micro_tile<S, R, N, kRow, kStep>(depth, a + r * (kRow ? kRow : a_row), a_row, b, ldb, here);
  }
  if constexpr (R > 1) {
    if (r < rows)
      gemm_rows<S, R / 3 ? R / 3 : 1, N, kRow, kStep>(r, rows, depth, a, a_row, b, ldb, to);
  }
}

template <class S, int N, int kRow, int kStep>
inline void gemm_columns(int64_t first, int64_t columns, int64_t rows, int64_t depth,
                         const UnitOf<S>* a, int64_t a_row, const UnitOf<S>* b, int64_t ldb,
                         GemmTo<typename S::Scalar> to) {
  for (; first + N <= columns; first += N) {
    GemmTo<typename S::Scalar> here = to;
    here.c += first * S::kLanes;
    gemm_rows<S, S::rows(N), N, kRow, kStep>(0, rows, depth, a, a_row, b + first * S::kLanes, ldb,
                                             here);
  }
  if constexpr (N > 1) {
    if (first < columns) {
      gemm_columns<S, N - 1, kRow, kStep>(first, columns, rows, depth, a, a_row, b, ldb, to);
    }
  }
}

// c[rows, columns] from a[rows, depth] (rows a_row apart) and b[depth, columns]. columns is a whole
// number of registers. One column of registers of b is used for all rows before the next is read.
template <class S>
void gemm(int64_t rows, int64_t columns, int64_t depth, const UnitOf<S>* a, int64_t a_row,
          const UnitOf<S>* b, int64_t ldb, const GemmTo<typename S::Scalar>& to) {
  gemm_columns<S, S::kColumns, 0, 1>(0, columns / S::kLanes, rows, depth, a, a_row, b, ldb, to);
}

// The same with a a tile of scores: rows kAttnKeys apart.
template <class S>
void gemm_scores(int64_t rows, int64_t columns, int64_t depth, const UnitOf<S>* a,
                 const UnitOf<S>* b, int64_t ldb, const GemmTo<typename S::Scalar>& to) {
  gemm_columns<S, S::kColumns, kAttnKeys, 1>(0, columns / S::kLanes, rows, depth, a, 0, b, ldb, to);
}

// The same with a the transpose of a tile of scores: a(r, k) is row k, column r of the tile.
template <class S>
void gemm_transposed(int64_t rows, int64_t columns, int64_t depth, const UnitOf<S>* a,
                     const UnitOf<S>* b, int64_t ldb, const GemmTo<typename S::Scalar>& to) {
  gemm_columns<S, S::kColumns, 1, kAttnKeys>(0, columns / S::kLanes, rows, depth, a, 0, b, ldb, to);
}

// For inputs that are not finite: what a is 0 for takes no part, so that 0 * NaN is not NaN.
template <class S>
void gemm_skipping_zeros(int64_t rows, int64_t columns, int64_t depth, const UnitOf<S>* a,
                         int64_t a_row, int64_t a_step, const UnitOf<S>* b, int64_t ldb,
                         const GemmTo<typename S::Scalar>& to) {
  using F = Factors<S>;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; n += S::kLanes) {
      typename S::Scalar* c = to.c + r * to.ldc + n;
      auto sum = typename S::Vec{};
      if (to.into == Into::kAdd) sum = S::load(c);
      if (to.into == Into::kScaledAdd) sum = S::set1(to.row_scale[r]) * S::load(c);
      for (int64_t k = 0; k < depth; ++k) {
        for (int part = 0; part < F::kDepth; ++part) {
          const typename S::Scalar factor = F::factor(a + r * a_row + k * a_step, part);
          if (factor != 0)
            sum = S::fma(S::set1(factor), F::factors(F::load(b + k * ldb + n), part), sum);
        }
      }
      S::store(c, sum);
    }
  }
}
