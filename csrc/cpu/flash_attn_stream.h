// Attention calls of few rows, as in decoding: which task reads which keys. No torch here.
#pragma once

#include <vector>

#include "cpu/flash_attn_work.h"

namespace mcp {

// Fills out and lse of `heads`, neighbours of one sequence side by side, with at most
// kAttnStreamRows rows each. Long keys are split, so that threads share them.
void stream_heads(const Work& work, std::vector<AttnHead>& heads);

}  // namespace mcp
