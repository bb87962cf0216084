// Few rows against many keys, as in decoding: keys and values are read once, where they lie.
//
// Included inside the namespace of an instruction set, after flash_attn_pack-inl.h. Packing would
// cost more than it saves: what counts is that memory never waits for us.

// Rows up to which a tile is read in place.
constexpr int kStreamRows = 16;
// Keys whose values stay in L1 while one group of rows after another meets them.
constexpr int kStreamKeys = 16;

// Asks for the `bytes` from `at` on.
inline void prefetch_bytes(const void* at, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t byte = 0; byte < bytes; byte += kLine) {
    __builtin_prefetch(static_cast<const char*>(at) + byte);
  }
}

// scores[r * kAttnKeys + j] = q_r k_j for R rows and kLanes / R keys; width a whole number of
// registers.
template <class S, class E, int R>
inline void stream_scores(const typename S::Scalar* q, int64_t ldq, const E* k, int64_t k_stride,
                          int64_t width, typename S::Scalar* scores) {
  constexpr int kKeys = S::kLanes / R;
  typename S::Vec sums[S::kLanes] = {};
  for (int64_t d = 0; d < width; d += S::kLanes) {
    typename S::Vec row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = S::load(q + r * ldq + d);
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const auto key = S::load_as(k + j * k_stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r * kKeys + j] = S::fma(row[r], key, sums[r * kKeys + j]);
    }
  }
  S::transpose(sums);
#pragma GCC unroll 4
  for (int half = S::kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  typename S::Scalar totals[S::kLanes];
  S::store(totals, sums[0]);
  for (int r = 0; r < R; ++r) {
    std::memcpy(scores + r * kAttnKeys, totals + r * kKeys, kKeys * sizeof(totals[0]));
  }
}

// o_r += sum_j p[r, j] v_j for R rows, N registers of columns and `count` keys.
template <class S, class E, int R, int N>
inline void stream_values(const typename S::Scalar* p, const E* v, int64_t v_stride, int64_t count,
                          typename S::Scalar* o, int64_t ldo) {
  typename S::Vec sums[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = S::load(o + r * ldo + n * S::kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    typename S::Vec value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = S::load_as(v + j * v_stride + n * S::kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto weight = S::set1(p[r * kAttnKeys + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = S::fma(weight, value[n], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) S::store(o + r * ldo + n * S::kLanes, sums[r][n]);
  }
}

template <class S, class E, int R>
void stream_columns(const typename S::Scalar* p, const E* v, int64_t v_stride, int64_t count,
                    int64_t width, typename S::Scalar* o, int64_t ldo) {
  constexpr int kWide = 4;
  int64_t e = 0;
  for (; e + kWide * S::kLanes <= width; e += kWide * S::kLanes) {
    stream_values<S, E, R, kWide>(p, v + e, v_stride, count, o + e, ldo);
  }
  for (; e < width; e += S::kLanes) {
    stream_values<S, E, R, 1>(p, v + e, v_stride, count, o + e, ldo);
  }
}

// Calls step<R>(r) so that rows [0, rows) are covered in groups of 4, 2 and 1.
template <class Step>
inline void in_row_groups(int rows, const Step& step) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) step(std::integral_constant<int, 4>{}, r);
  if (r + 2 <= rows) {
    step(std::integral_constant<int, 2>{}, r);
    r += 2;
  }
  if (r < rows) step(std::integral_constant<int, 1>{}, r);
}

// The products q k^T of one tile, from k where it lies.
template <class S, class E>
void stream_keys(const typename S::Scalar* q, int64_t ldq, int rows, const E* k, int64_t k_stride,
                 int64_t count, int64_t width, typename S::Scalar* scores) {
  in_row_groups(rows, [&](auto group, int r) {
    constexpr int R = std::min(group.value, S::kLanes);
    constexpr int kKeys = S::kLanes / R;
    int64_t j = 0;
    for (; j + kKeys <= count; j += kKeys) {
      if (r == 0) {
        for (int ahead = 0; ahead < kKeys; ++ahead) {
          prefetch_bytes(k + (j + kStreamKeys + ahead) * k_stride, width * sizeof(E));
        }
      }
      for (int part = 0; part < group.value; part += R) {
        stream_scores<S, E, R>(q + (r + part) * ldq, ldq, k + j * k_stride, k_stride, width,
                               scores + (r + part) * kAttnKeys + j);
      }
    }
    for (; j < count; ++j) {
      for (int row = r; row < r + group.value; ++row) {
        auto sum = typename S::Vec{};
        for (int64_t d = 0; d < width; d += S::kLanes) {
          sum = S::fma(S::load(q + row * ldq + d), S::load_as(k + j * k_stride + d), sum);
        }
        scores[row * kAttnKeys + j] = S::reduce_add(sum);
      }
    }
  });
}

// o += P v of one tile, from v where it lies.
template <class S, class E>
void stream_weighted(const typename S::Scalar* p, int rows, const E* v, int64_t v_stride,
                     int64_t count, int64_t width, typename S::Scalar* o, int64_t ldo) {
  for (int64_t j = 0; j < count; j += kStreamKeys) {
    const int64_t part = std::min<int64_t>(kStreamKeys, count - j);
    for (int64_t ahead = 0; ahead < kStreamKeys; ++ahead) {
      prefetch_bytes(v + (j + kStreamKeys + ahead) * v_stride, width * sizeof(E));
    }
    in_row_groups(rows, [&](auto group, int r) {
      stream_columns<S, E, group.value>(p + r * kAttnKeys + j, v + j * v_stride, v_stride, part,
                                        width, o + r * ldo, ldo);
    });
  }
}
