// Forward pass of attention: one block of rows goes through its keys tile by tile.
//
// Included inside the namespace of an instruction set, after the files it uses.

template <class S>
struct ForwardBlock {
  using T = typename S::Scalar;

  const FlashAttnArgs& args;
  const AttnSequence& seq;
  int64_t kv_head;
  int rows;
  KeyRange seen;  // keys that any row sees
  bool is_first = true;
  int64_t ldq, ldo;
  T *s, *o;      // scratch: tile of scores, sums of P v
  UnitOf<S>* q;  // scratch: query rows, ldq apart

  RowPlace place[kAttnRows];
  KeyRange keys[kAttnRows];
  T row_max[kAttnRows], row_sum[kAttnRows], rescale[kAttnRows];
  GemmSpan spans[kAttnRows];  // keys of the tile that each row sees, as units of P

  // Rows [first, last) with a tile of scores at `tile` and own_scratch scalars at `own`.
  ForwardBlock(const FlashAttnArgs& args_, const AttnHead& head, int64_t first, int64_t last,
               T* tile, T* own)
      : args(args_),
        seq(*head.sequence),
        kv_head(head.kv_head),
        rows(static_cast<int>(last - first)),
        seen(visible_keys(args_, *head.sequence, first, last)),
        ldq(row_units<S>(args_.head_dim)),
        ldo(attn_ld(args_.value_dim)),
        s(tile),
        o(own),
        q(reinterpret_cast<UnitOf<S>*>(own + kAttnRows * ldo)) {
    const int64_t group = args.heads / args.kv_heads;
    for (int r = 0; r < rows; ++r) {
      // Divisions only for the first row: short calls have little else to do.
      place[r] = r == 0 ? attn_place(args, kv_head, first) : next_place(place[r - 1], group);
      keys[r] = visible_keys(args, seq, place[r].position);
      // The lowest number, not -inf: a row that sees no key then has exponentials 0, not NaN.
      row_max[r] = std::numeric_limits<T>::lowest();
      row_sum[r] = 0;
    }
  }

  // Natural scores are the scores of a row times this.
  T to_natural() const { return is_plain(args) ? static_cast<T>(args.scale) : T{1}; }
};

// Calls step(v, x) for the registers of a row that hold keys of `seen`; in x hidden scores are
// -inf.
template <class S, class Step>
inline void visit_seen(const typename S::Scalar* row, KeyRange seen, const Step& step) {
  const auto hide = [&](int64_t v) {
    return S::select_range(S::load(row + v), seen.first - v, seen.last - v,
                           -std::numeric_limits<typename S::Scalar>::infinity());
  };
  if (seen.first >= seen.last) return;
  int64_t v = seen.first / S::kLanes * S::kLanes;
  if (v < seen.first) {
    step(v, hide(v));
    v += S::kLanes;
  }
  for (; v + S::kLanes <= seen.last; v += S::kLanes) step(v, S::load(row + v));
  if (v < seen.last) step(v, hide(v));
}

// The maxima of a tile's rows, and the factors by which earlier sums shrink.
template <class S>
void find_maxima(ForwardBlock<S>& block, int64_t tile_key, int64_t count) {
  using T = typename S::Scalar;
  const bool plain = is_plain(block.args);
  for (int r = 0; r < block.rows; ++r) {
    T* row = block.s + r * kAttnKeys;
    const KeyRange seen = in_tile(block.keys[r], tile_key, count);
    if (!plain) {
      score_row<S>(block.args, block.seq, block.place[r], tile_key, seen.first, seen.last, row,
                   nullptr);
    }
    auto best = S::set1(block.row_max[r]);
    visit_seen<S>(row, seen, [&](int64_t, auto x) { best = S::max(x, best); });
    const T maximum = S::reduce_max(best);
    block.rescale[r] = block.row_max[r] - maximum;
    block.row_max[r] = maximum;
  }
  const auto factor = S::set1(static_cast<T>(block.to_natural() * kLog2E));
  for (int r = 0; r < block.rows; r += S::kLanes) {
    S::store(block.rescale + r, S::exp2(S::load(block.rescale + r) * factor));
  }
}

// Maximum of a row, as an exponent of 2, from which on its rounding would show in exponentials or
// itself overflow: that of a mask of large numbers, and of a row that has seen no key.
constexpr double kLargestShift = 1 << 12;

// Scores become exp(s - max); hidden ones exactly 0.
template <class S>
void exponentials(ForwardBlock<S>& block, int64_t tile_key, int64_t count) {
  using T = typename S::Scalar;
  const T to_binary = static_cast<T>(block.to_natural() * kLog2E);
  const auto factor = S::set1(to_binary);
  const int64_t width = attn_round_up(count, S::kLanes);
  for (int r = 0; r < block.rows; ++r) {
    T* row = block.s + r * kAttnKeys;
    const KeyRange seen = in_tile(block.keys[r], tile_key, count);
    auto sum = typename S::Vec{};
    const auto put = [&](int64_t v, auto p) {
      sum = sum + p;
      S::store(row + v, p);
    };
    const T exponent = block.row_max[r] * to_binary;
    if (std::abs(exponent) < kLargestShift) {
      // One rounding of the maximum more than below, which is less than a score is off by.
      const auto shift = S::set1(-exponent);
      visit_seen<S>(row, seen,
                    [&](int64_t v, auto x) { put(v, S::exp2(S::fma(x, factor, shift))); });
    } else {
      const auto maximum = S::set1(block.row_max[r]);
      visit_seen<S>(row, seen, [&](int64_t v, auto x) { put(v, S::exp2((x - maximum) * factor)); });
    }
    const auto clear = [&](int64_t from, int64_t to) {
      for (int64_t v = from; v < to; v += S::kLanes) S::store(row + v, typename S::Vec{});
    };
    const bool is_empty = seen.first >= seen.last;
    clear(0, is_empty ? width : seen.first / S::kLanes * S::kLanes);
    clear(is_empty ? width : attn_round_up(seen.last, S::kLanes), width);
    block.row_sum[r] = block.row_sum[r] * block.rescale[r] + S::reduce_add(sum);
    if (block.args.dropout_p > 0 && !is_empty) {
      T factors[kAttnKeys];
      dropout_factors(block.args, block.seq, block.place[r], tile_key + seen.first,
                      tile_key + seen.last, factors);
      for (int64_t j = seen.first; j < seen.last; ++j) row[j] *= factors[j - seen.first];
    }
  }
}

// What each row sees of a tile; null where every row sees all of it.
template <class S>
const GemmSpan* find_spans(ForwardBlock<S>& block, int64_t tile_key, int64_t count) {
  // Ranges never fall from row to row.
  const int64_t highest_first = block.keys[block.rows - 1].first;
  if (highest_first <= tile_key && block.keys[0].last >= tile_key + count) return nullptr;
  for (int r = 0; r < block.rows; ++r) {
    const KeyRange seen = in_tile(block.keys[r], tile_key, count);
    block.spans[r] = {seen.first / Factors<S>::kDepth, units_of<S>(seen.last)};
  }
  return block.spans;
}

// One tile: keys [tile_key, tile_key + count), packed at k_panels and v_rows.
template <class S>
void forward_tile(ForwardBlock<S>& block, int64_t tile_key, int64_t count,
                  const UnitOf<S>* k_panels, const UnitOf<S>* v_rows, bool is_finite) {
  using T = typename S::Scalar;
  const int64_t dim = units_of<S>(block.args.head_dim);
  for (int64_t panel = 0; panel < count; panel += kAttnPanel) {
    gemm<S>(block.rows, attn_round_up(std::min<int64_t>(kAttnPanel, count - panel), S::kLanes), dim,
            block.q, block.ldq, k_panels + panel * dim, kAttnPanel,
            GemmTo<T>{block.s + panel, kAttnKeys, Into::kSet, nullptr, nullptr});
  }
  find_maxima<S>(block, tile_key, count);
  exponentials<S>(block, tile_key, count);
  const UnitOf<S>* p = Factors<S>::along_keys(block.s, block.rows, count);
  const int64_t depth = units_of<S>(count);
  const int64_t columns = attn_round_up(block.args.value_dim, S::kLanes);
  const GemmTo<T> to{block.o, block.ldo, block.is_first ? Into::kSet : Into::kScaledAdd,
                     block.rescale, find_spans<S>(block, tile_key, count)};
  if (is_finite) {
    gemm_scores<S>(block.rows, columns, depth, p, v_rows, block.ldo, to);
  } else {
    gemm_skipping_zeros<S>(block.rows, columns, depth, p, kAttnKeys, 1, v_rows, block.ldo, to);
  }
}

// out and lse of the rows from o, row_max and row_sum.
template <class S, class E>
void finish_rows(ForwardBlock<S>& block) {
  using T = typename S::Scalar;
  const FlashAttnArgs& args = block.args;
  for (int r = 0; r < block.rows; ++r) {
    const auto [position, h] = block.place[r];
    T lse = block.row_max[r] * block.to_natural();
    T total = block.row_sum[r], weight = 1;
    const T sink =
        args.sink == nullptr ? -std::numeric_limits<T>::infinity() : static_cast<T>(args.sink[h]);
    if (sink != -std::numeric_limits<T>::infinity()) {
      const T maximum = total == 0 ? sink : std::max(lse, sink);
      weight = total == 0 ? T{0} : std::exp(lse - maximum);
      total = total * weight + std::exp(sink - maximum);
      lse = maximum;
    }
    // A row that sees no key: 0 / 1, and the logarithm of 0.
    const auto factor = S::set1(total == 0 ? T{0} : weight / total);
    lse = total == 0 ? -std::numeric_limits<T>::infinity() : lse + std::log(total);
    static_cast<T*>(args.lse)[block.seq.lse + h * args.lse_head + position] = lse;
    E* out = static_cast<E*>(args.out) +
             ((block.seq.first_row + position) * args.heads + h) * args.value_dim;
    for (int64_t e = 0; e < args.value_dim; e += S::kLanes) {
      store_part<S>(out + e, S::load(block.o + r * block.ldo + e) * factor, args.value_dim - e);
    }
  }
}

// Where the factors of a tile of keys lie, and whether all of them are finite.
template <class S>
struct PackedTile {
  const UnitOf<S>* k_panels;
  const UnitOf<S>* v_rows;
  bool is_finite;
};

// Keys [key, end) of a KV head: packed before, or now, into `scratch`.
template <class S, class E>
PackedTile<S> packed_tile(const FlashAttnArgs& args, const AttnForwardTask& task, int64_t kv_head,
                          int64_t key, int64_t end, UnitOf<S>* scratch) {
  const AttnHead& head = *task.head;
  if (task.is_packed) {
    return {static_cast<const UnitOf<S>*>(head.k_panels) + key * units_of<S>(args.head_dim),
            static_cast<const UnitOf<S>*>(head.v_rows) +
                key / Factors<S>::kDepth * attn_ld(args.value_dim),
            head.is_finite.load(std::memory_order_relaxed)};
  }
  const AttnSequence& seq = *head.sequence;
  UnitOf<S>* v_rows = scratch + kAttnKeys * attn_ld(args.head_dim);
  FiniteCheck<S> check;
  pack_panels_of<S, E>(args.k, seq.k + key * args.k.row, kv_head, 0, end - key, args.head_dim,
                       scratch, check);
  pack_rows_of<S, E>(args.v, seq.v + key * args.v.row, kv_head, 0, end - key, args.value_dim,
                     v_rows, check);
  return {scratch, v_rows, check.is_finite()};
}

template <class S>
void store_partial(const ForwardBlock<S>& block, typename S::Scalar* partial) {
  for (int r = 0; r < block.rows; ++r, partial += block.ldo + kAttnPad) {
    std::copy(block.o + r * block.ldo, block.o + (r + 1) * block.ldo, partial);
    partial[block.ldo] = block.row_max[r];
    partial[block.ldo + 1] = block.row_sum[r];
  }
}

// The blocks of a task, with their rows of q packed; a tile of scores at `tile`, all else at
// `next`.
template <class S, class E>
std::vector<ForwardBlock<S>> open_blocks(const FlashAttnArgs& args, const AttnForwardTask& task,
                                         typename S::Scalar* tile, typename S::Scalar* next) {
  const int64_t own = kAttnRows * (attn_ld(args.head_dim) + attn_ld(args.value_dim));
  const int64_t rows = task.last_row - task.first_row;
  const int64_t blocks_of_head = (rows + kAttnRows - 1) / kAttnRows;
  std::vector<ForwardBlock<S>> blocks;
  blocks.reserve(task.num_heads * blocks_of_head);
  for (int64_t i = 0; i < task.num_heads * blocks_of_head; ++i, next += own) {
    const int64_t m = task.first_row + i % blocks_of_head * kAttnRows;
    ForwardBlock<S>& block =
        blocks.emplace_back(args, task.head[i / blocks_of_head], m,
                            std::min<int64_t>(m + kAttnRows, task.last_row), tile, next);
    FiniteCheck<S> check;
    for (int r = 0; r < block.rows; ++r) {
      const auto [position, h] = block.place[r];
      pack_row<S>(attn_row<E>(args.q, block.seq.q, position, h), args.q.dim, args.head_dim,
                  block.q + r * block.ldq, check);
    }
  }
  return blocks;
}

// Tile by tile: all blocks meet one before the next is packed.
//
// Tiles begin at multiples of kAttnKeys and are packed whole, whatever of them is seen: so what a
// row adds up, and how, does not depend on the rows that share its task.
template <class S, class E>
void meet_tiles(const FlashAttnArgs& args, const AttnForwardTask& task,
                std::vector<ForwardBlock<S>>& blocks, UnitOf<S>* scratch) {
  KeyRange seen{task.last_key, 0};
  for (const ForwardBlock<S>& block : blocks) {
    seen.first = std::min(seen.first, block.seen.first);
    seen.last = std::max(seen.last, block.seen.last);
  }
  const int64_t last = std::min(task.last_key, seen.last);
  int64_t key = std::max(task.first_key, seen.first / kAttnKeys * kAttnKeys);
  for (; key < last; key += kAttnKeys) {
    const int64_t end = std::min(key + kAttnKeys, task.last_key);
    PackedTile<S> tile{};
    int64_t head_of_tile = -1;
    for (ForwardBlock<S>& block : blocks) {
      const int64_t count = std::min(end, block.seen.last) - key;
      if (count <= 0 || block.seen.first >= end) continue;
      if (block.kv_head != head_of_tile) {
        head_of_tile = block.kv_head;
        tile = packed_tile<S, E>(args, task, head_of_tile, key, end, scratch);
      }
      forward_tile<S>(block, key, count, tile.k_panels, tile.v_rows, tile.is_finite);
      block.is_first = false;
    }
  }
}

template <class S, class E>
void forward(const FlashAttnArgs& args, const AttnForwardTask& task, void* scratch) {
  using T = typename S::Scalar;
  T* tile = static_cast<T*>(scratch);
  T* packed = tile + kAttnRows * kAttnKeys;
  T* own = packed + kAttnKeys * (attn_ld(args.head_dim) + attn_ld(args.value_dim));
  std::vector<ForwardBlock<S>> blocks = open_blocks<S, E>(args, task, tile, own);
  meet_tiles<S, E>(args, task, blocks, reinterpret_cast<UnitOf<S>*>(packed));
  T* partial = static_cast<T*>(task.partial);
  for (ForwardBlock<S>& block : blocks) {
    if (block.is_first) std::fill(block.o, block.o + block.rows * block.ldo, T{0});
    if (partial != nullptr) {
      store_partial(block, partial);
      partial += task.partial_head;
    } else {
      finish_rows<S, E>(block);
    }
  }
}

// task.partial is split 0 of the rows, the others lie `stride` scalars apart.
template <class S, class E>
void join(const FlashAttnArgs& args, const AttnForwardTask& task, int64_t num_splits,
          int64_t stride, void* scratch) {
  using T = typename S::Scalar;
  T* tile = static_cast<T*>(scratch);
  ForwardBlock<S> block(args, *task.head, task.first_row, task.last_row, tile,
                        tile + kAttnRows * kAttnKeys);
  const T factor = static_cast<T>(block.to_natural() * kLog2E);
  for (int r = 0; r < block.rows; ++r) {
    const T* partial = static_cast<const T*>(task.partial) + r * (block.ldo + kAttnPad);
    for (int64_t i = 0; i < num_splits; ++i) {
      block.row_max[r] = std::max(block.row_max[r], partial[i * stride + block.ldo]);
    }
    T* o = block.o + r * block.ldo;
    std::fill(o, o + block.ldo, T{0});
    for (int64_t i = 0; i < num_splits; ++i, partial += stride) {
      const auto weight = S::exp2(S::set1((partial[block.ldo] - block.row_max[r]) * factor));
      block.row_sum[r] += weight[0] * partial[block.ldo + 1];
      for (int64_t e = 0; e < args.value_dim; e += S::kLanes) {
        S::store(o + e, S::fma(weight, S::load(partial + e), S::load(o + e)));
      }
    }
  }
  finish_rows<S, E>(block);
}
