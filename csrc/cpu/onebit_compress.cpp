// The torch side of onebit_compress on CPU: check, allocate, pick the instruction set, register.
#include "cpu/onebit_compress.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "common/check.h"
#include "cpu/codec_run.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> onebit_compress(Tensor x, Tensor error, int64_t block_size) {
  constexpr const char* kOp = "onebit_compress";
  const FloatType x_type = float_type(kOp, x);
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);
  check_dtype(kOp, "error", error, ScalarType::Float);
  check_numel(kOp, "error", error, numel);
  STD_TORCH_CHECK(error.is_contiguous(), kOp, ": error must be contiguous");
  STD_TORCH_CHECK(error.is_cpu(), kOp, ": error must be on cpu as x is");

  const Tensor flat = torch::stable::contiguous(x);
  Tensor bits = torch::stable::new_empty(x, {ceil_div(numel, 8)}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, {ceil_div(numel, block_size)}, ScalarType::Float);
  const OnebitCompressArgs args{flat.const_data_ptr(),
                                x_type,
                                static_cast<float*>(error.mutable_data_ptr()),
                                static_cast<uint8_t*>(bits.mutable_data_ptr()),
                                static_cast<float*>(scales.mutable_data_ptr()),
                                numel,
                                block_size};
  const auto body = MCP_PICK(onebit_compress);
  for_blocks(ceil_div(numel, block_size), block_size,
             [&](int64_t first, int64_t last) { body(args, first, last); });
  return {bits, scales};
}

void decompress_to(const char* kOp, const Tensor& bits, const Tensor& scales, int64_t block_size,
                   Tensor& x) {
  const int64_t numel = x.numel();
  check_block_size(kOp, block_size);
  check_dtype(kOp, "bits", bits, ScalarType::Byte);
  check_dtype(kOp, "scales", scales, ScalarType::Float);
  check_numel(kOp, "bits", bits, ceil_div(numel, 8));
  check_numel(kOp, "scales", scales, ceil_div(numel, block_size));
  STD_TORCH_CHECK(bits.is_cpu() && scales.is_cpu(), kOp, ": bits and scales must be on cpu");

  const Tensor flat_bits = torch::stable::contiguous(bits);
  const Tensor flat_scales = torch::stable::contiguous(scales);
  const OnebitDecompressArgs args{static_cast<const uint8_t*>(flat_bits.const_data_ptr()),
                                  static_cast<const float*>(flat_scales.const_data_ptr()),
                                  static_cast<float*>(x.mutable_data_ptr()), numel, block_size};
  const auto body = MCP_PICK(onebit_decompress);
  for_blocks(ceil_div(numel, block_size), block_size,
             [&](int64_t first, int64_t last) { body(args, first, last); });
}

Tensor onebit_decompress(Tensor bits, Tensor scales, int64_t numel, int64_t block_size) {
  STD_TORCH_CHECK(numel >= 0, "onebit_decompress: numel must be >= 0, got ", numel);
  Tensor x = torch::stable::new_empty(scales, {numel}, ScalarType::Float);
  decompress_to("onebit_decompress", bits, scales, block_size, x);
  return x;
}

void onebit_decompress_into(Tensor bits, Tensor scales, int64_t block_size, Tensor out) {
  check_out("onebit_decompress_into", out);
  decompress_to("onebit_decompress_into", bits, scales, block_size, out);
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("onebit_compress", TORCH_BOX(&mcp::onebit_compress));
  m.impl("onebit_decompress", TORCH_BOX(&mcp::onebit_decompress));
  m.impl("onebit_decompress_into", TORCH_BOX(&mcp::onebit_decompress_into));
}
