// Keys that lie in the pages of a cache, packed for calls of many rows. No torch here.
#pragma once

#include "cpu/flash_attn.h"

namespace mcp {

// Packs keys [first, last) of a head for forward, wherever they lie; first is a multiple of
// kAttnPanel.
void pack_keys_of(const FlashAttnArgs& args, const FlashAttnBody& body, AttnHead& head,
                  int64_t first, int64_t last);

}  // namespace mcp
