#include "cpu/flash_attn_append.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/float_types.h"

namespace mcp {
namespace {

#include "cpu/flash_attn_vector-inl.h"

template <class E, class T>
void write_row_of(const Rotation& rotation, const E* from, int64_t from_dim, E* to, int64_t to_dim,
                  int64_t width) {
  const int64_t pairs = rotation.cos == nullptr ? 0 : rotation.num_pairs;
  const auto* cos = static_cast<const T*>(rotation.cos);
  const auto* sin = static_cast<const T*>(rotation.sin);
  const int64_t step = rotation.is_interleaved ? 2 : 1, apart = rotation.is_interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t at = i * step;
    const T a = widen(from[at * from_dim]), b = widen(from[(at + apart) * from_dim]);
    to[at * to_dim] = narrow<E>(a * cos[i] - b * sin[i]);
    to[(at + apart) * to_dim] = narrow<E>(a * sin[i] + b * cos[i]);
  }
  const int64_t done = 2 * pairs;
  if (from_dim == 1 && to_dim == 1) {
    std::copy(from + done, from + width, to + done);
  } else {
    for (int64_t d = done; d < width; ++d) to[d * to_dim] = from[d * from_dim];
  }
}

}  // namespace

void write_row(AttnType type, const Rotation& rotation, const void* from, int64_t from_dim,
               void* to, int64_t to_dim, int64_t width) {
  const auto write = [&](auto element, auto scalar) {
    using E = decltype(element);
    write_row_of<E, decltype(scalar)>(rotation, static_cast<const E*>(from), from_dim,
                                      static_cast<E*>(to), to_dim, width);
  };
  switch (type) {
    case AttnType::kFloat64:
      return write(double{}, double{});
    case AttnType::kBFloat16:
      return write(BFloat16{}, float{});
    case AttnType::kFloat16:
      return write(Float16{}, float{});
    default:
      return write(float{}, float{});
  }
}

int64_t attn_element_bytes(AttnType type) {
  switch (type) {
    case AttnType::kFloat64:
      return sizeof(double);
    case AttnType::kFloat32:
      return sizeof(float);
    case AttnType::kBool:
      return sizeof(bool);
    default:
      return sizeof(uint16_t);
  }
}

}  // namespace mcp
