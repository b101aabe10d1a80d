// Headers and macros that simd.inc and the kernel bodies need; include it before for_each_isa.inc.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/isa.h"

#if TWINFER_HAVE_X86_ISAS
#include <immintrin.h>
#endif

#define SIMD_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
