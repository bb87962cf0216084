// Backward pass of attention: one block of keys meets all rows that see it.
//
// Included inside the namespace of an instruction set, after the files it uses.
//
// A task owns dk and dv of its keys, and a part of dq of its own, so that five products do for all
// three gradients and no task waits for another; finish_dq adds the parts in order.

// 16-bit results are too coarse for rowsum(dout out); rowsum(P dP) is the same without rounding.
template <class E>
constexpr bool kIsNarrow = sizeof(E) < sizeof(float);

// Units of row m of a head's rows as b of a product over rows. They lie behind the same rows as a
// of a product along them; one array is both where a unit is one factor.
template <class S>
UnitOf<S>* joined_rows(void* rows, const AttnHead& head, const FlashAttnArgs& args, int64_t width,
                       int64_t m) {
  constexpr int kDepth = Factors<S>::kDepth;
  const int64_t num_rows = head.sequence->num_rows * (args.heads / args.kv_heads);
  const int64_t behind = kDepth == 1 ? 0 : attn_round_up(num_rows, kDepth) * row_units<S>(width);
  return static_cast<UnitOf<S>*>(rows) + behind + m / kDepth * attn_ld(width);
}

// Row m of q or dout both ways.
template <class S, class E>
void pack_query_row(const FlashAttnArgs& args, const AttnHead& head, const AttnTensor& x,
                    int64_t sequence, int64_t m, int64_t width, void* to, FiniteCheck<S>& check) {
  constexpr int kDepth = Factors<S>::kDepth;
  const auto row = [&](int64_t at) {
    const auto [position, h] = attn_place(args, head.kv_head, at);
    return attn_row<E>(x, sequence, position, h);
  };
  pack_row<S>(row(m), x.dim, width, static_cast<UnitOf<S>*>(to) + m * row_units<S>(width), check);
  if (kDepth == 1 || m % kDepth != 0) return;
  const int64_t num_rows = head.sequence->num_rows * (args.heads / args.kv_heads);
  const E* joined[kDepth] = {};
  for (int64_t part = 0; part < std::min<int64_t>(kDepth, num_rows - m); ++part) {
    joined[part] = row(m + part);
  }
  pack_joined<S>(joined, x.dim, width, joined_rows<S>(to, head, args, width, m), check);
}

// Rows [first, last) into q_rows, do_rows and lse; delta = rowsum(dout out) - dlse, the sum only
// where out is not narrow; or delta as it is given.
template <class S, class E>
void pack_rows(const FlashAttnArgs& args, AttnHead& head, int64_t first, int64_t last) {
  using T = typename S::Scalar;
  const AttnSequence& seq = *head.sequence;
  T* head_lse = static_cast<T*>(head.lse);
  T* head_delta = static_cast<T*>(head.delta);
  FiniteCheck<S> check;
  for (int64_t m = first; m < last; ++m) {
    const auto [position, h] = attn_place(args, head.kv_head, m);
    pack_query_row<S, E>(args, head, args.q, seq.q, m, args.head_dim, head.q_rows, check);
    pack_query_row<S, E>(args, head, args.dout, seq.dout, m, args.value_dim, head.do_rows, check);
    auto sum = typename S::Vec{};
    if constexpr (!kIsNarrow<E>) {
      const T* dout = static_cast<const T*>(head.do_rows) + m * attn_ld(args.value_dim);
      const E* out = static_cast<const E*>(args.out) +
                     ((seq.first_row + position) * args.heads + h) * args.value_dim;
      for (int64_t e = 0; e < args.value_dim; e += S::kLanes) {
        sum = S::fma(S::load(dout + e), load_part<S>(out + e, 1, args.value_dim - e), sum);
      }
    }
    const int64_t at = seq.lse + h * args.lse_head + position;
    const T lse = static_cast<const T*>(args.lse)[at];
    // A row that saw no key: with lse = +inf all its probabilities are 0, without 0 * inf.
    const bool is_dead = lse == -std::numeric_limits<T>::infinity();
    head_lse[m] = is_dead ? std::numeric_limits<T>::infinity() : lse;
    head_delta[m] = S::reduce_add(sum);
    if (args.dlse != nullptr && !is_dead) head_delta[m] -= static_cast<const T*>(args.dlse)[at];
    if (args.delta != nullptr)
      head_delta[m] = is_dead ? T{0} : static_cast<const T*>(args.delta)[at];
  }
  if (!check.is_finite()) head.is_finite.store(false, std::memory_order_relaxed);
}

// Rows [first_row, first_row + rows) against keys [tile_key, tile_key + count).
template <class S>
struct BackwardTile {
  using T = typename S::Scalar;
  const FlashAttnArgs& args;
  const AttnHead& head;
  int64_t tile_key, first_row;
  int rows;
  int64_t begin, end;  // keys of the tile that a row sees; begin is a whole panel
  bool is_careful;     // inputs are not finite and something is hidden: 0 * NaN must stay 0
  T *p, *ds;           // [kAttnRows][kAttnKeys]
  T* deltas;           // [rows] where only rowsum(P dP) is wanted: it is added here; else null
};

template <class S>
void add_bias_gradient(const BackwardTile<S>& tile, RowPlace place, int64_t first, int64_t last,
                       const typename S::Scalar* ds) {
  using T = typename S::Scalar;
  const AttnBias& to = tile.args.dbias_strides;
  T* dbias = static_cast<T*>(tile.args.dbias) + tile.head.sequence->batch * to.batch +
             place.head * to.head + place.position * to.row + tile.tile_key * to.key;
  if (to.key == 0) {
    T sum = 0;
    for (int64_t j = first; j < last; ++j) sum += ds[j];
    *dbias += sum;
    return;
  }
  for (int64_t j = first; j < last; ++j) dbias[j * to.key] += ds[j];
}

// One row: raw products and dP become P (as it meets dout) and dS before its scale.
template <class S>
void backward_row(const BackwardTile<S>& tile, int r) {
  using T = typename S::Scalar;
  const FlashAttnArgs& args = tile.args;
  const AttnSequence& seq = *tile.head.sequence;
  const int64_t m = tile.first_row + r;
  const RowPlace place = attn_place(args, tile.head.kv_head, m);
  const KeyRange keys = visible_keys(args, seq, place.position);
  const int64_t first = std::max<int64_t>(0, keys.first - tile.tile_key);
  const int64_t last = std::min<int64_t>(tile.end, keys.last - tile.tile_key);
  T* p_row = tile.p + r * kAttnKeys;
  T* ds_row = tile.ds + r * kAttnKeys;
  T tanh[kAttnKeys], factors[kAttnKeys];
  const bool plain = is_plain(args), drops = args.dropout_p > 0 && first < last;
  if (!plain) score_row<S>(args, seq, place, tile.tile_key, first, last, p_row, tanh);
  if (drops) {
    // Lanes outside the row's keys are cleared below, whatever they are multiplied by.
    std::fill(factors, factors + kAttnKeys, T{0});
    dropout_factors(args, seq, place, tile.tile_key + first, tile.tile_key + last, factors + first);
  }
  const auto scale = S::set1(plain ? static_cast<T>(args.scale) : T{1});
  const auto minus_lse = S::set1(-static_cast<const T*>(tile.head.lse)[m]);
  const auto delta =
      S::set1(tile.deltas != nullptr ? T{0} : static_cast<const T*>(tile.head.delta)[m]);
  const auto log2e = S::set1(static_cast<T>(kLog2E));
  const auto zero = typename S::Vec{};
  auto sum = zero;
  int64_t v = tile.begin;
  for (; v < std::min(tile.end, first / S::kLanes * S::kLanes); v += S::kLanes) {
    S::store(p_row + v, zero);
    S::store(ds_row + v, zero);
  }
  for (; v < last; v += S::kLanes) {
    const auto s = S::load(p_row + v);
    auto p = S::exp2(S::fma(s, scale, minus_lse) * log2e);
    auto dp = S::load(ds_row + v);
    if (drops) dp = dp * S::load(factors + v);
    if (tile.is_careful) p = s == -std::numeric_limits<T>::infinity() ? zero : p;
    auto ds = p * (dp - delta);
    if (tile.is_careful) ds = p == zero ? zero : ds;
    if (drops) p = p * S::load(factors + v);
    if (v < first || v + S::kLanes > last) {
      p = S::select_range(p, first - v, last - v, 0);
      ds = S::select_range(ds, first - v, last - v, 0);
    }
    sum = sum + ds;
    S::store(p_row + v, p);
    S::store(ds_row + v, ds);
  }
  if (tile.deltas != nullptr) {
    tile.deltas[r] += S::reduce_add(sum);
    return;
  }
  for (; v < tile.end; v += S::kLanes) {
    S::store(p_row + v, zero);
    S::store(ds_row + v, zero);
  }
  if (args.dbias != nullptr) add_bias_gradient(tile, place, first, last, ds_row);
  if (args.softcap > 0) {
    for (int64_t j = first; j < last; ++j) ds_row[j] *= 1 - tanh[j] * tanh[j];
  }
}

// q k^T and dout v^T of a tile, then P and dS in their place.
template <class S>
void score_tile(const BackwardTile<S>& tile) {
  using T = typename S::Scalar;
  using Unit = UnitOf<S>;
  const int64_t dim = units_of<S>(tile.args.head_dim);
  const int64_t value_dim = units_of<S>(tile.args.value_dim);
  const int64_t ldq = row_units<S>(tile.args.head_dim), ldo = row_units<S>(tile.args.value_dim);
  const Unit* q_rows = static_cast<const Unit*>(tile.head.q_rows) + tile.first_row * ldq;
  const Unit* do_rows = static_cast<const Unit*>(tile.head.do_rows) + tile.first_row * ldo;
  const Unit* k_panels = static_cast<const Unit*>(tile.head.k_panels) + tile.tile_key * dim;
  const Unit* v_panels = static_cast<const Unit*>(tile.head.v_panels) + tile.tile_key * value_dim;
  for (int64_t panel = tile.begin; panel < tile.end; panel += kAttnPanel) {
    const int64_t width = attn_round_up(std::min<int64_t>(kAttnPanel, tile.end - panel), S::kLanes);
    gemm<S>(tile.rows, width, dim, q_rows, ldq, k_panels + panel * dim, kAttnPanel,
            GemmTo<T>{tile.p + panel, kAttnKeys, Into::kSet, nullptr, nullptr});
    gemm<S>(tile.rows, width, value_dim, do_rows, ldo, v_panels + panel * value_dim, kAttnPanel,
            GemmTo<T>{tile.ds + panel, kAttnKeys, Into::kSet, nullptr, nullptr});
  }
  for (int r = 0; r < tile.rows; ++r) backward_row(tile, r);
}

// Of the keys [begin, end) of a tile: those that a row sees, and the rows that see a key.
struct TileSpans {
  GemmSpan of_rows[kAttnRows];
  GemmSpan of_keys[kAttnKeys];
};

// False where every row sees every key.
template <class S>
bool find_spans(const BackwardTile<S>& tile, TileSpans& spans) {
  constexpr int kDepth = Factors<S>::kDepth;
  const int64_t count = tile.end - tile.begin;
  KeyRange seen[kAttnRows];
  bool all_see_all = true;
  for (int r = 0; r < tile.rows; ++r) {
    const RowPlace place = attn_place(tile.args, tile.head.kv_head, tile.first_row + r);
    seen[r] = in_tile(visible_keys(tile.args, *tile.head.sequence, place.position),
                      tile.tile_key + tile.begin, count);
    all_see_all &= seen[r].first == 0 && seen[r].last == count;
    spans.of_rows[r] = {seen[r].first / kDepth, units_of<S>(seen[r].last)};
  }
  if (all_see_all) return false;
  // Ranges never fall from row to row, so neither do the rows that begin and cease to see a key.
  for (int64_t key = 0, first = 0, last = 0; key < count; ++key) {
    while (first < tile.rows && seen[first].last <= key) ++first;
    while (last < tile.rows && seen[last].first <= key) ++last;
    spans.of_keys[key] = {first / kDepth, units_of<S>(last)};
  }
  return true;
}

template <class S>
void backward_tile(const BackwardTile<S>& tile, typename S::Scalar* dk, typename S::Scalar* dv,
                   typename S::Scalar* dq) {
  using T = typename S::Scalar;
  using F = Factors<S>;
  const FlashAttnArgs& args = tile.args;
  const int64_t ldq = attn_ld(args.head_dim), ldo = attn_ld(args.value_dim);
  const UnitOf<S>* q_rows =
      joined_rows<S>(tile.head.q_rows, tile.head, args, args.head_dim, tile.first_row);
  const UnitOf<S>* do_rows =
      joined_rows<S>(tile.head.do_rows, tile.head, args, args.value_dim, tile.first_row);
  const UnitOf<S>* k_rows = static_cast<const UnitOf<S>*>(tile.head.k_rows) +
                            (tile.tile_key + tile.begin) / F::kDepth * ldq;
  score_tile(tile);
  const int64_t columns = attn_round_up(args.head_dim, S::kLanes);
  const int64_t value_columns = attn_round_up(args.value_dim, S::kLanes);
  const int64_t count = tile.end - tile.begin;
  const int64_t row_depth = units_of<S>(tile.rows), key_depth = units_of<S>(count);
  // P takes half of its tile once it is in units, and dS^T the other half.
  T* other_half = tile.p + kAttnRows * kAttnKeys / 2;
  const UnitOf<S>* p = F::along_rows(tile.p, tile.rows, tile.begin, tile.end, tile.p) + tile.begin;
  const UnitOf<S>* ds_rows =
      F::along_rows(tile.ds, tile.rows, tile.begin, tile.end, other_half) + tile.begin;
  const UnitOf<S>* ds_keys = F::along_keys(tile.ds, tile.rows, tile.end) + tile.begin / F::kDepth;
  TileSpans spans;
  const bool is_partial = find_spans(tile, spans);
  const GemmSpan* of_keys = is_partial ? spans.of_keys : nullptr;
  const GemmSpan* of_rows = is_partial ? spans.of_rows : nullptr;
  const GemmTo<T> to_dv{dv + tile.begin * ldo, ldo, Into::kAdd, nullptr, of_keys};
  const GemmTo<T> to_dk{dk + tile.begin * ldq, ldq, Into::kAdd, nullptr, of_keys};
  const GemmTo<T> to_dq{dq + tile.first_row * ldq, ldq, Into::kAdd, nullptr, of_rows};
  if (tile.is_careful) {
    gemm_skipping_zeros<S>(count, value_columns, row_depth, p, 1, kAttnKeys, do_rows, ldo, to_dv);
    gemm_skipping_zeros<S>(count, columns, row_depth, ds_rows, 1, kAttnKeys, q_rows, ldq, to_dk);
    gemm_skipping_zeros<S>(tile.rows, columns, key_depth, ds_keys, kAttnKeys, 1, k_rows, ldq,
                           to_dq);
    return;
  }
  gemm_transposed<S>(count, value_columns, row_depth, p, do_rows, ldo, to_dv);
  gemm_transposed<S>(count, columns, row_depth, ds_rows, q_rows, ldq, to_dk);
  gemm_scores<S>(tile.rows, columns, key_depth, ds_keys, k_rows, ldq, to_dq);
}

inline bool is_careful(const FlashAttnArgs& args, const AttnHead& head) {
  return hides(args) && !head.is_finite.load(std::memory_order_relaxed);
}

// Adds rowsum(P dP) to delta of rows [first, last), at most kAttnRows.
template <class S>
void add_deltas(const FlashAttnArgs& args, AttnHead& head, int64_t first, int64_t last,
                void* scratch) {
  using T = typename S::Scalar;
  T* p = static_cast<T*>(scratch);
  T* ds = p + kAttnRows * kAttnKeys;
  const KeyRange seen = visible_keys(args, *head.sequence, first, last);
  T* deltas = static_cast<T*>(head.delta) + first;
  for (int64_t key = seen.first / kAttnPanel * kAttnPanel; key < seen.last; key += kAttnKeys) {
    score_tile<S>({args, head, key, first, static_cast<int>(last - first), 0,
                   std::min<int64_t>(kAttnKeys, seen.last - key), is_careful(args, head), p, ds,
                   deltas});
  }
}

// The query positions that see a key of [first, last).
inline KeyRange positions_seeing(const FlashAttnArgs& args, const AttnSequence& seq, int64_t first,
                                 int64_t last) {
  const int64_t offset = attn_offset(args, seq);
  KeyRange range{0, seq.num_rows};
  if (args.window_right >= 0) {
    range.first = std::max<int64_t>(0, first - args.window_right - offset);
  }
  if (args.window_left >= 0) {
    range.last = std::min(seq.num_rows, last - 1 + args.window_left - offset + 1);
  }
  return range;
}

template <class S, class E>
void store_gradient(typename S::Scalar* sums, int64_t width, typename S::Scalar scale, E* to) {
  for (int64_t d = 0; d < width; d += S::kLanes) {
    store_part<S>(to + d, S::load(sums + d) * S::set1(scale), width - d);
  }
}

template <class S, class E>
void backward(const FlashAttnArgs& args, AttnHead& head, int64_t first, int64_t last, void* dq_part,
              void* scratch) {
  using T = typename S::Scalar;
  const AttnSequence& seq = *head.sequence;
  const int64_t ldq = attn_ld(args.head_dim);
  const int64_t ldo = attn_ld(args.value_dim);
  const int64_t group = args.heads / args.kv_heads;
  T* p = static_cast<T*>(scratch);
  T* ds = p + kAttnRows * kAttnKeys;
  T* dk = ds + kAttnRows * kAttnKeys;
  T* dv = dk + kAttnKeys * ldq;
  T* dq = static_cast<T*>(dq_part);
  const bool careful = is_careful(args, head);
  std::fill(dq, dq + seq.num_rows * group * ldq, T{0});
  for (int64_t key = first; key < last; key += kAttnKeys) {
    const int64_t count = std::min<int64_t>(kAttnKeys, last - key);
    std::fill(dk, dk + count * ldq, T{0});
    std::fill(dv, dv + count * ldo, T{0});
    const KeyRange positions = positions_seeing(args, seq, key, key + count);
    // From a whole unit of rows on; a row that sees none of the keys has probabilities 0.
    const int64_t first_row = positions.first * group / Factors<S>::kDepth * Factors<S>::kDepth;
    for (int64_t m = first_row; m < positions.last * group; m += kAttnRows) {
      const int64_t end = std::min<int64_t>(m + kAttnRows, positions.last * group);
      const KeyRange seen = visible_keys(args, seq, m, end);
      const int64_t tile_begin = std::max<int64_t>(0, seen.first - key) / kAttnPanel * kAttnPanel;
      const int64_t tile_end = std::min(count, seen.last - key);
      if (tile_begin >= tile_end) continue;
      backward_tile<S>({args, head, key, m, static_cast<int>(end - m), tile_begin, tile_end,
                        careful, p, ds, nullptr},
                       dk, dv, dq);
    }
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = (seq.first_key + key + j) * args.kv_heads + head.kv_head;
      store_gradient<S>(dk + j * ldq, args.head_dim, static_cast<T>(args.scale),
                        static_cast<E*>(args.dk) + row * args.head_dim);
      store_gradient<S>(dv + j * ldo, args.value_dim, T{1},
                        static_cast<E*>(args.dv) + row * args.value_dim);
    }
  }
}

template <class S, class E>
void finish_dq(const FlashAttnArgs& args, AttnHead& head, int64_t first, int64_t last,
               int64_t num_parts) {
  using T = typename S::Scalar;
  const AttnSequence& seq = *head.sequence;
  const int64_t ldq = attn_ld(args.head_dim);
  const int64_t part = seq.num_rows * (args.heads / args.kv_heads) * ldq;
  for (int64_t m = first; m < last; ++m) {
    const auto [position, h] = attn_place(args, head.kv_head, m);
    T* sums = static_cast<T*>(head.dq_parts) + m * ldq;
    for (int64_t i = 1; i < num_parts; ++i) {
      for (int64_t d = 0; d < ldq; d += S::kLanes) {
        S::store(sums + d, S::load(sums + d) + S::load(sums + i * part + d));
      }
    }
    store_gradient<S>(
        sums, args.head_dim, static_cast<T>(args.scale),
        static_cast<E*>(args.dq) + ((seq.first_row + position) * args.heads + h) * args.head_dim);
    if (args.sink != nullptr) {
      double& dsink = args.dsink_of_head[(&seq - args.sequences) * args.heads + h];
      dsink -= std::exp(args.sink[h] - static_cast<double>(static_cast<const T*>(head.lse)[m])) *
               static_cast<const T*>(head.delta)[m];
    }
  }
}

// W is the vector of what goes through few rows: they wait for memory, and read keys where they
// lie.
template <class S, class E, class W = S>
constexpr FlashAttnBody make_body() {
  return {pack_keys<S, E>, forward<S, E>,   stream<W, E>,
          join<W, E>,      pack_rows<S, E>, kIsNarrow<E> ? add_deltas<S> : nullptr,
          backward<S, E>,  finish_dq<S, E>};
}
