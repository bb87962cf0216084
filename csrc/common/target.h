// Compiles one region of a file for an instruction set above the baseline, whatever the flags.
//
//   #include <...>                       every header first: none of it gets the target
//   MCP_TARGET_BEGIN("avx2,fma,f16c")
//   namespace mcp::avx2 { ... }
//   MCP_TARGET_END
//
// A flag on the whole file would also compile the inline functions of headers for that set, and the
// linker could pick those copies for a CPU that lacks it.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MCP_X86 1
#else
#define MCP_X86 0
#endif

#define MCP_PRAGMA(tokens) _Pragma(#tokens)

#if defined(__clang__)
#define MCP_TARGET_BEGIN(set) \
  MCP_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define MCP_TARGET_END MCP_PRAGMA(clang attribute pop)
#else
#define MCP_TARGET_BEGIN(set) MCP_PRAGMA(GCC push_options) MCP_PRAGMA(GCC target set)
#define MCP_TARGET_END MCP_PRAGMA(GCC pop_options)
#endif
