// The codecs on any CPU.
#include "cpu/codec_headers.h"

namespace mcp::scalar {
namespace {

#include "cpu/codec_rows_scalar-inl.h"

}  // namespace

#include "cpu/codec_bodies-inl.h"

}  // namespace mcp::scalar
