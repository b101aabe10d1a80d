// argmax: the index of the largest number of each row, the lowest of equals; -1 for a row with a NaN.
//
// Shapes: R rows, V vocabulary.
//
// rung            work                 shared memory    why it is faster than the one before
// v1_naive        a thread a row       none             -
// v2_tree         a block a row        2 KiB            256 threads a row; neighbouring lanes read neighbouring numbers
// v3_shuffle      a block a row        64 B             1 barrier instead of 9: warps meet in registers
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kArgmaxThreads = 256;
constexpr int kNoIndex = 0x7fffffff;

// A NaN beats every number, so that it survives to the end of the row.
struct Candidate {
  float value;
  int index;
};

__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan || b_nan) return a_nan ? a : b;
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.index < b.index ? a : b;
}

__device__ __forceinline__ int64_t argmax_result(Candidate best) { return best.value != best.value ? -1 : best.index; }

// The best of every `step`-th number from `first` on. Minus infinity with no index loses against all that exist.
template <class T>
__device__ __forceinline__ Candidate best_of(const T* x, int row_size, int first, int step) {
  Candidate best{-INFINITY, kNoIndex};
  for (int i = first; i < row_size; i += step) best = better(best, {to_float(x[i]), i});
  return best;
}

template <class T>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_v1_naive(ArgmaxArguments<T> a) {
  const int64_t row = int64_t{blockIdx.x} * kArgmaxThreads + threadIdx.x;
  if (row >= a.num_rows) return;
  a.out[row] = argmax_result(best_of(a.x + row * a.x_stride, a.row_size, 0, 1));
}

template <class T>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_v2_tree(ArgmaxArguments<T> a) {
  SHARED_ARRAY(Candidate, scratch, [kArgmaxThreads]);
  const unsigned tid = threadIdx.x;
  scratch[tid] = best_of(a.x + int64_t{blockIdx.x} * a.x_stride, a.row_size, static_cast<int>(tid), kArgmaxThreads);
  __syncthreads();
  for (unsigned half = kArgmaxThreads / 2; half > 0; half /= 2) {
    if (tid < half) scratch[tid] = better(scratch[tid], scratch[tid + half]);
    __syncthreads();
  }
  if (tid == 0) a.out[blockIdx.x] = argmax_result(scratch[0]);
}

__device__ __forceinline__ Candidate warp_best(Candidate best) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, distance);
    const int index = __shfl_xor_sync(kAllLanes, best.index, distance);
    best = better(best, {value, index});
  }
  return best;
}

template <class T>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_v3_shuffle(ArgmaxArguments<T> a) {
  constexpr int kWarps = kArgmaxThreads / kWarpSize;
  SHARED_ARRAY(Candidate, scratch, [kWarps]);
  const int tid = static_cast<int>(threadIdx.x);
  Candidate best = warp_best(best_of(a.x + int64_t{blockIdx.x} * a.x_stride, a.row_size, tid, kArgmaxThreads));
  if (tid % kWarpSize == 0) scratch[tid / kWarpSize] = best;
  __syncthreads();
  if (tid >= kWarpSize) return;                       // whole warps: nobody is left to wait for them
  best = warp_best(tid < kWarps ? scratch[tid] : Candidate{-INFINITY, kNoIndex});
  if (tid == 0) a.out[blockIdx.x] = argmax_result(best);
}

}  // namespace twinfer::device
