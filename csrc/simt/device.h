// CUDA C++ for an ordinary C++17 compiler: what kernels/device.cuh includes where nvcc is not at work.
//
// Every primitive takes the place of its call as a default argument, so an error names the kernel's own line.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simt/builtins.h"
#include "simt/machine.h"
#include "simt/types.h"

// ---- qualifiers ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// A shared array is memory of the block that runs, not of the program: blocks run side by side, and AddressSanitizer
// guards the ends of each array.
#define SHARED_ARRAY(T, name, dims)                                                                       \
  static const char name##_declaration = 0;                                                               \
  using name##_type = T dims;                                                                             \
  name##_type& name = *static_cast<name##_type*>(                                                         \
      ::twinfer::simt::static_shared(                                                                     \
          &name##_declaration, sizeof(name##_type), #name, ::twinfer::simt::value_type<T>(), ::twinfer::simt::Site()))
#define DYNAMIC_SHARED(T, name) \
  T* const name = static_cast<T*>(::twinfer::simt::dynamic_shared(#name, ::twinfer::simt::value_type<T>()))

// ---- the host's side -------------------------------------------------------------------------------------------

using cudaStream_t = void*;       // launches return when the grid has ended: every stream is in order
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

namespace twinfer::device {
inline void check(cudaError_t, const char*) {}
}  // namespace twinfer::device

template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0) {
  std::memcpy(reinterpret_cast<char*>(&symbol) + offset, from, bytes);
  return cudaSuccess;
}

namespace twinfer::device {

template <class T>
void name_memory(const char* name, const T* data, size_t elements) {
  if (simt::active_trace() == nullptr) return;
  simt::active_trace()->name_memory(name, data, elements * sizeof(T), simt::value_type<T>());
}

// Arguments are evaluated once and copied to the types of the kernel's parameters, as in a real launch.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared, cudaStream_t,
            Arguments... arguments) {
  const auto call = [=] { kernel(static_cast<Parameters>(arguments)...); };
  simt::run_grid({grid, block, dynamic_shared, &call, sizeof call}, std::cref(call));
}

}  // namespace twinfer::device

// ---- the block -------------------------------------------------------------------------------------------------

inline void __syncthreads(twinfer::simt::Site site = {}) { twinfer::simt::sync_threads(false, site); }
inline int __syncthreads_count(int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::sync_threads(predicate != 0, site);
}
inline int __syncthreads_and(int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::sync_threads(predicate == 0, site) == 0;
}
inline int __syncthreads_or(int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::sync_threads(predicate != 0, site) != 0;
}
inline void __threadfence() { twinfer::simt::memory_fence(); }
inline void __threadfence_block() { twinfer::simt::memory_fence(); }
[[noreturn]] inline void __trap(twinfer::simt::Site site = {}) { twinfer::simt::trap(site); }

// ---- the warp --------------------------------------------------------------------------------------------------

namespace twinfer::simt {

// In warp.cpp, out of ThreadSanitizer's sight: they move values between registers of lanes, not through memory.
void shuffle_lanes(Lane* lanes, unsigned mask);
void ballot_lanes(Lane* lanes, unsigned mask);
void match_any_lanes(Lane* lanes, unsigned mask);
enum class Reduction { kAdd, kMin, kMax, kMinUnsigned, kMaxUnsigned, kAnd, kOr, kXor };
void reduce_lanes(Lane* lanes, unsigned mask);
enum class MmaType { kFloat16, kBFloat16 };
struct MmaFragment {
  uint32_t a[4], b[2];
  float c[4];
};
void mma_m16n8k16_lanes(Lane* lanes, unsigned mask);

// A lane's value travels as the bits of one word.
template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "lanes exchange at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

// `source` outside the lane's segment means its own value.
template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, int width, Site site) {
  const int lane = lane_index(), segment = lane & ~(width - 1);
  if (source < segment || source >= segment + width) source = lane;
  check_source_lane(name, mask, source, site);
  const uint64_t word = to_word(value);
  uint64_t moved;
  warp_operation(name, mask, {&word, &moved, source, value_type<T>()}, &shuffle_lanes, site);
  T result;
  std::memcpy(&result, &moved, sizeof result);
  return result;
}

inline unsigned ballot(const char* name, unsigned mask, bool predicate, Site site) {
  const unsigned vote = predicate;
  unsigned result;
  warp_operation(name, mask, {&vote, &result, 0}, &ballot_lanes, site);
  return result;
}

inline unsigned reduce(const char* name, unsigned mask, unsigned value, Reduction kind, Site site) {
  unsigned result;
  warp_operation(name, mask, {&value, &result, static_cast<int>(kind)}, &reduce_lanes, site);
  return result;
}

}  // namespace twinfer::simt

inline void __syncwarp(unsigned mask = 0xffffffffu, twinfer::simt::Site site = {}) {
  twinfer::simt::sync_warp(mask, site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, twinfer::simt::Site site = {}) {
  const int segment = twinfer::simt::lane_index() & ~(width - 1);
  return twinfer::simt::shuffle("__shfl_sync", mask, value, segment + (lane & (width - 1)), width, site);
}
// Unlike the others, xor may read a lane of an earlier segment; one of a later segment means its own value.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, twinfer::simt::Site site = {}) {
  const int lane = twinfer::simt::lane_index(), source = lane ^ lane_mask;
  const bool later = source >= (lane & ~(width - 1)) + width;
  return twinfer::simt::shuffle("__shfl_xor_sync", mask, value, later ? lane : source, 32, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, twinfer::simt::Site site = {}) {
  const int source = twinfer::simt::lane_index() + static_cast<int>(delta);
  return twinfer::simt::shuffle("__shfl_down_sync", mask, value, source, width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, twinfer::simt::Site site = {}) {
  const int source = twinfer::simt::lane_index() - static_cast<int>(delta);
  return twinfer::simt::shuffle("__shfl_up_sync", mask, value, source, width, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::ballot("__ballot_sync", mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::ballot("__any_sync", mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, twinfer::simt::Site site = {}) {
  return twinfer::simt::ballot("__all_sync", mask, predicate == 0, site) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, twinfer::simt::Site site = {}) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
  const uint64_t word = twinfer::simt::to_word(value);
  unsigned result;
  twinfer::simt::warp_operation("__match_any_sync", mask, {&word, &result, 0}, &twinfer::simt::match_any_lanes, site);
  return result;
}

#define TWINFER_SIMT_REDUCE(name, T, kind)                                                                  \
  inline T name(unsigned mask, T value, twinfer::simt::Site site = {}) {                                    \
    return static_cast<T>(twinfer::simt::reduce(#name, mask, static_cast<unsigned>(value),                  \
                                                twinfer::simt::Reduction::kind, site));                     \
  }
TWINFER_SIMT_REDUCE(__reduce_add_sync, unsigned, kAdd)
TWINFER_SIMT_REDUCE(__reduce_add_sync, int, kAdd)
TWINFER_SIMT_REDUCE(__reduce_min_sync, unsigned, kMinUnsigned)
TWINFER_SIMT_REDUCE(__reduce_min_sync, int, kMin)
TWINFER_SIMT_REDUCE(__reduce_max_sync, unsigned, kMaxUnsigned)
TWINFER_SIMT_REDUCE(__reduce_max_sync, int, kMax)
TWINFER_SIMT_REDUCE(__reduce_and_sync, unsigned, kAnd)
TWINFER_SIMT_REDUCE(__reduce_or_sync, unsigned, kOr)
TWINFER_SIMT_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef TWINFER_SIMT_REDUCE

// ---- memory ----------------------------------------------------------------------------------------------------

template <class T>
T __ldg(const T* address) {
  return *address;
}

// Atomics are relaxed, as on the GPU: they order no other access.
template <class T>
T atomicExch(T* address, T value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

namespace twinfer::simt {

// A read-modify-write of a type that the CPU has no instruction for. Returns the old value.
template <class Bits, class T, class F>
T atomic_update(T* address, F change) {
  static_assert(sizeof(Bits) == sizeof(T), "the same number of bits");
  Bits* word = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, bit_cast<Bits>(change(bit_cast<T>(old))), false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return bit_cast<T>(old);
}

}  // namespace twinfer::simt

#define TWINFER_SIMT_ATOMICS(T)                                                                             \
  inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }                      \
  inline T atomicSub(T* p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }                      \
  inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }                      \
  inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }                        \
  inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }                      \
  inline T atomicMin(T* p, T v) {                                                                           \
    return twinfer::simt::atomic_update<T>(p, [v](T old) { return std::min(old, v); });                     \
  }                                                                                                         \
  inline T atomicMax(T* p, T v) {                                                                           \
    return twinfer::simt::atomic_update<T>(p, [v](T old) { return std::max(old, v); });                     \
  }
TWINFER_SIMT_ATOMICS(int)
TWINFER_SIMT_ATOMICS(unsigned)
TWINFER_SIMT_ATOMICS(unsigned long long)
#undef TWINFER_SIMT_ATOMICS

inline float atomicAdd(float* p, float v) {
  return twinfer::simt::atomic_update<uint32_t>(p, [v](float old) { return old + v; });
}
inline double atomicAdd(double* p, double v) {
  return twinfer::simt::atomic_update<uint64_t>(p, [v](double old) { return old + v; });
}
inline __half2 atomicAdd(__half2* p, __half2 v) {
  return twinfer::simt::atomic_update<uint32_t>(p, [v](__half2 old) { return __hadd2(old, v); });
}
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) {
  return twinfer::simt::atomic_update<uint32_t>(p, [v](__nv_bfloat162 old) { return __hadd2(old, v); });
}

#define WATCH(name, value) \
  ::twinfer::simt::watch(name, ::twinfer::simt::to_word(value), ::twinfer::simt::value_type<decltype(value)>(), {})

// ---- arithmetic ------------------------------------------------------------------------------------------------

using std::max;
using std::min;

// Rounded to nearest on their own: never fused with a neighbour, here by -ffp-contract=off.
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __float_as_int(float x) { return twinfer::simt::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return twinfer::simt::bit_cast<unsigned>(x); }
inline float __int_as_float(int bits) { return twinfer::simt::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return twinfer::simt::bit_cast<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }

// ---- what CUDA spells in PTX; kernels/device.cuh has the same functions for nvcc -------------------------------

inline void cp_async16(void* shared, const void* global, twinfer::simt::Site site = {}) {
  twinfer::simt::copy_async(shared, global, 16, site);
}
inline void cp_async_commit() { twinfer::simt::copy_async_commit(); }
template <int kNewestLeft>
void cp_async_wait() {
  twinfer::simt::copy_async_wait(kNewestLeft);
}

namespace twinfer::simt {

inline void mma_m16n8k16(MmaType type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const float (&c)[4], Site site) {
  const MmaFragment fragment{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
  warp_operation("mma.sync", 0xffffffffu, {&fragment, &d, static_cast<int>(type)}, &mma_m16n8k16_lanes, site);
}

}  // namespace twinfer::simt

inline void mma_m16n8k16(__half, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                         twinfer::simt::Site site = {}) {
  twinfer::simt::mma_m16n8k16(twinfer::simt::MmaType::kFloat16, d, a, b, c, site);
}
inline void mma_m16n8k16(__nv_bfloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const float (&c)[4], twinfer::simt::Site site = {}) {
  twinfer::simt::mma_m16n8k16(twinfer::simt::MmaType::kBFloat16, d, a, b, c, site);
}
