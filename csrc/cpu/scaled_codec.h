// int8, int4 and fp8 (E4M3): a few bits an element, one scale a block, error feedback.
//
//   c     = x + error                      reduce: the mean + error, as onebit_reduce
//   s     = max |c| / L                    L: 127, 7 or 448; NaN where c is bad or L * s overflows
//   code  = nearest(clamp(c / s, -L, L))   ties to even; 0 where s is 0 or NaN
//   error = c - value(code) * s            kept as it was where s is NaN
//
// Source: mcp_kernels/ops/_scaled_codec.py, the definition.
// Cost: 8 B read and 4 B + the code written an element (float32 x); a division hides behind them.
#pragma once

#include <cstdint>

#include "common/float_types.h"
#include "cpu/codec_rows.h"

namespace mcp {

enum class ScaledCodec { kInt8, kInt4, kFp8 };

constexpr int64_t bits_each(ScaledCodec codec) { return codec == ScaledCodec::kInt4 ? 4 : 8; }

// Names of a codec's ops, for messages.
struct Names {
  const char* compress;
  const char* decompress;
  const char* reduce;
  const char* quantize;
};

constexpr Names names_of(ScaledCodec codec) {
  if (codec == ScaledCodec::kInt8) {
    return {"int8_compress", "int8_decompress", "int8_reduce", "int8_quantize"};
  }
  if (codec == ScaledCodec::kInt4) {
    return {"int4_compress", "int4_decompress", "int4_reduce", "int4_quantize"};
  }
  return {"fp8_compress", "fp8_decompress", "fp8_reduce", "fp8_quantize"};
}

struct ScaledCompressArgs {
  const void* x;       // [numel] of x_type
  FloatType x_type;    //
  float* error;        // [numel], updated in place; may be x itself
  uint8_t* codes;      // [ceil(numel * bits / 8)]
  float* scales;       // [num_blocks]
  int64_t numel;       //
  int64_t block_size;  // a positive multiple of 8
};

// Compress without an error to add or to keep: 4 B read and the code written an element.
struct ScaledQuantizeArgs {
  const void* x;       // [numel] of x_type
  FloatType x_type;    //
  uint8_t* codes;      // [ceil(numel * bits / 8)]
  float* scales;       // [num_blocks]
  int64_t numel;       //
  int64_t block_size;  // a positive multiple of 8
};

struct ScaledDecompressArgs {
  const uint8_t* codes;  // [ceil(numel * bits / 8)]
  const float* scales;   // [num_blocks]
  float* x;              // [numel]
  int64_t numel;         //
  int64_t block_size;    // a positive multiple of 8
};

struct ScaledReduceArgs {
  const uint8_t* rank_codes;  // [num_ranks, ceil(numel * bits / 8)]
  const float* rank_scales;   // [num_ranks, num_blocks]
  int64_t num_ranks;          // >= 1
  const int32_t* counts;      // [num_blocks], or null: every block is full up to numel
  float* error;               // [numel], updated in place
  uint8_t* codes;             // [ceil(numel * bits / 8)]
  float* scales;              // [num_blocks]
  int64_t numel;              //
  int64_t block_size;         // a positive multiple of 8
};

// Each body does blocks [first, last); `carried` is scratch of a block.
#define MCP_DECLARE_SCALED(isa)                                                                    \
  namespace isa {                                                                                  \
  void scaled_compress(ScaledCodec codec, const ScaledCompressArgs& args, int64_t first,           \
                       int64_t last, float* carried);                                              \
  void scaled_quantize(ScaledCodec codec, const ScaledQuantizeArgs& args, int64_t first,           \
                       int64_t last, float* carried);                                              \
  void scaled_decompress(ScaledCodec codec, const ScaledDecompressArgs& args, int64_t first,       \
                         int64_t last);                                                            \
  void scaled_reduce(ScaledCodec codec, const ScaledReduceArgs& args, int64_t first, int64_t last, \
                     float* carried);                                                              \
  }
MCP_DECLARE_SCALED(scalar)
MCP_DECLARE_SCALED(avx2)
MCP_DECLARE_SCALED(avx512)
#undef MCP_DECLARE_SCALED

}  // namespace mcp
