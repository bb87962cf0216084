// All codecs' algorithms and their entry points, for the instruction set that includes it: inside
// its namespace, after its rows.

namespace {

#include "cpu/codec_blocks-inl.h"
// The blocks come first: the algorithms are written in them.
#include "cpu/onebit_adam_update-inl.h"
#include "cpu/onebit_compress-inl.h"
#include "cpu/onebit_compress_momentum-inl.h"
#include "cpu/onebit_reduce-inl.h"
#include "cpu/scaled_codec-inl.h"

}  // namespace

void onebit_compress(const OnebitCompressArgs& args, int64_t first, int64_t last) {
  compress_any(args, first, last);
}

void onebit_decompress(const OnebitDecompressArgs& args, int64_t first, int64_t last) {
  decompress_blocks(args, first, last);
}

void onebit_compress_momentum(const OnebitMomentumArgs& args, int64_t first, int64_t last,
                              float* carried) {
  compress_momentum_blocks(args, first, last, carried);
}

void onebit_reduce(const OnebitReduceArgs& args, int64_t first, int64_t last, float* carried) {
  reduce_blocks(args, first, last, carried);
}

void onebit_adam_update(const OnebitAdamArgs& args, int64_t first, int64_t last) {
  update_blocks(args, first, last);
}

void scaled_compress(ScaledCodec codec, const ScaledCompressArgs& args, int64_t first, int64_t last,
                     float* carried) {
  MCP_FOR_CODEC(codec, scaled_compress_any, args, first, last, carried)
}

void scaled_quantize(ScaledCodec codec, const ScaledQuantizeArgs& args, int64_t first, int64_t last,
                     float* carried) {
  MCP_FOR_CODEC(codec, scaled_quantize_any, args, first, last, carried)
}

void scaled_decompress(ScaledCodec codec, const ScaledDecompressArgs& args, int64_t first,
                       int64_t last) {
  MCP_FOR_CODEC(codec, scaled_decompress_blocks, args, first, last)
}

void scaled_reduce(ScaledCodec codec, const ScaledReduceArgs& args, int64_t first, int64_t last,
                   float* carried) {
  MCP_FOR_CODEC(codec, scaled_reduce_blocks, args, first, last, carried)
}
