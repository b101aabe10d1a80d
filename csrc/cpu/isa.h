// Which copy of the vectorised kernels runs: one binary holds a copy for each instruction set.
#pragma once

namespace twinfer::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The instruction set in use: the widest this CPU has, or the one named by the environment variable TWINFER_ISA
// (baseline, avx2 or avx512). Decided once per process.
// Throws std::invalid_argument when TWINFER_ISA names an unknown set or one this CPU lacks.
Isa active_isa();

const char* isa_name(Isa isa);

}  // namespace twinfer::cpu

// The copies made by for_each_isa.inc that exist in this build.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TWINFER_HAVE_X86_ISAS 1
#define TWINFER_DISPATCH(isa, function)                                                          \
  ((isa) == ::twinfer::cpu::Isa::kAvx512 ? avx512::function                                      \
                                         : (isa) == ::twinfer::cpu::Isa::kAvx2 ? avx2::function \
                                                                               : baseline::function)
#else
#define TWINFER_HAVE_X86_ISAS 0
#define TWINFER_DISPATCH(isa, function) (static_cast<void>(isa), baseline::function)
#endif
