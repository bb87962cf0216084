// Device code of onebit_compress_momentum, onebit_reduce and onebit_adam_update: formulas and costs
// are those of their headers in cpu/.
#pragma once

#include "cpu/onebit_adam_update.h"
#include "cpu/onebit_compress_momentum.h"
#include "cpu/onebit_reduce.h"
#include "cuda/codec_warp.cuh"

namespace mcp::cuda {
namespace {

// Tensors of one launch, passed as a kernel's argument: 48 take half of the 4 KiB there are.
constexpr int kTableSize = 48;

template <class Item>
struct Table {
  Item items[kTableSize];
  int count;
};

// The last item that begins at `block` or before it; the first one where there is none.
template <class Item>
__device__ const Item& find_item(const Table<Item>& table, int64_t block) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.items[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table.items[low];
}

struct CarryMomentum {
  const void* grad;
  FloatType type;
  int64_t inside;       // elements of the tensor before this block
  const void* factors;  // bfloat16, of this block, or null
  const uint8_t* old_bits;
  float kept;  // beta1 * scale: beta1 * -s rounds to its negative
  const float* error;
  float added;
  float grad_scale;
  __device__ float operator()(int64_t i) const {
    float g = __fmul_rn(read_as(type, grad, inside + i), grad_scale);
    if (factors) g = __fmul_rn(g, read_as(FloatType::kBFloat16, factors, i));
    return __fadd_rn(__fadd_rn(decode_sign(old_bits, i, kept), __fmul_rn(g, added)), error[i]);
  }
};

// Blocks [first, last) of the layout; what lies behind the table's tensors is padding.
__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    momentum_kernel(OnebitMomentumArgs args, Table<OnebitGrad> table, int64_t first, int64_t last) {
  const int64_t block = first + warp_block();
  if (block >= last) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const OnebitGrad& tensor = find_item(table, block);
  const int64_t inside = (block - tensor.first_block) * args.block_size;
  const int64_t left = table.count ? tensor.numel - inside : 0;
  const int64_t count = max(int64_t{0}, min(args.block_size, left));
  float* error = args.error + start;
  const SignBlock to{error, args.bits + start / 8, args.scales + block,
                     count, args.block_size,       args.block_size % kWarp == 0};
  const BFloat16* factors = args.preconditioner ? args.preconditioner + start : nullptr;
  code_signs(to, CarryMomentum{tensor.grad, tensor.type, inside, factors, args.old_bits + start / 8,
                               __fmul_rn(args.beta1, args.old_scales[block]), error,
                               args.one_minus_beta1, args.grad_scale});
}

struct CarryMean {
  const uint8_t* rank_bits;
  const float* rank_scales;
  int64_t num_ranks;
  int64_t rank_bytes;
  int64_t num_blocks;
  float share;
  const float* error;
  __device__ float operator()(int64_t i) const {
    float total = decode_sign(rank_bits, i, rank_scales[0]);
    for (int64_t rank = 1; rank < num_ranks; ++rank) {
      const float value =
          decode_sign(rank_bits + rank * rank_bytes, i, rank_scales[rank * num_blocks]);
      total = __fadd_rn(total, value);
    }
    return __fadd_rn(__fmul_rn(total, share), error[i]);
  }
};

__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    reduce_kernel(OnebitReduceArgs args, int64_t num_blocks, float share) {
  const int64_t block = warp_block();
  if (block >= num_blocks) return;  // a whole warp leaves together
  const int64_t start = block * args.block_size;
  const int64_t elements = min(args.block_size, args.numel - start);
  int64_t count = elements;
  if (args.counts) count = max(int64_t{0}, min(int64_t{args.counts[block]}, elements));
  float* error = args.error + start;
  const SignBlock to{error,    args.bits + start / 8,       args.scales + block, count,
                     elements, args.block_size % kWarp == 0};
  code_signs(to, CarryMean{args.rank_bits + start / 8, args.rank_scales + block, args.num_ranks,
                           (args.numel + 7) / 8, num_blocks, share, error});
}

// Element i of a parameter, whose type is known at run time, becomes the rounding of `value`.
__device__ inline void write_as(FloatType type, void* to, int64_t i, float value) {
  if (type == FloatType::kFloat32) static_cast<float*>(to)[i] = value;
  if (type == FloatType::kBFloat16) static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
  if (type == FloatType::kFloat16) static_cast<__half*>(to)[i] = __float2half_rn(value);
}

__global__ void __launch_bounds__(kWarp* kWarpsPerGroup)
    adam_kernel(OnebitAdamArgs args, Table<OnebitParam> table, int64_t first, int64_t last) {
  const int64_t block = first + warp_block();
  if (block >= last) return;
  const OnebitParam& tensor = find_item(table, block);
  const int64_t inside = (block - tensor.first_block) * args.block_size;
  const int64_t count = min(args.block_size, tensor.numel - inside);
  const int64_t start = block * args.block_size;
  const float step = __fmul_rn(args.step_size, args.scales[block]);
  const uint8_t* bits = args.bits + start / 8;
  for (int64_t i = threadIdx.x % kWarp; i < count; i += kWarp) {
    float update = decode_sign(bits, i, step);
    if (args.denom) update = __fdiv_rn(update, args.denom[start + i]);
    if (args.moves && decode_sign(args.moves + start / 8, i, 1.0f) < 0) update = 0;
    float* weight =
        args.master ? args.master + start + i : static_cast<float*>(tensor.param) + inside + i;
    const float moved = __fsub_rn(__fmul_rn(*weight, tensor.decay), update);
    *weight = moved;
    if (args.master) write_as(tensor.type, tensor.param, inside + i, moved);
  }
}

}  // namespace
}  // namespace mcp::cuda
