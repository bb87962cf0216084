#include "common/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

#include "common/target.h"

namespace mcp {
namespace {

constexpr int kNotChosen = -1;
std::atomic<int> chosen_isa{kNotChosen};

std::vector<Isa> detect() {
  std::vector<Isa> found{Isa::kScalar};
#if MCP_X86
  // These also ask the operating system whether it saves the wide registers.
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return found;
  found.push_back(Isa::kAvx2);  // F16C came before AVX2 in every CPU that has it
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
    return found;
  }
  found.push_back(Isa::kAvx512);
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(Isa::kAvx512Bf16);
#endif
  return found;
}

// Ops with a body of their own for bfloat16 at kAvx512Bf16.
constexpr const char* kBfloat16Ops[] = {"flash_attn", "flash_attn_bwd", "flash_attn_varlen",
                                        "flash_attn_varlen_bwd", "flash_attn_kvcache"};

Isa parse(const std::string& name) {
  std::string legal;
  for (Isa isa : supported_isas()) {
    if (name == isa_name(isa)) return isa;
    legal += legal.empty() ? "" : ", ";
    legal += isa_name(isa);
  }
  throw std::invalid_argument("MCP_CPU_ISA: must be one of " + legal + " on this CPU, got \"" +
                              name + "\"; unset it to take the best");
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

// vdpbf16ps does twice the work of a float32 multiply-add. On AMD (Zen 4, measured: 231 against 116
// GFLOP/s a core) it takes as long; on Intel (Sapphire and Emerald Rapids, measured: 85 against
// 172) four times as long, and widening bfloat16 while it is packed is twice as fast.
Isa default_isa() {
  const Isa best = supported_isas().back();
#if MCP_X86
  if (best == Isa::kAvx512Bf16 && !__builtin_cpu_is("amd")) return Isa::kAvx512;
#endif
  return best;
}

Isa body_isa(const std::string& op, bool is_bfloat16) {
  const Isa isa = current_isa();
  if (isa != Isa::kAvx512Bf16) return isa;
  const auto* end = std::end(kBfloat16Ops);
  const bool has_body = is_bfloat16 && std::find(std::begin(kBfloat16Ops), end, op) != end;
  return has_body ? isa : Isa::kAvx512;
}

Isa current_isa() {
  int isa = chosen_isa.load(std::memory_order_relaxed);
  if (isa == kNotChosen) {
    const char* forced = std::getenv("MCP_CPU_ISA");
    isa = static_cast<int>(forced ? parse(forced) : default_isa());
    chosen_isa.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

void set_isa(const std::string& name) {
  chosen_isa.store(static_cast<int>(parse(name)), std::memory_order_relaxed);
}

}  // namespace mcp
