#include "common/isa.h"

#include <atomic>
#include <cstdlib>
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

Isa current_isa() {
  int isa = chosen_isa.load(std::memory_order_relaxed);
  if (isa == kNotChosen) {
    const char* forced = std::getenv("MCP_CPU_ISA");
    isa = static_cast<int>(forced ? parse(forced) : supported_isas().back());
    chosen_isa.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

void set_isa(const std::string& name) {
  chosen_isa.store(static_cast<int>(parse(name)), std::memory_order_relaxed);
}

}  // namespace mcp
