// What this machine can do at most: how fast its cores read memory, and how many operations they do on registers.
// `twinfer bench roofline` divides by both.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace twinfer::cpu {

// Bytes a second that `threads` threads read from a buffer of `num_bytes`, the best pass of about `seconds`. The buffer
// must be several times larger than the caches. Throws std::bad_alloc.
double read_bandwidth(int64_t num_bytes, double seconds, Isa isa, int threads);

// Floating-point operations a second of `threads` threads in float32, a fused multiply-add counting as two, the best
// pass of about `seconds`. Nothing is read or written: it is what a matrix product could reach at most.
double multiply_add_peak(double seconds, Isa isa, int threads);

}  // namespace twinfer::cpu
