// The codecs on AVX2.
#include "common/target.h"
#if MCP_X86

#include <immintrin.h>

#include "cpu/codec_headers.h"

MCP_TARGET_BEGIN("avx2,fma,f16c")
namespace mcp::avx2 {
namespace {

#include "cpu/codec_rows_avx2-inl.h"

}  // namespace

#include "cpu/codec_bodies-inl.h"

}  // namespace mcp::avx2
MCP_TARGET_END

#endif  // MCP_X86
