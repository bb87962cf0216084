// The symmetric-memory all-reduce, the torch side: check, cut into pieces of a slot, launch.
//
// The op is internal: who calls it has agreed with the other ranks on the form, the number of
// blocks, and the sizes (mcp_kernels/symmetric/).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "cuda/words.cuh"
// The words come first: the kernels are written in them.
#include "cuda/all_reduce.cuh"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
void launch(int64_t form, const AllReduceArgs& args, const Channel& channel, unsigned blocks,
            cudaStream_t stream) {
  if (form == static_cast<int64_t>(AllReduceForm::kOneShot)) {
    all_reduce_kernel<T, AllReduceForm::kOneShot>
        <<<blocks, kAllReduceThreads, 0, stream>>>(args, channel);
  } else if (form == static_cast<int64_t>(AllReduceForm::kTwoShot)) {
    all_reduce_kernel<T, AllReduceForm::kTwoShot>
        <<<blocks, kAllReduceThreads, 0, stream>>>(args, channel);
  } else if constexpr (sizeof(T) < 8) {
    all_reduce_kernel<T, AllReduceForm::kMulticast>
        <<<blocks, kAllReduceThreads, 0, stream>>>(args, channel);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// One kernel for each piece that fits a slot; every piece is an epoch of its own.
template <class T>
void all_reduce(int64_t form, const Tensor& x, Tensor& y, const Channel& channel,
                int64_t max_blocks, cudaStream_t stream) {
  const int64_t most = channel.slot_bytes / static_cast<int64_t>(sizeof(T));
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (int64_t done = 0; done < x.numel(); done += most) {
    const int64_t numel = std::min(most, x.numel() - done);
    const int64_t at = done * static_cast<int64_t>(sizeof(T));
    const AllReduceArgs args{from + at, to + at, numel,
                             reinterpret_cast<uintptr_t>(from + at) % 16 == 0};
    const int64_t units = ceil_div(numel, Unit<T>::kSize);
    const int64_t share = form == 0 ? units : ceil_div(units, int64_t{channel.world});
    const int64_t blocks = std::min(ceil_div(share, kAllReduceThreads), max_blocks);
    launch<T>(form, args, channel, static_cast<unsigned>(blocks), stream);
  }
}

// x: contiguous. y: a new contiguous tensor of x's shape and type. buffers: [world] int64, the
// ranks' buffers as mapped on x's device. error: one int64 of pinned host memory. form: an
// AllReduceForm. max_blocks: at most what the group's smallest GPU holds at once.
Tensor symmetric_all_reduce(Tensor x, Tensor buffers, Tensor error, int64_t rank, int64_t multicast,
                            int64_t slot_bytes, int64_t timeout_ns, int64_t form,
                            int64_t max_blocks) {
  constexpr const char* kOp = "symmetric_all_reduce";
  const ScalarType type = x.scalar_type();
  check_dtype(kOp, "buffers", buffers, ScalarType::Long);
  check_dtype(kOp, "error", error, ScalarType::Long);
  check_numel(kOp, "error", error, 1);
  STD_TORCH_CHECK(buffers.is_cuda() && buffers.get_device_index() == x.get_device_index(), kOp,
                  ": buffers must be on the device of x");
  STD_TORCH_CHECK(x.is_contiguous(), kOp, ": x must be contiguous");
  STD_TORCH_CHECK(rank >= 0 && rank < buffers.numel(), kOp, ": rank must be in [0, ",
                  buffers.numel() - 1, "], got ", rank);
  STD_TORCH_CHECK(slot_bytes > 0 && slot_bytes % 16 == 0, kOp,
                  ": slot_bytes must be a positive multiple of 16, got ", slot_bytes);
  STD_TORCH_CHECK(max_blocks >= 1 && max_blocks <= kMaxBlocks, kOp, ": max_blocks must be in [1, ",
                  kMaxBlocks, "], got ", max_blocks);
  STD_TORCH_CHECK(
      form == 0 || form == 1 || (form == 2 && multicast != 0 && type != ScalarType::Double), kOp,
      ": form must be 0, 1, or 2 with a multicast address, got ", form);

  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, x.sizes());
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const Channel channel{
      reinterpret_cast<char* const*>(static_cast<const int64_t*>(buffers.const_data_ptr())),
      reinterpret_cast<char*>(multicast),
      static_cast<uint64_t*>(error.mutable_data_ptr()),
      slot_bytes,
      timeout_ns,
      static_cast<int>(rank),
      static_cast<int>(buffers.numel())};
  const auto on = static_cast<cudaStream_t>(stream);
  if (type == ScalarType::Float) {
    all_reduce<float>(form, x, y, channel, max_blocks, on);
  } else if (type == ScalarType::BFloat16) {
    all_reduce<__nv_bfloat16>(form, x, y, channel, max_blocks, on);
  } else if (type == ScalarType::Half) {
    all_reduce<__half>(form, x, y, channel, max_blocks, on);
  } else {
    STD_TORCH_CHECK(type == ScalarType::Double, kOp,
                    ": x must be float64, float32, bfloat16 or float16, got dtype code ",
                    static_cast<int>(type));
    all_reduce<double>(form, x, y, channel, max_blocks, on);
  }
  return y;
}

}  // namespace
}  // namespace mcp::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(mcp_kernels, m) {
  m.def(
      "symmetric_all_reduce(Tensor x, Tensor buffers, Tensor(a!) error, int rank, int multicast,"
      " int slot_bytes, int timeout_ns, int form, int max_blocks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CUDA, m) {
  m.impl("symmetric_all_reduce", TORCH_BOX(&mcp::cuda::symmetric_all_reduce));
}
