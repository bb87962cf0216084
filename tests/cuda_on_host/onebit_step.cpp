// The CUDA kernels of onebit_compress_momentum, _reduce and _adam_update, compiled for the host.
#include "words.h"
// The words come first: the kernels are written in them.
#include "cuda/onebit_step.cuh"

namespace {

constexpr int kThreads = mcp::cuda::kWarp * mcp::cuda::kWarpsPerGroup;

unsigned groups(int64_t num_blocks) {
  const int64_t warps = mcp::cuda::kWarpsPerGroup;
  return static_cast<unsigned>((num_blocks + warps - 1) / warps);
}

template <class Item>
mcp::cuda::Table<Item> table_of(const Item* items, int count) {
  mcp::cuda::Table<Item> table{};
  std::copy(items, items + count, table.items);
  table.count = count;
  return table;
}

}  // namespace

extern "C" void onebit_compress_momentum(const mcp::OnebitMomentumArgs* args) {
  const auto table = table_of(args->grads, static_cast<int>(args->num_grads));
  host::launch(groups(args->num_blocks), kThreads,
               [&] { mcp::cuda::momentum_kernel(*args, table, 0, args->num_blocks); });
}

extern "C" void onebit_reduce(const mcp::OnebitReduceArgs* args) {
  const int64_t num_blocks = (args->numel + args->block_size - 1) / args->block_size;
  const auto share = static_cast<float>(1.0 / static_cast<double>(args->num_ranks));
  host::launch(groups(num_blocks), kThreads,
               [&] { mcp::cuda::reduce_kernel(*args, num_blocks, share); });
}

extern "C" void onebit_adam_update(const mcp::OnebitAdamArgs* args, int64_t num_blocks) {
  const auto table = table_of(args->params, static_cast<int>(args->num_params));
  host::launch(groups(num_blocks), kThreads,
               [&] { mcp::cuda::adam_kernel(*args, table, 0, num_blocks); });
}
