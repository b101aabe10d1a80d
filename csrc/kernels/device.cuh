// The one header every kernel includes: CUDA under nvcc, the emulator (csrc/simt) under any other compiler, unless
// TWINFER_CUDA says that it compiles the host's side of a CUDA build.
//
// Some spellings differ from plain CUDA, so that one source serves both:
//   SHARED_ARRAY(float, tile, [4][64]);     for  __shared__ float tile[4][64];
//   DYNAMIC_SHARED(float, logits);          for  extern __shared__ float logits[];
//   device::launch(kernel, grid, block, shared_bytes, stream, arguments...);    for  kernel<<<...>>>(arguments...)
//   cp_async16, cp_async_commit, cp_async_wait<N>, mma_m16n8k16                 for  the PTX they stand for
#pragma once

#if !defined(__CUDACC__) && !defined(TWINFER_CUDA)
#include "simt/device.h"
#else  // nvcc, or a host compiler that only calls what nvcc compiled

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#define SHARED_ARRAY(T, name, dims) __shared__ __align__(16) T name dims
#define DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char name##_bytes[];    \
  T* const name = reinterpret_cast<T*>(name##_bytes)

#define WATCH(name, value) static_cast<void>(0)

namespace twinfer::device {

template <class T>
void name_memory(const char*, const T*, size_t) {}

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

#if defined(__CUDACC__)
// Throws std::runtime_error when the launch is refused. What goes wrong while the kernel runs is reported by a later
// call, as always in CUDA.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared, cudaStream_t stream,
            Arguments... arguments) {
  constexpr size_t kGranted = 48 * 1024;  // more must be asked for, kernel by kernel
  if (dynamic_shared > kGranted) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(dynamic_shared)),
          "cudaFuncSetAttribute");
  }
  kernel<<<grid, block, dynamic_shared, stream>>>(static_cast<Parameters>(arguments)...);
  check(cudaGetLastError(), "kernel launch");
}
#endif

}  // namespace twinfer::device

#if defined(__CUDACC__)
// 16 bytes from global to shared memory that pass no register; there when cp_async_wait says so.
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kNewestLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kNewestLeft) : "memory");
}

// D = A B + C on the tensor cores: A [16, 16], B [16, 8], C and D [16, 8], spread over the warp as the PTX ISA says.
#define TWINFER_MMA(T, suffix)                                                                                    \
  __device__ __forceinline__ void mma_m16n8k16(T, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],   \
                                               const float (&c)[4]) {                                             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." suffix "." suffix                                        \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};\n"                                \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),         \
                   "f"(c[2]), "f"(c[3]));                                                                          \
  }
TWINFER_MMA(__half, "f16")
TWINFER_MMA(__nv_bfloat16, "bf16")
#undef TWINFER_MMA
#endif

#endif
