// The CUDA kernels of int8, int4 and fp8, compiled for the host and called through ctypes.
#include "words.h"
// The words come first: the kernels are written in them.
#include "cuda/scaled_codec.cuh"

namespace {

using mcp::cuda::Fp8Code;
using mcp::cuda::Int4Code;
using mcp::cuda::Int8Code;

constexpr int kThreads = mcp::cuda::kWarp * mcp::cuda::kWarpsPerGroup;

int64_t blocks_of(int64_t numel, int64_t block_size) {
  return numel / block_size + (numel % block_size != 0);
}

unsigned groups(int64_t num_blocks) {
  const int64_t warps = mcp::cuda::kWarpsPerGroup;
  return static_cast<unsigned>((num_blocks + warps - 1) / warps);
}

// body.template operator()<Code>() for codec 0, 1, 2: int8, int4, fp8.
template <class Body>
void for_codec(int codec, const Body& body) {
  if (codec == 0) body(Int8Code());
  if (codec == 1) body(Int4Code());
  if (codec == 2) body(Fp8Code());
}

template <class Code, class T>
void compress(const mcp::ScaledCompressArgs& args) {
  const int64_t num_blocks = blocks_of(args.numel, args.block_size);
  host::launch(groups(num_blocks), kThreads,
               [&] { mcp::cuda::scaled_compress_kernel<Code, T>(args, num_blocks); });
}

}  // namespace

extern "C" void scaled_compress(int codec, const mcp::ScaledCompressArgs* args) {
  for_codec(codec, [&](auto code) {
    using Code = decltype(code);
    if (args->x_type == mcp::FloatType::kFloat32) compress<Code, float>(*args);
    if (args->x_type == mcp::FloatType::kBFloat16) compress<Code, __nv_bfloat16>(*args);
    if (args->x_type == mcp::FloatType::kFloat16) compress<Code, __half>(*args);
  });
}

extern "C" void scaled_decompress(int codec, const mcp::ScaledDecompressArgs* args) {
  const auto grid = static_cast<unsigned>((args->numel + kThreads - 1) / kThreads);
  for_codec(codec, [&](auto code) {
    host::launch(grid, kThreads,
                 [&] { mcp::cuda::scaled_decompress_kernel<decltype(code)>(*args); });
  });
}

extern "C" void scaled_reduce(int codec, const mcp::ScaledReduceArgs* args) {
  const int64_t num_blocks = blocks_of(args->numel, args->block_size);
  const auto share = static_cast<float>(1.0 / static_cast<double>(args->num_ranks));
  for_codec(codec, [&](auto code) {
    host::launch(groups(num_blocks), kThreads, [&] {
      mcp::cuda::scaled_reduce_kernel<decltype(code)>(*args, num_blocks, share);
    });
  });
}
