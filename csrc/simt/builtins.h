// The variables that tell a CUDA thread who it is. Real variables, so that gdb prints them and breaks on them:
// `break rms_norm.cuh:40 if threadIdx.x == 5`.
#pragma once

#include "simt/types.h"

inline thread_local uint3 threadIdx{};
inline thread_local uint3 blockIdx{};
inline thread_local dim3 blockDim{};
inline thread_local dim3 gridDim{};
constexpr int warpSize = 32;
