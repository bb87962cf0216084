// What the products of attention multiply: how factors are packed, and how a tile of scores becomes
// one.
//
// Included by flash_attn_vector-inl.h, whose vectors it is over.
//
// A product is a sum over its depth. Its operands are packed in units of kDepth factors that follow
// one another along the depth: one scalar here, or what a dot-product instruction takes at once
// where an instruction set specialises this for a vector S of its own.

template <class S>
struct Factors {
  using Scalar = typename S::Scalar;
  using Vec = typename S::Vec;
  using Unit = Scalar;
  static constexpr int kDepth = 1;

  // kLanes units side by side: b of a product.
  static Vec load(const Unit* from) { return S::load(from); }
  static void store(Unit* to, Vec units) { S::store(to, units); }
  // One unit in all lanes: a of a product.
  static Vec broadcast(const Unit* from) { return S::set1(*from); }
  static Vec multiply_add(Vec a, Vec b, Vec sum) { return S::fma(a, b, sum); }

  // Factor `part` of one unit, and of kLanes units.
  static Scalar factor(const Unit* from, int) { return *from; }
  static Vec factors(Vec units, int) { return units; }

  // kLanes units of neighbours in one row, from up to kLanes * kDepth elements `stride` apart.
  template <class E>
  static Vec load_row(const E* from, int64_t stride, int64_t count) {
    return load_part<S>(from, stride, count);
  }
  // The kLanes elements of a row, widened, to where a row of units has elements [d, d + kLanes).
  static void store_row(Unit* row, int64_t d, Vec wide) { S::store(row + d, wide); }
  // kLanes units, each of the elements that kDepth rows, widened, have in its place.
  static Vec join(const Vec (&rows)[kDepth]) { return rows[0]; }

  // A tile of scores as a: unit (r, k) at [r * kAttnKeys + k] holds keys kDepth k ... of row r. In
  // place; keys [0, last) of `rows` rows.
  static const Unit* along_keys(Scalar* tile, int, int64_t) { return tile; }
  // Unit (k, j) at [k * kAttnKeys + j] holds rows kDepth k ... of key j. `to` may be the tile.
  static const Unit* along_rows(const Scalar* tile, int, int64_t, int64_t, Scalar*) { return tile; }
};

template <class S>
using UnitOf = typename Factors<S>::Unit;

// Units that hold `width` factors.
template <class S>
constexpr int64_t units_of(int64_t width) {
  return (width + Factors<S>::kDepth - 1) / Factors<S>::kDepth;
}

// Units from one row of a to the next where its rows lie along the depth.
template <class S>
constexpr int64_t row_units(int64_t width) {
  return attn_ld(width) / Factors<S>::kDepth;
}
