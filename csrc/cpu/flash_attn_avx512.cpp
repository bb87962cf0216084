// AVX-512: bfloat16 and float16 are widened while they are packed, products are of float32.
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

MCP_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mcp::avx512 {
namespace {

// clang-format off
#include "cpu/flash_attn_avx512-inl.h"
#include "cpu/flash_attn-inl.h"
// clang-format on

}  // namespace

#include "cpu/flash_attn_table-inl.h"

}  // namespace mcp::avx512
MCP_TARGET_END

#endif  // MCP_X86
