// The ops of a Transformer block on any CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/flash_attn.h"
#include "cpu/rms_norm.h"
#include "cpu/rotary.h"
#include "cpu/swiglu.h"

namespace mcp::scalar {
namespace {

// clang-format off
#include "cpu/flash_attn_scalar-inl.h"
#include "cpu/block_vectors-inl.h"
#include "cpu/rms_norm-inl.h"
#include "cpu/rotary-inl.h"
#include "cpu/swiglu-inl.h"
// clang-format on

}  // namespace

#include "cpu/block_bodies-inl.h"

}  // namespace mcp::scalar
