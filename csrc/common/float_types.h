// Storage of the floating-point types that kernels read, without torch.
#pragma once

#include <cstdint>

namespace mcp {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

// Bits in memory; each body widens them to float32, which is exact for both.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace mcp
