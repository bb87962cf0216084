// What the torch side of the codecs' kernels shares: the stream, the guard, checks of the device.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"

namespace mcp::cuda {

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_device(const char* op, const char* name, const torch::stable::Tensor& tensor,
                         const torch::stable::Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), op,
                  ": ", name, " must be on the device of the rest");
}

// A flat float32 buffer that a kernel reads or updates as it lies.
inline void check_flat(const char* op, const char* name, const torch::stable::Tensor& flat,
                       const torch::stable::Tensor& like, int64_t numel) {
  check_dtype(op, name, flat, torch::headeronly::ScalarType::Float);
  check_numel(op, name, flat, numel);
  check_device(op, name, flat, like);
  STD_TORCH_CHECK(flat.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline unsigned groups_of(int64_t num_blocks, int warps_per_group) {
  return static_cast<unsigned>(ceil_div(num_blocks, warps_per_group));
}

}  // namespace mcp::cuda
