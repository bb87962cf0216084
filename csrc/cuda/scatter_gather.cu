// The symmetric-memory reduce-scatter and all-gather, the torch side: check, cut into pieces of a
// slot, launch.
//
// The ops are internal: who calls them has agreed with the other ranks on the sizes and on the
// number of blocks (mcp_kernels/symmetric/).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "cuda/words.cuh"
// The words come first: the kernels are written in them.
#include "cuda/scatter_gather.cuh"

namespace mcp::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Launch {
  const char* op;
  const Tensor& x;
  const Tensor& y;
  int64_t rows_in_slot;  // rows of a piece that a rank puts into its slot
  Channel channel;
  int64_t max_blocks;
  cudaStream_t stream;
};

bool is_aligned(const void* at, int64_t pitch_bytes) {
  return reinterpret_cast<uintptr_t>(at) % 16 == 0 && pitch_bytes % 16 == 0;
}

// One kernel for each piece of the rows that fits a slot; every piece is an epoch of its own.
template <class T, class Kernel>
void run(const Launch& launch, int64_t n, Kernel kernel) {
  constexpr int64_t kElement = sizeof(T);
  const int64_t most = launch.channel.slot_bytes / 16 / launch.rows_in_slot * Unit<T>::kSize;
  STD_TORCH_CHECK(most > 0, launch.op, ": slot_bytes must hold 16 bytes of each of ",
                  launch.channel.world, " ranks, got ", launch.channel.slot_bytes);
  const char* x = static_cast<const char*>(launch.x.const_data_ptr());
  char* y = static_cast<char*>(launch.y.mutable_data_ptr());
  for (int64_t done = 0; done < n; done += most) {
    const char* const from = x + done * kElement;
    char* const to = y + done * kElement;
    const RowsArgs args{from,
                        to,
                        std::min(most, n - done),
                        n,
                        is_aligned(from, n * kElement),
                        is_aligned(to, n * kElement)};
    const int64_t units = ceil_div(args.n, Unit<T>::kSize);
    const int64_t blocks = std::min(ceil_div(units, kScatterThreads), launch.max_blocks);
    kernel<<<static_cast<unsigned>(blocks), kScatterThreads, 0, launch.stream>>>(args,
                                                                                 launch.channel);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

void check(const char* op, const Tensor& x, const Tensor& buffers, const Tensor& error,
           int64_t rank, int64_t slot_bytes, int64_t max_blocks) {
  check_dtype(op, "buffers", buffers, ScalarType::Long);
  check_dtype(op, "error", error, ScalarType::Long);
  check_numel(op, "error", error, 1);
  STD_TORCH_CHECK(buffers.is_cuda() && buffers.get_device_index() == x.get_device_index(), op,
                  ": buffers must be on the device of x");
  STD_TORCH_CHECK(x.is_contiguous(), op, ": x must be contiguous");
  STD_TORCH_CHECK(rank >= 0 && rank < buffers.numel(), op, ": rank must be in [0, ",
                  buffers.numel() - 1, "], got ", rank);
  STD_TORCH_CHECK(slot_bytes > 0 && slot_bytes % 16 == 0, op,
                  ": slot_bytes must be a positive multiple of 16, got ", slot_bytes);
  STD_TORCH_CHECK(max_blocks >= 1 && max_blocks <= kMaxBlocks, op, ": max_blocks must be in [1, ",
                  kMaxBlocks, "], got ", max_blocks);
}

Channel channel_of(const Tensor& buffers, const Tensor& error, int64_t rank, int64_t slot_bytes,
                   int64_t timeout_ns) {
  return {reinterpret_cast<char* const*>(static_cast<const int64_t*>(buffers.const_data_ptr())),
          nullptr,
          static_cast<uint64_t*>(error.mutable_data_ptr()),
          slot_bytes,
          timeout_ns,
          static_cast<int>(rank),
          static_cast<int>(buffers.numel())};
}

cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class Body>
void for_type(const char* op, ScalarType type, Body body) {
  if (type == ScalarType::Float) return body(float{});
  if (type == ScalarType::BFloat16) return body(__nv_bfloat16{});
  if (type == ScalarType::Half) return body(__half{});
  STD_TORCH_CHECK(type == ScalarType::Double, op,
                  ": x must be float64, float32, bfloat16 or float16, got dtype code ",
                  static_cast<int>(type));
  body(double{});
}

// x: contiguous [world, ...]. Returns [...]: the sum over the ranks of their row `rank`. buffers:
// [world] int64, the ranks' buffers as mapped on x's device. error: one int64 of pinned host
// memory. max_blocks: at most what the group's smallest GPU holds at once.
Tensor symmetric_reduce_scatter(Tensor x, Tensor buffers, Tensor error, int64_t rank,
                                int64_t slot_bytes, int64_t timeout_ns, int64_t max_blocks) {
  constexpr const char* kOp = "symmetric_reduce_scatter";
  check(kOp, x, buffers, error, rank, slot_bytes, max_blocks);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(0) == buffers.numel(), kOp,
                  ": x must have a row for each of ", buffers.numel(), " ranks, got ",
                  x.dim() >= 1 ? x.size(0) : 0);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<int64_t> shape(x.sizes().begin() + 1, x.sizes().end());
  Tensor y = torch::stable::new_empty(x, shape);
  const Launch launch{kOp,
                      x,
                      y,
                      buffers.numel(),
                      channel_of(buffers, error, rank, slot_bytes, timeout_ns),
                      max_blocks,
                      stream_of(x)};
  for_type(kOp, x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    run<T>(launch, y.numel(), reduce_scatter_kernel<T>);
  });
  return y;
}

// x: contiguous [...], as large on every rank. Returns [world, ...]: row p is x of rank p.
Tensor symmetric_all_gather(Tensor x, Tensor buffers, Tensor error, int64_t rank,
                            int64_t slot_bytes, int64_t timeout_ns, int64_t max_blocks) {
  constexpr const char* kOp = "symmetric_all_gather";
  check(kOp, x, buffers, error, rank, slot_bytes, max_blocks);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<int64_t> shape{buffers.numel()};
  shape.insert(shape.end(), x.sizes().begin(), x.sizes().end());
  Tensor y = torch::stable::new_empty(x, shape);
  const Launch launch{
      kOp,        x,           y, 1, channel_of(buffers, error, rank, slot_bytes, timeout_ns),
      max_blocks, stream_of(x)};
  for_type(kOp, x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    run<T>(launch, x.numel(), all_gather_kernel<T>);
  });
  return y;
}

}  // namespace
}  // namespace mcp::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(mcp_kernels, m) {
  m.def(
      "symmetric_reduce_scatter(Tensor x, Tensor buffers, Tensor(a!) error, int rank,"
      " int slot_bytes, int timeout_ns, int max_blocks) -> Tensor");
  m.def(
      "symmetric_all_gather(Tensor x, Tensor buffers, Tensor(a!) error, int rank,"
      " int slot_bytes, int timeout_ns, int max_blocks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CUDA, m) {
  m.impl("symmetric_reduce_scatter", TORCH_BOX(&mcp::cuda::symmetric_reduce_scatter));
  m.impl("symmetric_all_gather", TORCH_BOX(&mcp::cuda::symmetric_all_gather));
}
