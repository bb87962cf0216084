// The codecs on AVX-512.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include "cpu/codec_headers.h"

MCP_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace mcp::avx512 {
namespace {

#include "cpu/codec_rows_avx512-inl.h"

}  // namespace

#include "cpu/codec_bodies-inl.h"

}  // namespace mcp::avx512
MCP_TARGET_END

#endif  // MCP_X86
