// Rotary embedding of query and key in place: dimensions i and i + D/2 are the two coordinates of a point, which is
// turned by the angle of the token's position (NeoX style). Su et al., "RoFormer", 2021.
//
// Shapes: T tokens, H query heads, Hkv KV heads, D head dim.
//
// rung            work                             why it is faster than the one before
// v1_pair         a thread a pair of numbers       -
// v2_token        a block a token                  cos and sin are read once a token and not once a head, into shared
//                                                  memory (4 D bytes); position and row are found once a block
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"

namespace twinfer::device {

constexpr int kRotaryThreads = 128;
constexpr int kLargestRotaryDim = 256;

// The head's numbers, query heads first, then key heads.
template <class T>
__device__ __forceinline__ T* rotary_head(const RotaryArguments<T>& a, int64_t token, int head) {
  if (head < a.num_heads) return a.query + token * a.query_stride + int64_t{head} * a.head_dim;
  return a.key + token * a.key_stride + int64_t{head - a.num_heads} * a.head_dim;
}

template <class T>
__device__ __forceinline__ void rotate(T* first, T* second, float cosine, float sine) {
  const float x = to_float(*first), y = to_float(*second);
  *first = from_float<T>(x * cosine - y * sine);
  *second = from_float<T>(y * cosine + x * sine);
}

template <class T>
__global__ void __launch_bounds__(kRotaryThreads) rotary_v1_pair(RotaryArguments<T> a) {
  const int half = a.head_dim / 2, heads = a.num_heads + a.num_kv_heads;
  const int64_t i = int64_t{blockIdx.x} * kRotaryThreads + threadIdx.x;
  if (i >= int64_t{a.num_tokens} * heads * half) return;
  const int64_t token = i / (heads * half);
  const int head = static_cast<int>(i / half % heads), d = static_cast<int>(i % half);
  const float* angles = a.cos_sin_cache + a.positions[token] * a.head_dim;
  T* numbers = rotary_head(a, token, head);
  rotate(numbers + d, numbers + d + half, angles[d], angles[d + half]);
}

// Grid (T). D at most 256.
template <class T>
__global__ void __launch_bounds__(kRotaryThreads) rotary_v2_token(RotaryArguments<T> a) {
  SHARED_ARRAY(float, angles, [kLargestRotaryDim]);   // [D]
  const int half = a.head_dim / 2, pairs = (a.num_heads + a.num_kv_heads) * half;
  const int64_t token = blockIdx.x, position = a.positions[token];
  for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kRotaryThreads) {
    angles[d] = a.cos_sin_cache[position * a.head_dim + d];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += kRotaryThreads) {
    T* numbers = rotary_head(a, token, i / half);
    const int d = i % half;
    rotate(numbers + d, numbers + d + half, angles[d], angles[d + half]);
  }
}

}  // namespace twinfer::device
