// The torch side of int8, int4 and fp8 on CPU: check, allocate, pick the instruction set, register.
#include "cpu/scaled_codec.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "common/check.h"
#include "cpu/codec_reduce.h"
#include "cpu/codec_run.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <ScaledCodec kCodec>
std::tuple<Tensor, Tensor> compress(Tensor x, Tensor error, int64_t block_size) {
  constexpr const char* kOp = names_of(kCodec).compress;
  const FloatType x_type = float_type(kOp, x);
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);
  check_dtype(kOp, "error", error, ScalarType::Float);
  check_numel(kOp, "error", error, numel);
  STD_TORCH_CHECK(error.is_contiguous(), kOp, ": error must be contiguous");
  STD_TORCH_CHECK(error.is_cpu(), kOp, ": error must be on cpu as x is");

  const Tensor flat = torch::stable::contiguous(x);
  const int64_t num_blocks = ceil_div(numel, block_size);
  Tensor codes =
      torch::stable::new_empty(x, {ceil_div(numel * bits_each(kCodec), 8)}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, {num_blocks}, ScalarType::Float);
  const ScaledCompressArgs args{flat.const_data_ptr(),
                                x_type,
                                static_cast<float*>(error.mutable_data_ptr()),
                                static_cast<uint8_t*>(codes.mutable_data_ptr()),
                                static_cast<float*>(scales.mutable_data_ptr()),
                                numel,
                                block_size};
  const auto body = MCP_PICK(scaled_compress);
  for_blocks_with_scratch(num_blocks, block_size, numel,
                          [&](int64_t first, int64_t last, float* carried) {
                            body(kCodec, args, first, last, carried);
                          });
  return {codes, scales};
}

template <ScaledCodec kCodec>
std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t block_size) {
  constexpr const char* kOp = names_of(kCodec).quantize;
  const FloatType x_type = float_type(kOp, x);
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);

  const Tensor flat = torch::stable::contiguous(x);
  const int64_t num_blocks = ceil_div(numel, block_size);
  Tensor codes =
      torch::stable::new_empty(x, {ceil_div(numel * bits_each(kCodec), 8)}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, {num_blocks}, ScalarType::Float);
  const ScaledQuantizeArgs args{flat.const_data_ptr(),
                                x_type,
                                static_cast<uint8_t*>(codes.mutable_data_ptr()),
                                static_cast<float*>(scales.mutable_data_ptr()),
                                numel,
                                block_size};
  const auto body = MCP_PICK(scaled_quantize);
  for_blocks_with_scratch(num_blocks, block_size, numel,
                          [&](int64_t first, int64_t last, float* carried) {
                            body(kCodec, args, first, last, carried);
                          });
  return {codes, scales};
}

template <ScaledCodec kCodec>
void decompress_to(const Tensor& codes, const Tensor& scales, int64_t block_size, Tensor& x) {
  constexpr const char* kOp = names_of(kCodec).decompress;
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);
  check_dtype(kOp, "codes", codes, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  const int64_t num_blocks = ceil_div(numel, block_size);
  check_numel(kOp, "codes", codes, ceil_div(numel * bits_each(kCodec), 8));
  check_numel(kOp, "scales", scales, num_blocks);
  STD_TORCH_CHECK(codes.is_cpu() && scales.is_cpu(), kOp, ": codes and scales must be on cpu");

  const Tensor flat_codes = torch::stable::contiguous(codes);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  const ScaledDecompressArgs args{static_cast<const uint8_t*>(flat_codes.const_data_ptr()),
                                  static_cast<const float*>(flat_scales.const_data_ptr()),
                                  static_cast<float*>(x.mutable_data_ptr()), numel, block_size};
  const auto body = MCP_PICK(scaled_decompress);
  for_blocks(num_blocks, block_size,
             [&](int64_t first, int64_t last) { body(kCodec, args, first, last); });
}

template <ScaledCodec kCodec>
Tensor decompress(Tensor codes, Tensor scales, int64_t numel, int64_t block_size) {
  STD_TORCH_CHECK(numel >= 0, names_of(kCodec).decompress, ": numel must be >= 0, got ", numel);
  Tensor x = torch::stable::new_empty(scales, {numel}, ScalarType::Float);
  decompress_to<kCodec>(codes, scales, block_size, x);
  return x;
}

template <ScaledCodec kCodec>
void decompress_into(Tensor codes, Tensor scales, int64_t block_size, Tensor out) {
  check_out(names_of(kCodec).decompress, out);
  decompress_to<kCodec>(codes, scales, block_size, out);
}

template <ScaledCodec kCodec>
std::tuple<Tensor, Tensor> reduce(Tensor codes, Tensor scales, Tensor server_error,
                                  std::optional<Tensor> counts, int64_t block_size) {
  const ReduceCall call(names_of(kCodec).reduce, codes, scales, server_error, counts, block_size,
                        bits_each(kCodec));
  const ScaledReduceArgs args{call.rank_codes(), call.rank_scales(), call.num_ranks,
                              call.counts(),     call.error(),       call.codes_out(),
                              call.scales_out(), call.numel,         block_size};
  const auto body = MCP_PICK(scaled_reduce);
  for_blocks_with_scratch(call.num_blocks, block_size, call.numel,
                          [&](int64_t first, int64_t last, float* carried) {
                            body(kCodec, args, first, last, carried);
                          });
  return {call.new_codes, call.new_scales};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  using mcp::ScaledCodec;
  m.impl("int8_compress", TORCH_BOX(&mcp::compress<ScaledCodec::kInt8>));
  m.impl("int8_decompress", TORCH_BOX(&mcp::decompress<ScaledCodec::kInt8>));
  m.impl("int8_decompress_into", TORCH_BOX(&mcp::decompress_into<ScaledCodec::kInt8>));
  m.impl("int8_quantize", TORCH_BOX(&mcp::quantize<ScaledCodec::kInt8>));
  m.impl("int8_reduce", TORCH_BOX(&mcp::reduce<ScaledCodec::kInt8>));
  m.impl("int4_compress", TORCH_BOX(&mcp::compress<ScaledCodec::kInt4>));
  m.impl("int4_decompress", TORCH_BOX(&mcp::decompress<ScaledCodec::kInt4>));
  m.impl("int4_decompress_into", TORCH_BOX(&mcp::decompress_into<ScaledCodec::kInt4>));
  m.impl("int4_quantize", TORCH_BOX(&mcp::quantize<ScaledCodec::kInt4>));
  m.impl("int4_reduce", TORCH_BOX(&mcp::reduce<ScaledCodec::kInt4>));
  m.impl("fp8_compress", TORCH_BOX(&mcp::compress<ScaledCodec::kFp8>));
  m.impl("fp8_decompress", TORCH_BOX(&mcp::decompress<ScaledCodec::kFp8>));
  m.impl("fp8_decompress_into", TORCH_BOX(&mcp::decompress_into<ScaledCodec::kFp8>));
  m.impl("fp8_quantize", TORCH_BOX(&mcp::quantize<ScaledCodec::kFp8>));
  m.impl("fp8_reduce", TORCH_BOX(&mcp::reduce<ScaledCodec::kFp8>));
}
