// Gaps between arrays that share one piece of memory. AddressSanitizer knows where an allocation
// ends, not where an array within it does; a build for it leaves a gap there that nothing may
// touch. In every other build the gaps have no bytes and these functions do nothing.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MCP_HAS_RED_ZONES 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define MCP_HAS_RED_ZONES 1
#endif

#ifdef MCP_HAS_RED_ZONES
#include <sanitizer/asan_interface.h>
#endif

namespace mcp {

#ifdef MCP_HAS_RED_ZONES
constexpr size_t kRedZone = 4096;  // bytes: a page, so that what is aligned to one stays so

inline void forbid(const void* from, size_t bytes) { __asan_poison_memory_region(from, bytes); }
inline void allow(const void* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
#else
constexpr size_t kRedZone = 0;

inline void forbid(const void*, size_t) {}
inline void allow(const void*, size_t) {}
#endif

}  // namespace mcp
