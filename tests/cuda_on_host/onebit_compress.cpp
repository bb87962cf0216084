// The CUDA kernels of onebit_compress, compiled for the host and called through ctypes.
#include "words.h"
// The words come first: the kernels are written in them.
#include "cuda/onebit_compress.cuh"

namespace {

template <class T>
void compress(const mcp::OnebitCompressArgs& args) {
  const int64_t num_blocks = args.numel / args.block_size + (args.numel % args.block_size != 0);
  const int64_t warps = mcp::cuda::kWarpsPerGroup;
  const auto grid = static_cast<unsigned>((num_blocks + warps - 1) / warps);
  host::launch(grid, mcp::cuda::kWarp * mcp::cuda::kWarpsPerGroup,
               [&] { mcp::cuda::compress_kernel<T>(args, num_blocks); });
}

}  // namespace

extern "C" void onebit_compress(const void* x, int x_type, float* error, uint8_t* bits,
                                float* scales, int64_t numel, int64_t block_size) {
  const auto type = static_cast<mcp::FloatType>(x_type);
  const mcp::OnebitCompressArgs args{x, type, error, bits, scales, numel, block_size};
  if (type == mcp::FloatType::kFloat32) compress<float>(args);
  if (type == mcp::FloatType::kBFloat16) compress<__nv_bfloat16>(args);
  if (type == mcp::FloatType::kFloat16) compress<__half>(args);
}

extern "C" void onebit_decompress(const uint8_t* bits, const float* scales, float* x, int64_t numel,
                                  int64_t block_size) {
  const mcp::OnebitDecompressArgs args{bits, scales, x, numel, block_size};
  constexpr int kThreads = 256;
  const auto grid = static_cast<unsigned>(((numel + 7) / 8 + kThreads - 1) / kThreads);
  host::launch(grid, kThreads, [&] { mcp::cuda::decompress_kernel(args); });
}
