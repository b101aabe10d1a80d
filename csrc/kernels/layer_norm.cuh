// Layer norm: out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias for each row; the variance is the mean of
// the squared distances to the mean. Ba et al., 2016.
//
// Shapes: T tokens, C hidden size.
//
// rung            work              reads of x    why it is faster than the one before
// v1_naive        a thread a row    3             -
// v2_shuffle      a block a row     3             256 threads a row; neighbouring lanes read neighbouring numbers
// v3_welford      a block a row     2             mean and squared distances in one pass (Welford, 1962), partial
//                                                 results joined by the formula of Chan et al. (1979); the difference
//                                                 of mean(x^2) and mean(x)^2 would cancel
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kLayerNormThreads = 256;

template <class T>
__device__ __forceinline__ void write_layer_normed(const LayerNormArguments<T>& a, int64_t token, int i, float mean,
                                                   float inverse) {
  const float x = to_float(a.x[token * a.x_stride + i]);
  a.out[token * a.out_stride + i] =
      from_float<T>((x - mean) * inverse * to_float(a.weight[i]) + to_float(a.bias[i]));
}

template <class T>
__global__ void __launch_bounds__(kLayerNormThreads) layer_norm_v1_naive(LayerNormArguments<T> a) {
  const int64_t token = int64_t{blockIdx.x} * kLayerNormThreads + threadIdx.x;
  if (token >= a.num_tokens) return;
  const T* x = a.x + token * a.x_stride;
  float sum = 0.0f, correction = 0.0f;                // Kahan's sum: thousands of terms in one accumulator
  for (int i = 0; i < a.hidden_size; ++i) {
    const float term = to_float(x[i]) - correction, next = sum + term;
    correction = (next - sum) - term;
    sum = next;
  }
  const float mean = sum / a.hidden_size;
  float squares = 0.0f;
  correction = 0.0f;
  for (int i = 0; i < a.hidden_size; ++i) {
    const float distance = to_float(x[i]) - mean, term = distance * distance - correction, next = squares + term;
    correction = (next - squares) - term;
    squares = next;
  }
  const float inverse = rsqrtf(squares / a.hidden_size + a.eps);
  for (int i = 0; i < a.hidden_size; ++i) write_layer_normed(a, token, i, mean, inverse);
}

template <class T>
__global__ void __launch_bounds__(kLayerNormThreads) layer_norm_v2_shuffle(LayerNormArguments<T> a) {
  SHARED_ARRAY(float, scratch, [kLayerNormThreads / kWarpSize]);
  const int64_t token = blockIdx.x;
  const T* x = a.x + token * a.x_stride;
  const int first = static_cast<int>(threadIdx.x);
  float sum = 0.0f, squares = 0.0f;
  for (int i = first; i < a.hidden_size; i += kLayerNormThreads) sum += to_float(x[i]);
  const float mean = block_reduce_shuffle<Sum, kLayerNormThreads>(sum, scratch) / a.hidden_size;
  for (int i = first; i < a.hidden_size; i += kLayerNormThreads) {
    const float distance = to_float(x[i]) - mean;
    squares += distance * distance;
  }
  squares = block_reduce_shuffle<Sum, kLayerNormThreads>(squares, scratch);
  const float inverse = rsqrtf(squares / a.hidden_size + a.eps);
  for (int i = first; i < a.hidden_size; i += kLayerNormThreads) write_layer_normed(a, token, i, mean, inverse);
}

// Of `count` numbers: their mean, and the sum of their squared distances to it.
struct Moments {
  float count, mean, squares;
};

__device__ __forceinline__ Moments joined(Moments a, Moments b) {
  const float count = a.count + b.count;
  if (count == 0.0f) return a;                        // neither has seen a number
  const float difference = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + difference * share, a.squares + b.squares + difference * difference * a.count * share};
}

__device__ __forceinline__ Moments warp_joined(Moments m) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const float count = __shfl_xor_sync(kAllLanes, m.count, distance);
    const float mean = __shfl_xor_sync(kAllLanes, m.mean, distance);
    const float squares = __shfl_xor_sync(kAllLanes, m.squares, distance);
    m = joined(m, {count, mean, squares});
  }
  return m;
}

template <class T>
__global__ void __launch_bounds__(kLayerNormThreads) layer_norm_v3_welford(LayerNormArguments<T> a) {
  constexpr int kWarps = kLayerNormThreads / kWarpSize;
  SHARED_ARRAY(Moments, scratch, [kWarps]);
  const int64_t token = blockIdx.x;
  const T* x = a.x + token * a.x_stride;
  const int tid = static_cast<int>(threadIdx.x);
  Moments m{0.0f, 0.0f, 0.0f};
  for (int i = tid; i < a.hidden_size; i += kLayerNormThreads) {
    const float value = to_float(x[i]), difference = value - m.mean;
    m.count += 1.0f;
    m.mean += difference / m.count;
    m.squares += difference * (value - m.mean);
  }
  m = warp_joined(m);
  if (tid % kWarpSize == 0) scratch[tid / kWarpSize] = m;
  __syncthreads();
  Moments all = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) all = joined(all, scratch[warp]);
  const float inverse = rsqrtf(all.squares / a.hidden_size + a.eps);
  for (int i = tid; i < a.hidden_size; i += kLayerNormThreads) write_layer_normed(a, token, i, all.mean, inverse);
}

}  // namespace twinfer::device
