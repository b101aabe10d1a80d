// Numbers in three types, computed in float32, and 128-bit loads and stores of them.
#pragma once

#include "kernels/device.cuh"

namespace twinfer::device {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}

// As many numbers as one load instruction can bring: 4 of float32, 8 of the 16-bit types. One such load asks for the
// memory of what would otherwise be four or eight, so more bytes are under way for each instruction issued.
template <class T>
constexpr int kVector = 16 / sizeof(T);

template <class T>
struct alignas(16) Packed {
  T values[kVector<T>];
};

// `address` must be a multiple of 16.
template <class T>
__device__ __forceinline__ void load_vector(const T* address, float (&x)[kVector<T>]) {
  const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(address);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = to_float(packed.values[i]);
}

template <class T>
__device__ __forceinline__ void store_vector(T* address, const float (&x)[kVector<T>]) {
  Packed<T> packed;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) packed.values[i] = from_float<T>(x[i]);
  *reinterpret_cast<Packed<T>*>(address) = packed;
}

// Bits as they are, from one place to the other.
template <class T>
__device__ __forceinline__ void copy_vector(T* to, const T* from) {
  *reinterpret_cast<Packed<T>*>(to) = *reinterpret_cast<const Packed<T>*>(from);
}

template <class T>
__device__ __forceinline__ void clear_vector(T* to) {
  *reinterpret_cast<Packed<T>*>(to) = Packed<T>{};
}

}  // namespace twinfer::device
