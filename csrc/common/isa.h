// Which instruction set the CPU bodies run on: chosen once, at run time, by what the CPU can do.
#pragma once

#include <string>
#include <vector>

namespace mcp {

// In order: each level can run everything the levels before it can. kAvx512Bf16 has bodies of its
// own for products of bfloat16 alone; every other call runs its kAvx512 body there.
enum class Isa { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The level in use: MCP_CPU_ISA where it is set (read once, at the first call), else default_isa().
// Throws std::invalid_argument, with the legal names, when MCP_CPU_ISA is unknown or too high.
Isa current_isa();

// The level that is fastest on this CPU: the highest, but kAvx512Bf16 only on AMD.
Isa default_isa();

// The level whose body a call of `op` runs at the level in use.
Isa body_isa(const std::string& op, bool is_bfloat16);

// What this CPU and its operating system can run, lowest level first; never empty.
const std::vector<Isa>& supported_isas();

// "scalar", "avx2", "avx512" or "avx512_bf16", the words of MCP_CPU_ISA.
const char* isa_name(Isa isa);

// Moves every later call to another level, as tests of each level need. Throws as current_isa.
void set_isa(const std::string& name);

}  // namespace mcp
