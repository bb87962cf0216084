// Rows of elements as vectors of the scalars that they are computed in.
//
// Included inside the namespace of an instruction set, after its Floats and Doubles.

template <class E>
using ComputeOf = std::conditional_t<std::is_same_v<E, double>, Doubles, Floats>;

template <class S>
using Whole = std::integral_constant<int, S::kLanes>;

// f(i, Whole) for each whole vector of [0, count), then f(i, rest) where some are left.
template <class S, class F>
inline void for_vectors(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) f(i, Whole<S>{});
  if (i < count) f(i, static_cast<int>(count - i));
}

// Elements beyond a rest are 0, and are not written.
template <class S, class E>
inline typename S::Vec take(const E* from, Whole<S>) {
  return S::load_as(from);
}
template <class S, class E>
inline typename S::Vec take(const E* from, int count) {
  return load_part<S>(from, 1, count);
}
template <class S, class E>
inline void put(E* to, typename S::Vec v, Whole<S>) {
  S::store_as(to, v);
}
template <class S, class E>
inline void put(E* to, typename S::Vec v, int count) {
  store_part<S>(to, v, count);
}

template <class E>
inline const E* row_of(const ConstRows& rows, int64_t row) {
  return static_cast<const E*>(rows.data) + row * rows.stride;
}

// Sum of what f(i, n, sum) adds to sum, over a row: four chains of additions, so that
// one does not wait for the other.
template <class S, class F>
inline typename S::Scalar sum_of(int64_t count, const F& f) {
  typename S::Vec a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * S::kLanes <= count; i += 4 * S::kLanes) {
    a = f(i, Whole<S>{}, a);
    b = f(i + S::kLanes, Whole<S>{}, b);
    c = f(i + 2 * S::kLanes, Whole<S>{}, c);
    d = f(i + 3 * S::kLanes, Whole<S>{}, d);
  }
  for (; i + S::kLanes <= count; i += S::kLanes) a = f(i, Whole<S>{}, a);
  if (i < count) b = f(i, static_cast<int>(count - i), b);
  return S::reduce_add((a + b) + (c + d));
}

// Calls function<E>(...) for the type of an op's elements.
#define MCP_FOR_ELEMENT(type, function, ...)  \
  switch (type) {                             \
    case ElementType::kFloat64:               \
      return function<double>(__VA_ARGS__);   \
    case ElementType::kBFloat16:              \
      return function<BFloat16>(__VA_ARGS__); \
    case ElementType::kFloat16:               \
      return function<Float16>(__VA_ARGS__);  \
    case ElementType::kFloat32:               \
      return function<float>(__VA_ARGS__);    \
  }
