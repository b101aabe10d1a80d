// What each primitive of the emulator computes, against what CUDA's documentation says it does. `primitives NAME`
// prints "ok" or the first number that is wrong; `primitives --list` the names.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.cuh"
#include "kernels/numeric.cuh"

namespace {

using twinfer::device::launch;

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

// Runs one warp; thread t's result is compared with expected(t).
template <class T>
bool warp_gives(void (*kernel)(T*), const std::function<T(int)>& expected, int threads = kWarp) {
  std::vector<T> out(static_cast<size_t>(threads));
  launch(kernel, dim3(1), dim3(static_cast<unsigned>(threads)), 0, nullptr, out.data());
  for (int t = 0; t < threads; ++t) {
    if (out[static_cast<size_t>(t)] == expected(t)) continue;
    std::printf("thread %d: %g instead of %g\n", t, static_cast<double>(out[static_cast<size_t>(t)]),
                static_cast<double>(expected(t)));
    return false;
  }
  return true;
}

// ---- shuffles ----------------------------------------------------------------------------------------------------

__global__ void shfl(int* out) { out[threadIdx.x] = __shfl_sync(kAll, static_cast<int>(threadIdx.x) * 10, 37); }
__global__ void shfl_segments(int* out) {
  out[threadIdx.x] = __shfl_sync(kAll, static_cast<int>(threadIdx.x), 11, 8);
}
__global__ void shfl_xor(int* out) { out[threadIdx.x] = __shfl_xor_sync(kAll, static_cast<int>(threadIdx.x), 5); }
__global__ void shfl_xor_segments(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(kAll, static_cast<int>(threadIdx.x), 8, 8);
}
__global__ void shfl_down(double* out) { out[threadIdx.x] = __shfl_down_sync(kAll, threadIdx.x + 0.25, 3); }
__global__ void shfl_up_segments(int* out) {
  out[threadIdx.x] = __shfl_up_sync(kAll, static_cast<int>(threadIdx.x), 3, 16);
}
__global__ void shfl_two_masks(int* out) {
  const int t = threadIdx.x;
  out[t] = t < 8 ? __shfl_sync(0x000000ffu, t, 7) : __shfl_sync(0xffffff00u, -t, 31);
}
// The second warp has 16 lanes.
__global__ void shfl_partial_warp(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(kAll, static_cast<int>(threadIdx.x), 8);
}

// ---- votes and reductions ----------------------------------------------------------------------------------------

__global__ void ballot(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(kAll, threadIdx.x % 3 == 0) & 0x7fffffffu);
}
__global__ void any_all(int* out) {
  const int t = threadIdx.x;
  out[t] = __any_sync(kAll, t == 9) + 2 * __any_sync(kAll, t == 40) + 4 * __all_sync(kAll, t < 32) +
           8 * __all_sync(kAll, t < 31);
}
__global__ void match_any(int* out) {
  out[threadIdx.x] = static_cast<int>(__match_any_sync(kAll, static_cast<int>(threadIdx.x) % 8));
}
__global__ void reduce_signed(int* out) {
  const int t = static_cast<int>(threadIdx.x) - 16;
  out[threadIdx.x] = __reduce_add_sync(kAll, t) + 100 * __reduce_min_sync(kAll, t) + 10000 * __reduce_max_sync(kAll, t);
}
__global__ void reduce_bits(int* out) {
  // The masks in the middle are four, so the first eight lanes come to the last line while others are still there.
  const unsigned bit = 1u << threadIdx.x % 4;
  const unsigned any = __reduce_or_sync(kAll, bit);
  const unsigned odd = __reduce_xor_sync(0xffu << threadIdx.x / 8 * 8, threadIdx.x % 8 == 0 ? threadIdx.x : 0);
  const unsigned all = __reduce_and_sync(kAll, bit | 16u);
  out[threadIdx.x] = static_cast<int>(any + 100 * all + 10000 * odd);
}
__global__ void reduce_unsigned(int* out) {
  const unsigned x = 0x80000000u + threadIdx.x;
  out[threadIdx.x] = static_cast<int>(__reduce_max_sync(kAll, x) - __reduce_min_sync(kAll, x));
}

// ---- the block ---------------------------------------------------------------------------------------------------

__global__ void barrier_counts(int* out) {
  const int t = threadIdx.x;
  const int count = __syncthreads_count(t % 3 == 0);
  const int all = __syncthreads_and(t < 100), some = __syncthreads_and(t < 99);
  const int any = __syncthreads_or(t == 99), none = __syncthreads_or(t == 100);
  out[t] = count + 1000 * all + 2000 * some + 4000 * any + 8000 * none;
}
__global__ void dimensions(int* out) {
  const int t = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  const int b = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  out[b * 24 + t] = 10000 * b + static_cast<int>(100 * threadIdx.z + 10 * threadIdx.y + threadIdx.x);
}
bool run_dimensions() {
  std::vector<int> out(24 * 30, -1);
  launch(dimensions, dim3(5, 3, 2), dim3(4, 3, 2), 0, nullptr, out.data());
  for (int i = 0; i < 24 * 30; ++i) {
    const int t = i % 24, expected = 10000 * (i / 24) + 100 * (t / 12) + 10 * (t / 4 % 3) + t % 4;
    if (out[static_cast<size_t>(i)] != expected) return false;
  }
  return true;
}

// Static arrays are apart from each other and from dynamic memory, the same for all threads, and poisoned.
__global__ void shared_memory(int* out) {
  SHARED_ARRAY(int, a, [2][32]);
  SHARED_ARRAY(int, b, [32]);
  DYNAMIC_SHARED(int, c);
  const int t = threadIdx.x;
  const bool poison = a[1][t] == -1 && b[t] == -1 && c[t] == -1;
  __syncthreads();
  a[1][t] = t;
  b[t] = 100 * t;
  c[t] = 10000 * t;
  __syncthreads();
  out[t] = poison ? a[1][31 - t] + b[31 - t] + c[31 - t] : -1;
}
bool run_shared_memory() {
  std::vector<int> out(kWarp);
  launch(shared_memory, dim3(1), dim3(kWarp), kWarp * sizeof(int), nullptr, out.data());
  for (int t = 0; t < kWarp; ++t) {
    if (out[static_cast<size_t>(t)] != (31 - t) * 10101) return false;
  }
  return true;
}

// ---- memory ------------------------------------------------------------------------------------------------------

struct Totals {
  int added, subtracted, least, most, swapped, bits;
  unsigned long long wide;
  float single;
  double twice;
  __half2 halves;
  __nv_bfloat162 brains;
};

__global__ void atomics(Totals* totals) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&totals->added, i);
  atomicSub(&totals->subtracted, 1);
  atomicMin(&totals->least, 50 - i);
  atomicMax(&totals->most, i);
  atomicOr(&totals->bits, 1 << i % 20);
  atomicAdd(&totals->wide, 1ull << 33);
  atomicAdd(&totals->single, 0.5f);
  atomicAdd(&totals->twice, 0.25);
  atomicAdd(&totals->halves, __floats2half2_rn(1.0f, -1.0f));
  atomicAdd(&totals->brains, __floats2bfloat162_rn(1.0f, 2.0f));
  if (atomicCAS(&totals->swapped, i, i + 1) == i && i == 127) atomicExch(&totals->swapped, 777);
}
bool run_atomics() {
  Totals totals{};
  twinfer::simt::options().os_threads = 4;
  launch(atomics, dim3(4), dim3(32), 0, nullptr, &totals);
  const float2 halves = __half22float2(totals.halves), brains = __bfloat1622float2(totals.brains);
  return totals.added == 127 * 64 && totals.subtracted == -128 && totals.least == -77 && totals.most == 127 &&
         totals.bits == (1 << 20) - 1 && totals.wide == 128ull << 33 && totals.single == 64.0f &&
         totals.twice == 32.0 && halves.x == 128.0f && halves.y == -128.0f && brains.x == 128.0f && brains.y == 256.0f;
}
// One block in ascending order: every exchange finds what it expects.
bool run_compare_and_swap() {
  Totals totals{};
  launch(atomics, dim3(1), dim3(128), 0, nullptr, &totals);
  return totals.swapped == 777;
}

// Three groups under way: waiting for all but the newest leaves that one out.
__global__ void async_groups(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [3 * 32 * 4]);
  const int t = threadIdx.x;
  for (int group = 0; group < 3; ++group) {
    cp_async16(&tile[(group * 32 + t) * 4], &in[(group * 32 + t) * 4]);
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  for (int i = t; i < 3 * 32 * 4; i += 32) out[i] = tile[i];
}
bool run_async_groups() {
  std::vector<float> in(384), out(384);
  for (int i = 0; i < 384; ++i) in[static_cast<size_t>(i)] = static_cast<float>(i);
  launch(async_groups, dim3(1), dim3(32), 0, nullptr, out.data(), in.data());
  for (int i = 0; i < 384; ++i) {
    const float got = out[static_cast<size_t>(i)];
    if (i < 256 ? got != static_cast<float>(i) : !std::isnan(got)) return false;
  }
  return true;
}

__constant__ int table[4] = {2, 3, 5, 7};
__global__ void constant(int* out) { out[threadIdx.x] = table[threadIdx.x % 4]; }
bool run_constant() {
  const int newest = 11;
  cudaMemcpyToSymbol(table, &newest, sizeof newest, 3 * sizeof(int));
  return warp_gives<int>(constant, [](int t) { return (const int[]){2, 3, 5, 11}[t % 4]; });
}

// ---- numbers -----------------------------------------------------------------------------------------------------

// Every 16-bit pattern goes to float and back unchanged, but for NaNs, which stay NaNs.
template <class T>
bool round_trips() {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    T x;
    x.bits = static_cast<uint16_t>(bits);
    const float value = twinfer::device::to_float(x);
    const T back = twinfer::device::from_float<T>(value);
    if (std::isnan(value) ? !std::isnan(twinfer::device::to_float(back)) : back.bits != x.bits) return false;
  }
  return true;
}
// Halfway cases go to the even neighbour, and what is too large becomes infinity.
bool run_rounding() {
  const auto half = [](float x) { return __half2float(__float2half(x)); };
  const auto brain = [](float x) { return __bfloat162float(__float2bfloat16(x)); };
  return half(1.0f + 1.0f / 2048) == 1.0f && half(1.0f + 3.0f / 2048) == 1.0f + 2.0f / 1024 &&
         half(65519.0f) == 65504.0f && std::isinf(half(65520.0f)) && half(5.9604645e-8f) == 5.9604645e-8f &&
         half(2.9e-8f) == 0.0f && brain(1.0f + 1.0f / 256) == 1.0f && brain(1.0f + 3.0f / 256) == 1.0f + 2.0f / 128 &&
         std::isinf(brain(3.4e38f)) && __half2float(__hfma(__half(3.0f), __half(0.5f), __half(-1.0f))) == 0.5f;
}

// Rows of A and columns of B by the fragment layout of the PTX ISA, built here from that text's own formulas.
template <class T>
__global__ void matrix_multiply(float* d, const T* a, const T* b, const float* c) {
  const int lane = threadIdx.x, group = lane / 4, in_group = lane % 4;
  uint32_t fragment_a[4], fragment_b[2];
  float fragment_c[4], fragment_d[4];
  for (int i = 0; i < 8; ++i) {
    const int row = group + (i / 2 % 2) * 8, k = in_group * 2 + (i & 1) + (i / 4) * 8;
    std::memcpy(reinterpret_cast<char*>(fragment_a) + 2 * i, &a[row * 16 + k], 2);
  }
  for (int i = 0; i < 4; ++i) {
    const int k = in_group * 2 + (i & 1) + (i / 2) * 8;
    std::memcpy(reinterpret_cast<char*>(fragment_b) + 2 * i, &b[k * 8 + group], 2);
  }
  for (int i = 0; i < 4; ++i) fragment_c[i] = c[(group + i / 2 * 8) * 8 + in_group * 2 + i % 2];
  mma_m16n8k16(T{}, fragment_d, fragment_a, fragment_b, fragment_c);
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + in_group * 2 + i % 2] = fragment_d[i];
}
template <class T>
bool run_matrix_multiply() {
  std::vector<T> a(256), b(128);
  std::vector<float> c(128), d(128, NAN);
  for (int i = 0; i < 256; ++i) a[static_cast<size_t>(i)] = T(static_cast<float>(i * 7 % 13) - 6.0f);
  for (int i = 0; i < 128; ++i) b[static_cast<size_t>(i)] = T(static_cast<float>(i * 5 % 11) - 5.0f);
  for (int i = 0; i < 128; ++i) c[static_cast<size_t>(i)] = static_cast<float>(i);
  launch(matrix_multiply<T>, dim3(1), dim3(kWarp), 0, nullptr, d.data(), a.data(), b.data(), c.data());
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 8; ++col) {
      float sum = c[static_cast<size_t>(row * 8 + col)];
      for (int k = 0; k < 16; ++k) {
        const auto at_a = static_cast<size_t>(row * 16 + k), at_b = static_cast<size_t>(k * 8 + col);
        sum += static_cast<float>(a[at_a]) * static_cast<float>(b[at_b]);
      }
      if (d[static_cast<size_t>(row * 8 + col)] != sum) return false;
    }
  }
  return true;
}

// ---- the machine -------------------------------------------------------------------------------------------------

// Which thread comes first depends on the seed and on nothing else.
__global__ void order(int* out) {
  SHARED_ARRAY(int, next, [1]);
  if (threadIdx.x == 0) next[0] = 0;
  __syncthreads();
  out[blockIdx.x * 32 + threadIdx.x] = atomicAdd(&next[0], 1);
}
std::vector<int> order_of(uint64_t seed, int os_threads) {
  std::vector<int> out(32 * 8);
  twinfer::simt::options().seed = seed;
  twinfer::simt::options().os_threads = os_threads;
  launch(order, dim3(8), dim3(32), 0, nullptr, out.data());
  return out;
}
bool run_order() {
  const std::vector<int> plain = order_of(0, 1), first = order_of(1, 1), second = order_of(2, 1);
  // The last to reach a barrier goes on first, then the others in ascending order.
  for (int t = 0; t < 32; ++t) {
    if (plain[static_cast<size_t>(t)] != (t + 1) % 32) return false;
  }
  return first != plain && first != second && order_of(1, 1) == first && order_of(1, 4) == first;
}

__global__ void fails_in_one_block(int* out) {
  if (blockIdx.x == 3) __trap();
  out[blockIdx.x] = 1;
}
// An error leaves the machine fit for the next launch, and says where it happened.
bool run_recovery() {
  std::vector<int> out(8);
  for (int os_threads : {1, 3}) {
    twinfer::simt::options().os_threads = os_threads;
    try {
      launch(fails_in_one_block, dim3(8), dim3(32), 0, nullptr, out.data());
      return false;
    } catch (const twinfer::simt::Error& error) {
      if (error.block.x != 3 || std::strstr(error.site.file, "primitives.cu") == nullptr) return false;
    }
    if (order_of(0, os_threads).size() != 256) return false;
  }
  return run_shared_memory();
}

__global__ void deep_stack(int* out) {
  volatile char room[40 * 1024];
  room[0] = 1;
  room[sizeof room - 1] = static_cast<char>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = room[0] + room[sizeof room - 1];
}

struct Case {
  const char* name;
  std::function<bool()> run;
};

const std::vector<Case> kCases = {
    {"shfl", [] { return warp_gives<int>(shfl, [](int) { return 50; }); }},
    {"shfl_segments", [] { return warp_gives<int>(shfl_segments, [](int t) { return t / 8 * 8 + 3; }); }},
    {"shfl_xor", [] { return warp_gives<int>(shfl_xor, [](int t) { return t ^ 5; }); }},
    // Out of the segment: a later one gives the lane's own value, an earlier one is read.
    {"shfl_xor_segments",
     [] { return warp_gives<int>(shfl_xor_segments, [](int t) { return t & 8 ? t ^ 8 : t; }); }},
    {"shfl_down", [] { return warp_gives<double>(shfl_down, [](int t) { return (t < 29 ? t + 3 : t) + 0.25; }); }},
    {"shfl_up_segments",
     [] { return warp_gives<int>(shfl_up_segments, [](int t) { return t % 16 < 3 ? t : t - 3; }); }},
    {"shfl_two_masks", [] { return warp_gives<int>(shfl_two_masks, [](int t) { return t < 8 ? 7 : -31; }); }},
    {"shfl_partial_warp", [] { return warp_gives<int>(shfl_partial_warp, [](int t) { return t ^ 8; }, 48); }},
    {"ballot", [] { return warp_gives<int>(ballot, [](int) { return 0x49249249; }); }},
    {"any_all", [] { return warp_gives<int>(any_all, [](int) { return 1 + 4; }); }},
    {"match_any", [] { return warp_gives<int>(match_any, [](int t) { return 0x01010101 << t % 8; }); }},
    {"reduce_signed", [] { return warp_gives<int>(reduce_signed, [](int) { return -16 - 1600 + 150000; }); }},
    {"reduce_bits", [] { return warp_gives<int>(reduce_bits, [](int t) { return 15 + 1600 + 10000 * (t / 8 * 8); }); }},
    {"reduce_unsigned", [] { return warp_gives<int>(reduce_unsigned, [](int) { return 31; }); }},
    {"barrier_counts", [] { return warp_gives<int>(barrier_counts, [](int) { return 34 + 1000 + 4000; }, 100); }},
    {"dimensions", run_dimensions},
    {"shared_memory", run_shared_memory},
    {"atomics", run_atomics},
    {"compare_and_swap", run_compare_and_swap},
    {"async_groups", run_async_groups},
    {"constant", run_constant},
    {"half_round_trips", round_trips<__half>},
    {"bfloat16_round_trips", round_trips<__nv_bfloat16>},
    {"rounding", run_rounding},
    {"matrix_multiply_half", run_matrix_multiply<__half>},
    {"matrix_multiply_bfloat16", run_matrix_multiply<__nv_bfloat16>},
    {"order", run_order},
    {"recovery", run_recovery},
    {"deep_stack", [] { return warp_gives<int>(deep_stack, [](int t) { return 1 + t; }, 64); }},
};

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 64;
  for (const Case& each : kCases) {
    if (std::strcmp(words[1], "--list") == 0) std::printf("%s\n", each.name);
    if (std::strcmp(words[1], each.name) != 0) continue;
    try {
      const bool right = each.run();
      std::printf(right ? "ok\n" : "wrong\n");
      return right ? 0 : 2;
    } catch (const std::exception& error) {
      std::printf("error: %s\n", error.what());
      return 3;
    }
  }
  return 0;
}
