// silu_mul: out = silu(gate) * up, where a row of gate_up is the F numbers of the gate, then the F of up.
// SwiGLU: Shazeer, 2020.
// gelu: out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), the form of Hendrycks and Gimpel (2016) that
// GPT-2 uses.
//
// Shapes: T tokens, F ffn size.
//
// rungs of both   work                             why it is faster than the one before
// v1_element      a thread a number                -
// v2_vectorised   a thread 4 or 8 numbers, a       128-bit loads and stores; a thread's exponentials are independent
//                 block a part of a row            and overlap; no division by F
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"

namespace twinfer::device {

constexpr int kActivationThreads = 128;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

template <class T>
__global__ void __launch_bounds__(kActivationThreads) silu_mul_v1_element(SiluMulArguments<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kActivationThreads + threadIdx.x;
  if (i >= int64_t{a.num_tokens} * a.ffn_size) return;
  const int64_t token = i / a.ffn_size, f = i % a.ffn_size;
  const T* gate = a.gate_up + token * a.gate_up_stride + f;
  a.out[token * a.out_stride + f] = from_float<T>(silu(to_float(gate[0])) * to_float(gate[a.ffn_size]));
}

// Grid (parts of a row, T). F must be a multiple of 4 (float32) or 8, and every row start at a multiple of 16 bytes.
template <class T>
__global__ void __launch_bounds__(kActivationThreads) silu_mul_v2_vectorised(SiluMulArguments<T> a) {
  const int f = static_cast<int>(blockIdx.x * kActivationThreads + threadIdx.x) * kVector<T>;
  if (f >= a.ffn_size) return;
  const int64_t token = blockIdx.y;
  float gate[kVector<T>], up[kVector<T>];
  load_vector(a.gate_up + token * a.gate_up_stride + f, gate);
  load_vector(a.gate_up + token * a.gate_up_stride + a.ffn_size + f, up);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) up[j] *= silu(gate[j]);
  store_vector(a.out + token * a.out_stride + f, up);
}

__device__ __forceinline__ float gelu(float x) {
  constexpr float kSqrtTwoOverPi = 0.7978845608f;
  return 0.5f * x * (1.0f + tanhf(kSqrtTwoOverPi * (x + 0.044715f * x * x * x)));
}

template <class T>
__global__ void __launch_bounds__(kActivationThreads) gelu_v1_element(GeluArguments<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kActivationThreads + threadIdx.x;
  if (i >= int64_t{a.num_tokens} * a.ffn_size) return;
  const int64_t token = i / a.ffn_size, f = i % a.ffn_size;
  a.out[token * a.out_stride + f] = from_float<T>(gelu(to_float(a.x[token * a.x_stride + f])));
}

// Grid and alignment as for silu_mul.
template <class T>
__global__ void __launch_bounds__(kActivationThreads) gelu_v2_vectorised(GeluArguments<T> a) {
  const int f = static_cast<int>(blockIdx.x * kActivationThreads + threadIdx.x) * kVector<T>;
  if (f >= a.ffn_size) return;
  const int64_t token = blockIdx.y;
  float x[kVector<T>];
  load_vector(a.x + token * a.x_stride + f, x);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) x[j] = gelu(x[j]);
  store_vector(a.out + token * a.out_stride + f, x);
}

}  // namespace twinfer::device
