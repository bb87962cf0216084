// Attention on any CPU.
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

#include "cpu/flash_attn_scalar-inl.h"
// The types come first: the algorithm is written over them.
#include "cpu/flash_attn-inl.h"

}  // namespace

#include "cpu/flash_attn_table-inl.h"

}  // namespace mcp::scalar
