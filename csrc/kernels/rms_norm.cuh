// RMS norm: out = x / sqrt(mean(x^2) + eps) * weight for each row; with kAdd first residual += x, and the norm is that
// of the new residual (as it was rounded for storing). Zhang and Sennrich, NeurIPS 2019.
//
// Shapes: T tokens, C hidden size.
//
// rung            work                        shared memory     why it is faster than the one before
// v1_naive        a thread a row              none              -
// v2_tree         a block a row               1 KiB             lanes of a warp read neighbouring numbers: one memory
//                                                               transaction where v1 needs 32
// v3_shuffle      a block a row               32 B              2 barriers instead of 10, registers instead of memory
// v4_vectorised   a block a row               32 B              a quarter (float32) or an eighth of the load and store
//                                                               instructions
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kNormThreads = 256;

// The number that the norm is taken of. Stored before it is read again, so that both passes see the same rounding.
template <class T, bool kAdd>
__device__ __forceinline__ float norm_input(const RmsNormArguments<T>& a, int64_t token, int i) {
  if (!kAdd) return to_float(a.x[token * a.x_stride + i]);
  T* residual = &a.residual[token * a.residual_stride + i];
  *residual = from_float<T>(to_float(*residual) + to_float(a.x[token * a.x_stride + i]));
  return to_float(*residual);
}

template <class T, bool kAdd>
__device__ __forceinline__ void write_normed(const RmsNormArguments<T>& a, int64_t token, int i, float inverse) {
  const float x = to_float(kAdd ? a.residual[token * a.residual_stride + i] : a.x[token * a.x_stride + i]);
  a.out[token * a.out_stride + i] = from_float<T>(x * inverse * to_float(a.weight[i]));
}

template <class T, bool kAdd>
__global__ void __launch_bounds__(kNormThreads) rms_norm_v1_naive(RmsNormArguments<T> a) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token >= a.num_tokens) return;
  float squares = 0.0f, correction = 0.0f;            // Kahan's sum: thousands of terms in one accumulator
  for (int i = 0; i < a.hidden_size; ++i) {
    const float x = norm_input<T, kAdd>(a, token, i);
    const float term = x * x - correction, sum = squares + term;
    correction = (sum - squares) - term;
    squares = sum;
  }
  const float inverse = rsqrtf(squares / a.hidden_size + a.eps);
  for (int i = 0; i < a.hidden_size; ++i) write_normed<T, kAdd>(a, token, i, inverse);
}

// Each thread sums every 256th number of the row; the partial sums meet in `kReduce`.
template <class T, bool kAdd, float (*kReduce)(float, float*)>
__device__ __forceinline__ void norm_one_row(const RmsNormArguments<T>& a, float* scratch) {
  const int64_t token = blockIdx.x;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < a.hidden_size; i += kNormThreads) {
    const float x = norm_input<T, kAdd>(a, token, i);
    squares += x * x;
  }
  const float inverse = rsqrtf(kReduce(squares, scratch) / a.hidden_size + a.eps);
  for (int i = threadIdx.x; i < a.hidden_size; i += kNormThreads) write_normed<T, kAdd>(a, token, i, inverse);
}

template <class T, bool kAdd>
__global__ void __launch_bounds__(kNormThreads) rms_norm_v2_tree(RmsNormArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kNormThreads]);
  norm_one_row<T, kAdd, block_reduce_tree<Sum, kNormThreads>>(a, scratch);
}

template <class T, bool kAdd>
__global__ void __launch_bounds__(kNormThreads) rms_norm_v3_shuffle(RmsNormArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kNormThreads / kWarpSize]);
  norm_one_row<T, kAdd, block_reduce_shuffle<Sum, kNormThreads>>(a, scratch);
}

// Rows must be multiples of 16 bytes long and apart, and every tensor must start at one.
template <class T, bool kAdd>
__global__ void __launch_bounds__(kNormThreads) rms_norm_v4_vectorised(RmsNormArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kNormThreads / kWarpSize]);
  constexpr int kStep = kNormThreads * kVector<T>;
  const int64_t token = blockIdx.x;
  const T* x = a.x + token * a.x_stride;
  T* residual = kAdd ? a.residual + token * a.residual_stride : nullptr;
  const int first = static_cast<int>(threadIdx.x) * kVector<T>;
  float values[kVector<T>], other[kVector<T>];
  float squares = 0.0f;
  for (int i = first; i < a.hidden_size; i += kStep) {
    load_vector(x + i, values);
    if (kAdd) {
      load_vector(residual + i, other);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) values[j] += other[j];
      store_vector(residual + i, values);
      load_vector(residual + i, values);              // as it was rounded
    }
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) squares += values[j] * values[j];
  }
  const float inverse =
      rsqrtf(block_reduce_shuffle<Sum, kNormThreads>(squares, scratch) / a.hidden_size + a.eps);
  for (int i = first; i < a.hidden_size; i += kStep) {
    load_vector((kAdd ? residual : x) + i, values);
    load_vector(a.weight + i, other);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) values[j] *= inverse * other[j];
    store_vector(a.out + token * a.out_stride + i, values);
  }
}

}  // namespace twinfer::device
