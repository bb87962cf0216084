// The algorithm of reduce.h, written for blocks that compilers turn into vector code. Included by
// each instruction set's file inside its own namespace and target, after that file has defined
// widen_half and narrow_half; so this file includes nothing and guards against nothing.

// Elements at a time: 4 registers of 16 floats as accumulators, and as many for what is added.
constexpr size_t kBlock = 64;

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

template <class T>
inline void widen(const T* from, T* to) {
  for (size_t i = 0; i < kBlock; ++i) to[i] = from[i];
}

template <class T>
inline void narrow(const T* from, T* to) {
  for (size_t i = 0; i < kBlock; ++i) to[i] = from[i];
}

inline void widen(const BFloat16* from, float* to) {
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
}

inline void narrow(const float* from, BFloat16* to) {
  for (size_t i = 0; i < kBlock; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &from[i], sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry NaN into infinity
    to[i].bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
}

inline void widen(const Float16* from, float* to) { widen_half(&from->bits, to); }
inline void narrow(const float* from, Float16* to) { narrow_half(from, &to->bits); }

// Integers wrap, as torch's do; in C++ only unsigned ones may, and 64 bits keep a product of two
// uint16 from becoming an int that overflows.
struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
// NaN on either side wins, as in torch.minimum: a comparison with NaN is false.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return a < b ? a : b;
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return a > b ? a : b;
    return a > b || a != a ? a : b;
  }
};
template <class T>
inline T divide(T sum, int count) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int64_t>(sum) / count);
  } else {
    return sum / static_cast<T>(count);
  }
}

struct And {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// kBlock elements from `offset` on. The last block is partial: its elements go through padded
// copies, so that both kinds are one code and an element's bits don't depend on where it lies.
template <class T, class Operation, bool kPartial>
inline void reduce_block(const ReduceArgs& args, size_t offset) {
  using W = typename Wide<T>::type;
  const size_t count = kPartial ? args.n - offset : kBlock;
  T staged[kBlock] = {};
  W sum[kBlock], next[kBlock];
  for (int r = 0; r < args.num_sources; ++r) {
    const T* source = static_cast<const T*>(args.sources[r]) + offset;
    if (kPartial) {
      std::memcpy(staged, source, count * sizeof(T));
      source = staged;
    }
    widen(source, r == 0 ? sum : next);
    if (r == 0) continue;
    for (size_t i = 0; i < kBlock; ++i) sum[i] = Operation::apply(sum[i], next[i]);
  }
  if (args.average) {
    for (size_t i = 0; i < kBlock; ++i) sum[i] = divide(sum[i], args.num_sources);
  }
  narrow(sum, staged);
  std::memcpy(static_cast<T*>(args.out) + offset, staged, count * sizeof(T));
  if (args.copy) std::memcpy(static_cast<T*>(args.copy) + offset, staged, count * sizeof(T));
}

template <class T, class Operation>
void reduce(const ReduceArgs& args) {
  size_t offset = 0;
  for (; offset + kBlock <= args.n; offset += kBlock) {
    reduce_block<T, Operation, false>(args, offset);
  }
  if (offset < args.n) reduce_block<T, Operation, true>(args, offset);
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
