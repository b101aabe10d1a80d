#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace twinfer::cpu {
namespace {

bool supported(Isa isa) {
#if TWINFER_HAVE_X86_ISAS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) return avx2 && __builtin_cpu_supports("avx512f");
#endif
  return isa == Isa::kBaseline;
}

constexpr Isa kWidestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kBaseline};

Isa choose_isa() {
  const char* forced = std::getenv("TWINFER_ISA");
  for (const Isa isa : kWidestFirst) {
    if (forced == nullptr || *forced == '\0') {
      if (supported(isa)) return isa;
    } else if (std::string(forced) == isa_name(isa)) {
      if (supported(isa)) return isa;
      throw std::invalid_argument(std::string("TWINFER_ISA=") + forced +
                                  " asks for instructions that this CPU or this build does not have: unset it.");
    }
  }
  throw std::invalid_argument(std::string("TWINFER_ISA=") + forced +
                              " is unknown: use baseline, avx2 or avx512, or unset it.");
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    case Isa::kBaseline: break;
  }
  return "baseline";
}

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

}  // namespace twinfer::cpu
