// Attention on AVX2.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/float_types.h"
#include "cpu/flash_attn.h"

MCP_TARGET_BEGIN("avx2,fma,f16c")
namespace mcp::avx2 {
namespace {

#include "cpu/flash_attn_avx2-inl.h"
// The types come first: the algorithm is written over them.
#include "cpu/flash_attn-inl.h"

}  // namespace

#include "cpu/flash_attn_table-inl.h"

}  // namespace mcp::avx2
MCP_TARGET_END

#endif  // MCP_X86
