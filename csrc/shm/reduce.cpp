#include "shm/reduce.h"

#include "common/isa.h"
#include "common/target.h"

namespace mcp::shm {

ReduceFunction find_reduce(Type type, Reduction reduction) {
#if MCP_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512) return avx512::find_reduce(type, reduction);
  if (isa == Isa::kAvx2) return avx2::find_reduce(type, reduction);
#endif
  return scalar::find_reduce(type, reduction);
}

size_t size_of(Type type) {
  switch (type) {
    case Type::kFloat64:
    case Type::kInt64:
      return 8;
    case Type::kFloat32:
    case Type::kInt32:
      return 4;
    case Type::kBFloat16:
    case Type::kFloat16:
    case Type::kInt16:
      return 2;
    case Type::kInt8:
    case Type::kUInt8:
      break;
  }
  return 1;
}

const char* name_of(Type type) {
  constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16", "int64",
                                    "int32",   "int16",   "int8",     "uint8"};
  return kNames[static_cast<int>(type)];
}

const char* name_of(Reduction reduction) {
  constexpr const char* kNames[] = {"sum", "product", "min", "max", "and", "or", "xor"};
  return kNames[static_cast<int>(reduction)];
}

}  // namespace mcp::shm
