// The ops of a Transformer block on AVX-512.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/flash_attn.h"
#include "cpu/rms_norm.h"
#include "cpu/rotary.h"
#include "cpu/swiglu.h"

MCP_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mcp::avx512 {
namespace {

// clang-format off
#include "cpu/flash_attn_avx512-inl.h"
#include "cpu/block_vectors-inl.h"
#include "cpu/rms_norm-inl.h"
#include "cpu/rotary-inl.h"
#include "cpu/swiglu-inl.h"
// clang-format on

}  // namespace

#include "cpu/block_bodies-inl.h"

}  // namespace mcp::avx512
MCP_TARGET_END

#endif  // MCP_X86
