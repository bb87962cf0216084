// Packing for attention: rows widened or in pairs, padded; panels with keys side by side.
//
// Included inside the namespace of an instruction set, after flash_attn_factors-inl.h. S is a
// vector of the scalars that sums run in, E the element type of the tensors.

// Notes in passing whether all that it is shown is finite. Neighbours should go to different slots:
// each is a chain of sums, which would be slower than the copy it watches.
template <class S>
class FiniteCheck {
 public:
  static constexpr int kSlots = 4;
  void see(typename S::Vec v, int64_t slot) {
    auto& sum = sums_[slot % kSlots];
    sum = S::fma(v, typename S::Vec{}, sum);
  }
  bool is_finite() const {
    return S::reduce_add((sums_[0] + sums_[1]) + (sums_[2] + sums_[3])) == 0;
  }

 private:
  typename S::Vec sums_[kSlots] = {};  // 0, or NaN once an infinity or NaN took part
};

// One row of `width` elements as a of a product over its elements, padded with zeros.
template <class S, class E>
inline void pack_row(const E* from, int64_t stride, int64_t width, UnitOf<S>* to,
                     FiniteCheck<S>& check) {
  using F = Factors<S>;
  constexpr int kStep = FiniteCheck<S>::kSlots * S::kLanes;
  int64_t d = 0;
  for (; stride == 1 && d + kStep <= width; d += kStep) {
#pragma GCC unroll 4
    for (int slot = 0; slot < FiniteCheck<S>::kSlots; ++slot) {
      const auto v = S::load_as(from + d + slot * S::kLanes);
      check.see(v, slot);
      F::store_row(to, d + slot * S::kLanes, v);
    }
  }
  const int64_t padded = attn_round_up(width, kAttnPad);
  for (; d < padded; d += S::kLanes) {
    auto v = typename S::Vec{};
    if (d < width) v = load_part<S>(from + d * stride, stride, width - d);
    check.see(v, 0);
    F::store_row(to, d, v);
  }
}

// kDepth rows as b of a product over rows: unit d has element d of each. A row of null is 0.
template <class S, class E>
inline void pack_joined(const E* const (&rows)[Factors<S>::kDepth], int64_t stride, int64_t width,
                        UnitOf<S>* to, FiniteCheck<S>& check) {
  using F = Factors<S>;
  constexpr int kStep = FiniteCheck<S>::kSlots * S::kLanes;
  const bool is_whole = rows[F::kDepth - 1] != nullptr;
  typename S::Vec wide[F::kDepth] = {};
  int64_t d = 0;
  for (; stride == 1 && is_whole && d + kStep <= width; d += kStep) {
#pragma GCC unroll 4
    for (int slot = 0; slot < FiniteCheck<S>::kSlots; ++slot) {
      for (int part = 0; part < F::kDepth; ++part) {
        wide[part] = S::load_as(rows[part] + d + slot * S::kLanes);
        check.see(wide[part], slot);
      }
      F::store(to + d + slot * S::kLanes, F::join(wide));
    }
  }
  for (; d < attn_round_up(width, kAttnPad); d += S::kLanes) {
    for (int part = 0; part < F::kDepth; ++part) {
      wide[part] = typename S::Vec{};
      if (rows[part] == nullptr || d >= width) continue;
      wide[part] = load_part<S>(rows[part] + d * stride, stride, width - d);
      check.see(wide[part], 0);
    }
    F::store(to + d, F::join(wide));
  }
}

// Keys [0, count) of up to one panel as columns: unit u of a key at to[u * kAttnPanel + key]; keys
// past count are 0.
//
// Rows of one head may lie pages apart, where no hardware prefetcher follows: each register read
// asks for the one that the next group of keys needs.
template <class S, class E>
void pack_panel(const E* from, int64_t row_stride, int64_t stride, int64_t count, int64_t width,
                UnitOf<S>* to, FiniteCheck<S>& check) {
  using F = Factors<S>;
  const int64_t units = units_of<S>(width);
  FiniteCheck<S> own = check;  // in registers while it runs
  for (int64_t key = 0; key < kAttnPanel; key += S::kLanes) {
    for (int64_t u = 0; u < units; u += S::kLanes) {
      const int64_t d = u * F::kDepth;
      typename S::Vec rows[S::kLanes];
      for (int j = 0; j < S::kLanes; ++j) {
        const E* row = from + (key + j) * row_stride + d * stride;
        __builtin_prefetch(row + S::kLanes * row_stride);
        rows[j] = key + j < count ? F::load_row(row, stride, width - d) : typename S::Vec{};
        for (int part = 0; part < F::kDepth; ++part) own.see(F::factors(rows[j], part), j + part);
      }
      S::transpose(rows);
      const int64_t filled = std::min<int64_t>(S::kLanes, units - u);
      for (int64_t j = 0; j < filled; ++j) F::store(to + (u + j) * kAttnPanel + key, rows[j]);
    }
  }
  check = own;
}

// First element of row `row` of head `head` of a sequence that begins `first` elements in.
template <class E>
const E* attn_row(const AttnTensor& x, int64_t first, int64_t row, int64_t head) {
  return static_cast<const E*>(x.data) + first + row * x.row + head * x.head;
}

// Keys [first, last) of one head as b of a product over keys; first is a multiple of kDepth.
template <class S, class E>
void pack_rows_of(const AttnTensor& x, int64_t sequence, int64_t head, int64_t first, int64_t last,
                  int64_t width, void* to, FiniteCheck<S>& check) {
  constexpr int kDepth = Factors<S>::kDepth;
  const int64_t padded = attn_ld(width);
  auto* rows = static_cast<UnitOf<S>*>(to);
  constexpr int kAhead = 8;  // rows: a few kilobytes, ~ the latency of memory
  FiniteCheck<S> own = check;
  for (int64_t key = first; key < last; key += kDepth) {
    const E* joined[kDepth] = {};
    for (int64_t part = 0; part < std::min<int64_t>(kDepth, last - key); ++part) {
      joined[part] = attn_row<E>(x, sequence, key + part, head);
      for (int64_t d = 0; d < width; d += 64 / sizeof(E)) {
        __builtin_prefetch(joined[part] + kAhead * x.row + d * x.dim);
      }
    }
    pack_joined<S>(joined, x.dim, width, rows + key / kDepth * padded, own);
  }
  check = own;
}

template <class S, class E>
void pack_panels_of(const AttnTensor& x, int64_t sequence, int64_t head, int64_t first,
                    int64_t last, int64_t width, void* to, FiniteCheck<S>& check) {
  auto* panels = static_cast<UnitOf<S>*>(to);
  for (int64_t key = first; key < last; key += kAttnPanel) {
    pack_panel<S>(attn_row<E>(x, sequence, key, head), x.row, x.dim, last - key, width,
                  panels + key * units_of<S>(width), check);
  }
}

template <class S, class E>
void pack_keys(const FlashAttnArgs& args, AttnHead& head, int64_t first, int64_t last,
               bool backward) {
  const AttnSequence& seq = *head.sequence;
  FiniteCheck<S> check;
  pack_panels_of<S, E>(args.k, seq.k, head.kv_head, first, last, args.head_dim, head.k_panels,
                       check);
  if (backward) {
    pack_rows_of<S, E>(args.k, seq.k, head.kv_head, first, last, args.head_dim, head.k_rows, check);
    pack_panels_of<S, E>(args.v, seq.v, head.kv_head, first, last, args.value_dim, head.v_panels,
                         check);
  } else {
    pack_rows_of<S, E>(args.v, seq.v, head.kv_head, first, last, args.value_dim, head.v_rows,
                       check);
  }
  if (!check.is_finite()) head.is_finite.store(false, std::memory_order_relaxed);
}
