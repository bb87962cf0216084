// Types of tensors' elements that the ops of a Transformer block take. No torch here.
#pragma once

#include <cstdint>

#include "common/float_types.h"

namespace mcp {

enum class ElementType { kFloat64, kFloat32, kBFloat16, kFloat16 };

// Rows of `width` neighbouring elements, `stride` elements from one to the next.
struct ConstRows {
  const void* data;
  int64_t stride;
};

}  // namespace mcp
