// Sums and maxima over a warp and a block: a ladder of its own, whose rungs the other kernels stand on.
#pragma once

#include "kernels/device.cuh"

namespace twinfer::device {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};

struct Max {
  // The lowest float and not minus infinity: exp(x - maximum) is then never exp(inf - inf).
  static constexpr float kIdentity = -3.402823466e38f;
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};

// Tree in shared memory: half of the threads add the other half's numbers, then a quarter, and so on.
//   shared memory: kThreads floats        barriers: log2(kThreads) + 2        result: in every thread
// All but the first step leave most threads idle, and each waits for a barrier of the whole block.
template <class Op, int kThreads>
__device__ float block_reduce_tree(float x, float* scratch) {
  static_assert((kThreads & (kThreads - 1)) == 0, "the tree halves the number of threads");
  scratch[threadIdx.x] = x;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      scratch[threadIdx.x] = Op::combine(scratch[threadIdx.x], scratch[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const float result = scratch[0];
  __syncthreads();                                    // the next use of scratch must not overtake this read
  return result;
}

// Butterfly over the lanes of a warp: registers only, no shared memory, no barrier. `kWidth` lanes that stand together
// reduce among themselves.
template <class Op, int kWidth = kWarpSize>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    x = Op::combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// Each warp by shuffles, then the few numbers left through shared memory.
//   shared memory: kThreads / 32 floats   barriers: 2                         result: in every thread
template <class Op, int kThreads>
__device__ __forceinline__ float block_reduce_shuffle(float x, float* scratch) {
  static_assert(kThreads % kWarpSize == 0, "whole warps");
  x = warp_reduce<Op>(x);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  float result = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarpSize; ++warp) result = Op::combine(result, scratch[warp]);
  __syncthreads();                                    // as above
  return result;
}

}  // namespace twinfer::device
