// The tensors of a codec's reduce on CPU, checked and allocated: the same for every codec.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>

#include "common/check.h"

namespace mcp {

class ReduceCall {
 public:
  ReduceCall(const char* op, const torch::stable::Tensor& codes,
             const torch::stable::Tensor& scales, const torch::stable::Tensor& server_error,
             const std::optional<torch::stable::Tensor>& counts, int64_t block_size,
             int64_t bits_each)
      : error_(server_error) {
    using torch::headeronly::ScalarType;
    check_block_size(op, block_size);
    check_dtype(op, "codes", codes, ScalarType::Byte);
    check_dtype(op, "scales", scales, ScalarType::Float);
    check_dtype(op, "server_error", server_error, ScalarType::Float);
    STD_TORCH_CHECK(server_error.is_contiguous(), op, ": server_error must be contiguous");
    STD_TORCH_CHECK(codes.is_cpu() && scales.is_cpu() && server_error.is_cpu(), op,
                    ": every tensor must be on cpu");
    STD_TORCH_CHECK(codes.dim() == 2 && codes.size(0) >= 1, op, ": codes must be [W, bytes]");
    numel = server_error.numel();
    num_ranks = codes.size(0);
    num_blocks = ceil_div(numel, block_size);
    const int64_t num_bytes = ceil_div(numel * bits_each, 8);
    check_numel(op, "codes", codes, num_ranks, num_bytes);
    check_numel(op, "scales", scales, num_ranks, num_blocks);
    codes_ = torch::stable::contiguous(codes);
    scales_ = torch::stable::contiguous(scales);
    if (counts.has_value()) {
      check_dtype(op, "counts", *counts, ScalarType::Int);
      check_numel(op, "counts", *counts, num_blocks);
      STD_TORCH_CHECK(counts->is_cpu(), op, ": counts must be on cpu");
      counts_ = torch::stable::contiguous(*counts);
    }
    new_codes = torch::stable::new_empty(codes, {num_bytes}, ScalarType::Byte);
    new_scales = torch::stable::new_empty(codes, {num_blocks}, ScalarType::Float);
  }

  const uint8_t* rank_codes() const { return static_cast<const uint8_t*>(codes_.const_data_ptr()); }
  const float* rank_scales() const { return static_cast<const float*>(scales_.const_data_ptr()); }
  const int32_t* counts() const {
    return counts_.has_value() ? static_cast<const int32_t*>(counts_->const_data_ptr()) : nullptr;
  }
  float* error() const { return static_cast<float*>(error_.mutable_data_ptr()); }
  uint8_t* codes_out() const { return static_cast<uint8_t*>(new_codes.mutable_data_ptr()); }
  float* scales_out() const { return static_cast<float*>(new_scales.mutable_data_ptr()); }

  int64_t numel;
  int64_t num_ranks;
  int64_t num_blocks;
  torch::stable::Tensor new_codes;
  torch::stable::Tensor new_scales;

 private:
  torch::stable::Tensor codes_;
  torch::stable::Tensor scales_;
  torch::stable::Tensor error_;
  std::optional<torch::stable::Tensor> counts_;
};

}  // namespace mcp
