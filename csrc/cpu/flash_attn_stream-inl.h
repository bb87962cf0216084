// Few rows against many keys, as in decoding: keys and values are read once, where they lie.
//
// Included inside the namespace of an instruction set, after flash_attn_forward-inl.h. Packing
// would cost more than it saves: what counts is that memory never waits for us.
//
// Registers are loaded in pairs of 2 * kLanes neighbouring elements, in whatever order is cheapest
// to widen: load_pair says which. Query rows and sums keep that order until the rows are done.
//
// Groups of kStreamKeys keys meet one head after another, so that reads jump from row to row and
// hardware does not see what comes next. Each read of a group therefore asks for the same place of
// the group after it: by the time that one's turn comes its rows are in the second cache. After the
// last keys of a tile come its values, after those the keys of the next tile.

// Keys that all heads of a task meet before the next ones are read.
constexpr int kStreamKeys = 16;

// Asks for the cache line of `from`: of 16-bit elements, whose 2 * kLanes are at most a line. It is
// a wish: where nothing lies there, nothing happens. Wider ones leave memory less time between two
// reads than it needs, and asking early only gets in its way.
template <class E>
inline void read_ahead(const E* from) {
  if constexpr (sizeof(E) == 2) {
    __builtin_prefetch(from, 0, 2);  // not into the first cache, which the group at hand fills
  }
}

// 2 * kLanes elements, widened. Of bfloat16 a takes those of even index and b the others: one shift
// or mask widens a register, where the order of memory would take a shuffle as well.
template <class S, class E>
inline void load_pair(const E* from, typename S::Vec& a, typename S::Vec& b) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    typename S::BitsVec words;
    std::memcpy(&words, from, sizeof words);
    const typename S::BitsVec even = words << 16, odd = words & 0xffff0000u;
    std::memcpy(&a, &even, sizeof a);
    std::memcpy(&b, &odd, sizeof b);
  } else {
    a = S::load_as(from);
    b = S::load_as(from + S::kLanes);
  }
}

// The way back of load_pair, in place.
template <class S, class E>
inline void put_in_order(typename S::Scalar* row, int64_t width) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    for (int64_t d = 0; d + 2 * S::kLanes <= width; d += 2 * S::kLanes) {
      typename S::Scalar ordered[2 * S::kLanes];
      for (int i = 0; i < S::kLanes; ++i) {
        ordered[2 * i] = row[d + i];
        ordered[2 * i + 1] = row[d + S::kLanes + i];
      }
      std::memcpy(row + d, ordered, sizeof ordered);
    }
  }
}

// scores[r * kAttnKeys + j] = q_r k_j for R rows and kLanes / R keys; width a whole number of
// registers.
template <class S, class E, int R>
inline void stream_scores(const typename S::Scalar* q, int64_t ldq, const E* const* k,
                          const E* const* next, int64_t head, int64_t width,
                          typename S::Scalar* scores) {
  using Vec = typename S::Vec;
  constexpr int kKeys = S::kLanes / R, kPair = 2 * S::kLanes;
  Vec sums[S::kLanes] = {};
  int64_t d = 0;
  for (; d + kPair <= width; d += kPair) {
    Vec row[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      row[r][0] = S::load(q + r * ldq + d);
      row[r][1] = S::load(q + r * ldq + d + S::kLanes);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      Vec a, b;
      read_ahead(next[j] + head + d);
      load_pair<S>(k[j] + head + d, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec& sum = sums[r * kKeys + j];
        sum = S::fma(row[r][1], b, S::fma(row[r][0], a, sum));
      }
    }
  }
  if (d < width) {
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const Vec key = S::load_as(k[j] + head + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        sums[r * kKeys + j] = S::fma(S::load(q + r * ldq + d), key, sums[r * kKeys + j]);
      }
    }
  }
  typename S::Scalar totals[S::kLanes];
  S::store(totals, S::sum_rows(sums));
  for (int r = 0; r < R; ++r) {
    std::memcpy(scores + r * kAttnKeys, totals + r * kKeys, kKeys * sizeof(totals[0]));
  }
}

// o_r += sum_j p[r, j] v_j for R rows, N pairs of registers of columns (or one register, N = 0) and
// `count` keys.
template <class S, class E, int R, int N>
inline void stream_values(const typename S::Scalar* p, const E* const* v, const E* const* next,
                          int64_t column, int64_t count, typename S::Scalar* o, int64_t ldo) {
  using Vec = typename S::Vec;
  constexpr int kVecs = N == 0 ? 1 : 2 * N;
  Vec sums[R][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) sums[r][n] = S::load(o + r * ldo + n * S::kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec value[kVecs];
    if constexpr (N == 0) {
      value[0] = S::load_as(v[j] + column);
    } else {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        read_ahead(next[j] + column + 2 * n * S::kLanes);
        load_pair<S>(v[j] + column + 2 * n * S::kLanes, value[2 * n], value[2 * n + 1]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = S::set1(p[r * kAttnKeys + j]);
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) sums[r][n] = S::fma(weight, value[n], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) S::store(o + r * ldo + n * S::kLanes, sums[r][n]);
  }
}

template <class S, class E, int R>
void stream_columns(const typename S::Scalar* p, const E* const* v, const E* const* next,
                    int64_t head, int64_t count, int64_t width, typename S::Scalar* o,
                    int64_t ldo) {
  constexpr int kPair = 2 * S::kLanes;
  int64_t e = 0;
  for (; e + 2 * kPair <= width; e += 2 * kPair) {
    stream_values<S, E, R, 2>(p, v, next, head + e, count, o + e, ldo);
  }
  for (; e + kPair <= width; e += kPair) {
    stream_values<S, E, R, 1>(p, v, next, head + e, count, o + e, ldo);
  }
  if (e < width) stream_values<S, E, R, 0>(p, v, next, head + e, count, o + e, ldo);
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

// The rows of k or v that a tile of keys takes.
template <class E>
class StreamRows {
 public:
  StreamRows(const FlashAttnArgs& args, const AttnSequence& seq, const AttnTensor& x, int64_t first,
             int64_t page_stride)
      : x_(x),
        seq_(seq),
        first_(static_cast<const E*>(x.data) + first),
        page_size_(args.page_size),
        page_stride_(page_stride) {}

  // Keys [key, key + count), for KV head 0 of the task; then the last one, up to a whole group.
  void find(int64_t key, int64_t count) {
    for (int64_t i = 0; i < count;) {
      int64_t run = count - i;
      const E* row = first_ + (key + i) * x_.row;
      if (seq_.pages != nullptr) {
        const int64_t position = seq_.page_key + key + i, in_page = position % page_size_;
        run = std::min(run, page_size_ - in_page);
        row = first_ + seq_.pages[position / page_size_] * page_stride_ + in_page * x_.row;
      }
      for (const int64_t end = i + run; i < end; ++i, row += x_.row) rows[i] = row;
    }
    for (int64_t i = count; i % kStreamKeys != 0; ++i) rows[i] = rows[count - 1];
  }

  // The same from a copy in `to`, padded with zeros, for what cannot be read by whole registers.
  void copy_to(E* to, int64_t count, int64_t width, int64_t padded) {
    for (int64_t i = 0; i < attn_round_up(count, kStreamKeys); ++i, to += padded) {
      for (int64_t d = 0; d < width; ++d) to[d] = rows[i][d * x_.dim];
      std::fill(to + width, to + padded, E{});
      rows[i] = to;
    }
  }

  const E* rows[kAttnKeys];

 private:
  const AttnTensor& x_;
  const AttnSequence& seq_;
  const E* first_;
  int64_t page_size_, page_stride_;
};

// What a task works on: rows r of its heads one after another in one block.
template <class S, class E>
struct Stream {
  using T = typename S::Scalar;
  ForwardBlock<S>& block;
  int64_t num_heads;
  int rows;                // of one head
  int64_t dim, value_dim;  // in whole registers
  StreamRows<E> k, v;
};

// The products q k^T of a tile.
template <class S, class E>
void stream_keys(Stream<S, E>& stream, int64_t count) {
  ForwardBlock<S>& block = stream.block;
  for (int64_t j = 0; j < count; j += kStreamKeys) {
    const E* const* next =
        j + kStreamKeys < count ? stream.k.rows + j + kStreamKeys : stream.v.rows;
    for (int64_t h = 0; h < stream.num_heads; ++h) {
      const int64_t head = h * block.args.k.head;
      in_row_groups(stream.rows, [&](auto group, int r) {
        constexpr int R = std::min(group.value, S::kLanes);
        constexpr int kKeys = S::kLanes / R;
        for (int part = 0; part < group.value; part += R) {
          const int64_t row = h * stream.rows + r + part;
          for (int i = 0; i < kStreamKeys; i += kKeys) {
            stream_scores<S, E, R>(block.q + row * block.ldq, block.ldq, stream.k.rows + j + i,
                                   next + i, head, stream.dim, block.s + row * kAttnKeys + j + i);
          }
        }
      });
    }
  }
}

// o += P v of a tile that all rows see the whole of.
template <class S, class E>
void stream_weighted(Stream<S, E>& stream, int64_t count) {
  ForwardBlock<S>& block = stream.block;
  for (int64_t j = 0; j < count; j += kStreamKeys) {
    const int64_t part = std::min<int64_t>(kStreamKeys, count - j);
    const E* const* next =
        j + kStreamKeys < count ? stream.v.rows + j + kStreamKeys : stream.k.rows;
    for (int64_t h = 0; h < stream.num_heads; ++h) {
      in_row_groups(stream.rows, [&](auto group, int r) {
        const int64_t row = h * stream.rows + r;
        stream_columns<S, E, group.value>(block.s + row * kAttnKeys + j, stream.v.rows + j, next,
                                          h * block.args.v.head, part, stream.value_dim,
                                          block.o + row * block.ldo, block.ldo);
      });
    }
  }
}

// The same where rows see parts of the tile: no row touches what it does not see, be it NaN.
template <class S, class E>
void stream_weighted_parts(Stream<S, E>& stream, int64_t tile_key, int64_t count) {
  ForwardBlock<S>& block = stream.block;
  for (int row = 0; row < block.rows; ++row) {
    const int64_t first = std::max<int64_t>(0, block.keys[row].first - tile_key);
    const int64_t last = std::min<int64_t>(count, block.keys[row].last - tile_key);
    if (first >= last) continue;
    stream_columns<S, E, 1>(block.s + row * kAttnKeys + first, stream.v.rows + first,
                            stream.v.rows + first, row / stream.rows * block.args.v.head,
                            last - first, stream.value_dim, block.o + row * block.ldo, block.ldo);
  }
}

// Keys [tile_key, tile_key + count); find_next is called when its rows of k are done with.
template <class S, class E, class FindNext>
void stream_tile(Stream<S, E>& stream, int64_t tile_key, int64_t count, const FindNext& find_next) {
  ForwardBlock<S>& block = stream.block;
  stream_keys<S, E>(stream, count);
  find_next();
  find_maxima<S>(block, tile_key, count);
  exponentials<S>(block, tile_key, count);
  bool all_see_all = true;
  for (int r = 0; r < block.rows; ++r) {
    all_see_all &= block.keys[r].first <= tile_key && block.keys[r].last >= tile_key + count;
    const auto rescale = S::set1(block.rescale[r]);
    typename S::Scalar* o = block.o + r * block.ldo;
    for (int64_t e = 0; e < stream.value_dim; e += S::kLanes) {
      S::store(o + e, block.is_first ? typename S::Vec{} : S::load(o + e) * rescale);
    }
  }
  if (all_see_all) {
    stream_weighted<S, E>(stream, count);
  } else {
    stream_weighted_parts<S, E>(stream, tile_key, count);
  }
  block.is_first = false;
}

// Query rows in the order of load_pair; `spare` has room for one of them.
template <class S, class E>
void stream_queries(ForwardBlock<S>& block, E* spare) {
  const FlashAttnArgs& args = block.args;
  const int64_t width = attn_round_up(args.head_dim, kAttnPad);
  for (int r = 0; r < block.rows; ++r) {
    const auto [position, h] = block.place[r];
    const E* from = attn_row<E>(args.q, block.seq.q, position, h);
    if (args.q.dim != 1 || width != args.head_dim) {
      std::fill(spare, spare + width, E{});
      for (int64_t d = 0; d < args.head_dim; ++d) spare[d] = from[d * args.q.dim];
      from = spare;
    }
    typename S::Scalar* to = block.q + r * block.ldq;
    int64_t d = 0;
    for (; d + 2 * S::kLanes <= width; d += 2 * S::kLanes) {
      typename S::Vec a, b;
      load_pair<S>(from + d, a, b);
      S::store(to + d, a);
      S::store(to + d + S::kLanes, b);
    }
    if (d < width) S::store(to + d, S::load_as(from + d));
  }
}

template <class S, class E>
void stream(const FlashAttnArgs& args, const AttnStreamTask& task, void* scratch) {
  using T = typename S::Scalar;
  const AttnSequence& seq = *task.sequence;
  const int64_t rows = seq.num_rows * (args.heads / args.kv_heads);
  const int64_t all_rows = rows * task.num_heads;
  // As attn_stream_scratch counts: scores, o, q, then what is copied.
  T* tile = static_cast<T*>(scratch);
  T* own = tile + all_rows * kAttnKeys;
  E* spare = reinterpret_cast<E*>(own + kAttnRows * attn_ld(args.value_dim) +
                                  all_rows * attn_ld(args.head_dim));
  AttnHead head{};
  head.sequence = &seq;
  head.kv_head = task.kv_head;
  ForwardBlock<S> block(args, head, 0, rows, tile, own);
  for (; block.rows < all_rows; ++block.rows) {
    const int r = block.rows;
    block.place[r] = attn_place(args, task.kv_head + r / rows, r % rows);
    block.keys[r] = block.keys[r % rows];
    block.row_max[r] = block.row_max[0];
    block.row_sum[r] = 0;
  }
  stream_queries<S, E>(block, spare);
  Stream<S, E> stream{block,
                      task.num_heads,
                      static_cast<int>(rows),
                      attn_round_up(args.head_dim, kAttnPad),
                      attn_round_up(args.value_dim, kAttnPad),
                      {args, seq, args.k, seq.k + task.kv_head * args.k.head, args.k_page},
                      {args, seq, args.v, seq.v + task.kv_head * args.v.head, args.v_page}};
  const int64_t last = std::min(task.last_key, block.seen.last);
  int64_t key = std::max(task.first_key, block.seen.first / kStreamKeys * kStreamKeys);
  const bool is_in_place = attn_is_in_place(args);
  const auto count_of = [&](int64_t first) { return std::min<int64_t>(kAttnKeys, last - first); };
  const auto find_keys = [&](int64_t first) {
    if (first >= last) return;
    stream.k.find(first, count_of(first));
    if (!is_in_place) stream.k.copy_to(spare, count_of(first), args.head_dim, stream.dim);
  };
  find_keys(key);
  for (; key < last; key += kAttnKeys) {
    const int64_t count = count_of(key);
    stream.v.find(key, count);
    if (!is_in_place) {
      stream.v.copy_to(spare + kAttnKeys * stream.dim, count, args.value_dim, stream.value_dim);
    }
    stream_tile<S, E>(stream, key, count, [&] { find_keys(key + kAttnKeys); });
  }
  for (int r = 0; r < block.rows; ++r) {
    T* o = block.o + r * block.ldo;
    if (block.is_first) std::fill(o, o + block.ldo, T{0});
    put_in_order<S, E>(o, stream.value_dim);
  }
  if (task.partial != nullptr) return store_partial(block, static_cast<T*>(task.partial));
  finish_rows<S, E>(block);
}
