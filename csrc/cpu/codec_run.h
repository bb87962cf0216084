// The torch side of every codec: pick the instruction set, share blocks among threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/isa.h"
#include "common/target.h"

namespace mcp {

// Elements worth a thread of their own: ~20 us of work, ten times what waking a thread costs.
constexpr int64_t kGrainElements = 65536;

template <class Body>
Body pick_body(Body scalar, Body avx2, Body avx512) {
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512) return avx512;
  return isa >= Isa::kAvx2 ? avx2 : scalar;
}

// The body of an op for the CPU at hand: MCP_PICK(onebit_reduce).
#if MCP_X86
#define MCP_PICK(op) ::mcp::pick_body(scalar::op, avx2::op, avx512::op)
#else
#define MCP_PICK(op) scalar::op
#endif

template <class F>
void for_blocks(int64_t num_blocks, int64_t block_size, F run) {
  if (num_blocks == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / block_size);
  torch::stable::parallel_for(0, num_blocks, grain, run);
}

// As for_blocks, with scratch of a block for each thread: run(first, last, scratch).
template <class F>
void for_blocks_with_scratch(int64_t num_blocks, int64_t block_size, int64_t numel, F run) {
  for_blocks(num_blocks, block_size, [&](int64_t first, int64_t last) {
    constexpr int64_t kRowElements = 32;  // rows are written whole
    const int64_t rows = ceil_div(std::min(block_size, numel), kRowElements);
    std::vector<float> scratch(static_cast<size_t>(rows * kRowElements));
    run(first, last, scratch.data());
  });
}

}  // namespace mcp
