// The algorithm of reduce.h over vectors as wide as a register. Included by each instruction set's
// file inside its own namespace and target, after that file has defined kVectorBytes and, for as
// many elements as a vector has floats, widen_half, narrow_half, widen_bfloat and narrow_bfloat; so
// this file includes nothing itself.

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct Wide {
  using type = T;
};
template <>
struct Wide<BFloat16> {
  using type = float;
};
template <>
struct Wide<Float16> {
  using type = float;
};

// Vectors of W, and of the unsigned integers as wide as W. Passed by reference only: how a function
// gets one by value differs between instruction sets.
template <class W>
struct Of {
  using Bits =
      std::conditional_t<sizeof(W) == 8, uint64_t,
                         std::conditional_t<sizeof(W) == 4, uint32_t,
                                            std::conditional_t<sizeof(W) == 2, uint16_t, uint8_t>>>;
  typedef W Vector __attribute__((vector_size(kVectorBytes)));
  typedef Bits Unsigned __attribute__((vector_size(kVectorBytes)));
  static constexpr size_t kLanes = kVectorBytes / sizeof(W);
};
template <>
struct Of<BFloat16> : Of<float> {};
template <>
struct Of<Float16> : Of<float> {};
using Floats = Of<float>::Vector;

template <class T>
inline void load(const T* from, typename Of<T>::Vector& to) {
  std::memcpy(&to, from, sizeof to);
}

template <class T>
inline void store(const typename Of<T>::Vector& from, T* to) {
  std::memcpy(to, &from, sizeof from);
}

inline void load(const BFloat16* from, Floats& to) {
  float wide[Of<float>::kLanes];
  widen_bfloat(&from->bits, wide);
  std::memcpy(&to, wide, sizeof to);
}

inline void store(const Floats& from, BFloat16* to) {
  float wide[Of<float>::kLanes];
  std::memcpy(wide, &from, sizeof wide);
  narrow_bfloat(wide, &to->bits);
}

inline void load(const Float16* from, Floats& to) {
  float wide[Of<float>::kLanes];
  widen_half(&from->bits, wide);
  std::memcpy(&to, wide, sizeof to);
}

inline void store(const Floats& from, Float16* to) {
  float wide[Of<float>::kLanes];
  std::memcpy(wide, &from, sizeof wide);
  narrow_half(wide, &to->bits);
}

// Each puts `a op b` into a. Integers wrap, as torch's do; in C++ only unsigned ones may.
struct Sum {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    if constexpr (std::is_integral_v<W>) {
      using U = typename Of<W>::Unsigned;
      a = (typename Of<W>::Vector)((U)a + (U)b);
    } else {
      a = a + b;
    }
  }
};
struct Product {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    if constexpr (std::is_integral_v<W>) {
      using U = typename Of<W>::Unsigned;
      a = (typename Of<W>::Vector)((U)a * (U)b);
    } else {
      a = a * b;
    }
  }
};
// NaN on either side wins, as in torch.minimum: a comparison with NaN is false.
struct Min {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    if constexpr (std::is_integral_v<W>) {
      a = a < b ? a : b;
    } else {
      a = (a < b) | (a != a) ? a : b;
    }
  }
};
struct Max {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    if constexpr (std::is_integral_v<W>) {
      a = a > b ? a : b;
    } else {
      a = (a > b) | (a != a) ? a : b;
    }
  }
};
struct And {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    a = a & b;
  }
};
struct Or {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    a = a | b;
  }
};
struct Xor {
  template <class W>
  static void apply(typename Of<W>::Vector& a, const typename Of<W>::Vector& b) {
    a = a ^ b;
  }
};

template <class W>
inline void divide(typename Of<W>::Vector& sum, int count) {
  if constexpr (std::is_integral_v<W>) {
    for (size_t i = 0; i < Of<W>::kLanes; ++i) {
      sum[i] = static_cast<W>(static_cast<int64_t>(sum[i]) / count);
    }
  } else {
    sum = sum / static_cast<W>(count);
  }
}

// kVectors vectors from element `offset` on: as many independent chains of additions. Unrolled by
// order: what the compiler leaves as a loop keeps the sums in memory.
template <class T, class Operation, int kVectors>
inline void reduce_block(const ReduceArgs& args, const T* const* sources, size_t offset, T* out,
                         T* copy) {
  using W = typename Wide<T>::type;
  constexpr size_t kLanes = Of<W>::kLanes;
  typename Of<W>::Vector sum[kVectors], next;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) load(sources[0] + offset + v * kLanes, sum[v]);
  for (int r = 1; r < args.num_sources; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      load(sources[r] + offset + v * kLanes, next);
      Operation::template apply<W>(sum[v], next);
    }
  }
  if (args.average) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) divide<W>(sum[v], args.num_sources);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    store(sum[v], out + v * kLanes);
    if (copy) store(sum[v], copy + v * kLanes);
  }
}

// The last elements, fewer than a vector: through padded copies of theirs, so that an element's
// bits don't depend on where it lies. The sums of all sources so far are never rounded in between:
// each source is padded in turn next to a wide accumulator.
template <class T, class Operation>
inline void reduce_tail(const ReduceArgs& args, const T* const* sources, size_t offset) {
  using W = typename Wide<T>::type;
  const size_t bytes = (args.n - offset) * sizeof(T);
  T padded[Of<W>::kLanes] = {};
  typename Of<W>::Vector sum, next;
  std::memcpy(padded, sources[0] + offset, bytes);
  load(padded, sum);
  for (int r = 1; r < args.num_sources; ++r) {
    std::memcpy(padded, sources[r] + offset, bytes);
    load(padded, next);
    Operation::template apply<W>(sum, next);
  }
  if (args.average) divide<W>(sum, args.num_sources);
  store(sum, padded);
  std::memcpy(static_cast<T*>(args.out) + offset, padded, bytes);
  if (args.copy) std::memcpy(static_cast<T*>(args.copy) + offset, padded, bytes);
}

template <class T, class Operation>
void reduce(const ReduceArgs& args) {
  constexpr int kVectors = 4;  // an addition takes 4 cycles and two start in each
  constexpr size_t kLanes = Of<typename Wide<T>::type>::kLanes;
  const T* const* const sources = reinterpret_cast<const T* const*>(args.sources);
  T* const out = static_cast<T*>(args.out);
  T* const copy = static_cast<T*>(args.copy);
  size_t at = 0;
  for (; at + kVectors * kLanes <= args.n; at += kVectors * kLanes) {
    reduce_block<T, Operation, kVectors>(args, sources, at, out + at, copy ? copy + at : nullptr);
  }
  for (; at + kLanes <= args.n; at += kLanes) {
    reduce_block<T, Operation, 1>(args, sources, at, out + at, copy ? copy + at : nullptr);
  }
  if (at < args.n) reduce_tail<T, Operation>(args, sources, at);
}

template <class T>
ReduceFunction choose(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return &reduce<T, Sum>;
    case Reduction::kProduct:
      return &reduce<T, Product>;
    case Reduction::kMin:
      return &reduce<T, Min>;
    case Reduction::kMax:
      return &reduce<T, Max>;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::kAnd) return &reduce<T, And>;
    if (reduction == Reduction::kOr) return &reduce<T, Or>;
    if (reduction == Reduction::kXor) return &reduce<T, Xor>;
  }
  return nullptr;
}

inline ReduceFunction choose(Type type, Reduction reduction) {
  switch (type) {
    case Type::kFloat32:
      return choose<float>(reduction);
    case Type::kFloat64:
      return choose<double>(reduction);
    case Type::kBFloat16:
      return choose<BFloat16>(reduction);
    case Type::kFloat16:
      return choose<Float16>(reduction);
    case Type::kInt64:
      return choose<int64_t>(reduction);
    case Type::kInt32:
      return choose<int32_t>(reduction);
    case Type::kInt16:
      return choose<int16_t>(reduction);
    case Type::kInt8:
      return choose<int8_t>(reduction);
    case Type::kUInt8:
      return choose<uint8_t>(reduction);
  }
  return nullptr;
}
