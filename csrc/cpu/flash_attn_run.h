// Who does what in an attention call: packing, tasks, threads. No torch here.
#pragma once

#include <functional>

#include "cpu/flash_attn.h"

namespace mcp {

// Calls work(i) for i in [0, count), on as many threads at a time; ids may be called in turn too.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t i)>& work)>;

struct FlashAttnThreads {
  int64_t count;
  ParallelFor parallel_for;
};

// Fills out and lse. Results do not depend on the threads.
void run_flash_attn(const FlashAttnArgs& args, const FlashAttnBody& body,
                    const FlashAttnThreads& threads);

// Fills dq, dk and dv, and adds to dbias and dsink_of_head where they are wanted.
void run_flash_attn_bwd(const FlashAttnArgs& args, const FlashAttnBody& body,
                        const FlashAttnThreads& threads);

}  // namespace mcp
