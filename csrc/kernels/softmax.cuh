// softmax: out = exp(x - max(x)) / sum(exp(x - max(x))) for each row. A row with a NaN, with plus infinity, or of minus
// infinities alone becomes NaN throughout, as the formula says.
//
// Shapes: R rows, V vocabulary.
//
// rung            work                 reads of x    why it is faster than the one before
// v1_naive        a thread a row       3             -
// v2_shuffle      a block a row        3             256 threads a row; neighbouring lanes read neighbouring numbers
// v3_online       a block a row        2             maximum and sum in one pass: a sum is scaled down when a larger
//                                                    number comes (Milakov and Gimelshein, 2018)
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kSoftmaxThreads = 256;

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_v1_naive(SoftmaxArguments<T> a) {
  const int64_t row = int64_t{blockIdx.x} * kSoftmaxThreads + threadIdx.x;
  if (row >= a.num_rows) return;
  const T* x = a.x + row * a.x_stride;
  float largest = Max::kIdentity, sum = 0.0f;
  for (int i = 0; i < a.row_size; ++i) largest = fmaxf(largest, to_float(x[i]));
  float correction = 0.0f;                            // Kahan's sum: thousands of terms in one accumulator
  for (int i = 0; i < a.row_size; ++i) {
    const float term = expf(to_float(x[i]) - largest) - correction, next = sum + term;
    correction = (next - sum) - term;
    sum = next;
  }
  for (int i = 0; i < a.row_size; ++i) {
    a.out[row * a.out_stride + i] = from_float<T>(expf(to_float(x[i]) - largest) / sum);
  }
}

template <class T>
__device__ __forceinline__ void write_softmax(const SoftmaxArguments<T>& a, int64_t row, float largest, float sum) {
  for (int i = static_cast<int>(threadIdx.x); i < a.row_size; i += kSoftmaxThreads) {
    a.out[row * a.out_stride + i] = from_float<T>(expf(to_float(a.x[row * a.x_stride + i]) - largest) / sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_v2_shuffle(SoftmaxArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kSoftmaxThreads / kWarpSize]);
  const int64_t row = blockIdx.x;
  const T* x = a.x + row * a.x_stride;
  float largest = Max::kIdentity, sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < a.row_size; i += kSoftmaxThreads) {
    largest = fmaxf(largest, to_float(x[i]));
  }
  largest = block_reduce_shuffle<Max, kSoftmaxThreads>(largest, scratch);
  for (int i = static_cast<int>(threadIdx.x); i < a.row_size; i += kSoftmaxThreads) {
    sum += expf(to_float(x[i]) - largest);
  }
  write_softmax(a, row, largest, block_reduce_shuffle<Sum, kSoftmaxThreads>(sum, scratch));
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_v3_online(SoftmaxArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kSoftmaxThreads / kWarpSize]);
  const int64_t row = blockIdx.x;
  const T* x = a.x + row * a.x_stride;
  float largest = Max::kIdentity, sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < a.row_size; i += kSoftmaxThreads) {
    const float value = to_float(x[i]), before = largest;
    largest = fmaxf(largest, value);
    sum = sum * expf(before - largest) + expf(value - largest);
  }
  const float all = block_reduce_shuffle<Max, kSoftmaxThreads>(largest, scratch);
  sum *= expf(largest - all);                         // onto one scale
  write_softmax(a, row, all, block_reduce_shuffle<Sum, kSoftmaxThreads>(sum, scratch));
}

}  // namespace twinfer::device
