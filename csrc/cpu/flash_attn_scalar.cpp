// Any CPU: vectors of 16 bytes, which the compiler maps to what its baseline has.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/float_types.h"
#include "cpu/flash_attn.h"

namespace mcp::scalar {
namespace {

#include "cpu/flash_attn_vector-inl.h"

struct Floats : Vector<float, 16> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }
};

struct Doubles : Vector<double, 16> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }
};

#include "cpu/flash_attn-inl.h"

}  // namespace

#include "cpu/flash_attn_table-inl.h"

}  // namespace mcp::scalar
