// Kernels with one mistake each, and the same kernels without it: what the emulator and the sanitizers must find, and
// must not find. `planted_bugs NAME bug|fixed|bug_later SEED` prints "ok", "wrong" or "error: ..." (exit status 0, 2 or
// 3); `bug_later` is a launch without the mistake and then one with it.
//
// A comment AT(name) marks the lines that a report of the bug has to name.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "cuda/launchers.h"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace {

using namespace twinfer::device;

constexpr int kThreads = 64;
constexpr int kBlocks = 2;
constexpr int kCount = kBlocks * kThreads;

// ---- barriers and races ------------------------------------------------------------------------------------------

// Each of these reverses the numbers of its block through shared memory.
template <bool kBug>
__global__ void missing_barrier(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  tile[t] = in[first + t];                            // AT(missing_barrier)
  if (!kBug) __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];            // AT(missing_barrier)
}

// The buffer is written again before everybody has read it. Right by luck in any order of threads that runs each from
// one barrier to the next: only race detection sees it.
template <bool kBug>
__global__ void missing_barrier_at_the_end_of_a_loop(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  for (int round = 0; round < 3; ++round) {
    tile[t] = in[first + t];                          // AT(missing_barrier_at_the_end_of_a_loop)
    __syncthreads();
    out[first + t] = tile[kThreads - 1 - t];          // AT(missing_barrier_at_the_end_of_a_loop)
    if (!kBug) __syncthreads();
  }
}

// Threads 0 to 31 are the last that use the array, so they believe that a warp needs no barrier.
template <bool kBug>
__global__ void missing_syncwarp(float* out, const float* in) {
  SHARED_ARRAY(float, sums, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  sums[t] = in[first + t];
  __syncthreads();
  if (t < 32) {
    for (int distance = 32; distance > 0; distance /= 2) {
      float other = 0.0f;
      if (t < distance) other = sums[t + distance];   // AT(missing_syncwarp)
      if (!kBug) __syncwarp();
      if (t < distance) sums[t] += other;             // AT(missing_syncwarp)
      if (!kBug) __syncwarp();
    }
  }
  __syncthreads();
  out[first + t] = sums[0];
}

// A shuffle makes lanes wait for each other and still orders no memory.
template <bool kBug>
__global__ void shuffle_taken_for_a_barrier(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  tile[t] = in[first + t];                            // AT(shuffle_taken_for_a_barrier)
  const int rank = __shfl_sync(0xffffffffu, t % 32, t % 32);
  if (!kBug) __syncwarp();
  out[first + t] = tile[t / 32 * 32 + 31 - rank];     // AT(shuffle_taken_for_a_barrier)
}

template <bool kBug>
__global__ void missing_atomic(float* total, const float* in) {
  const float x = in[blockIdx.x * kThreads + threadIdx.x];
  if (kBug) {
    *total += x;                                      // AT(missing_atomic)
  } else {
    atomicAdd(total, x);
  }
}

template <bool kBug>
__global__ void two_blocks_write_one_place(float* out) {
  if (threadIdx.x == 0) out[kBug ? 0 : blockIdx.x] = 1.0f;        // AT(two_blocks_write_one_place)
}

// Each copies 16 bytes for itself and its three neighbours.
template <bool kBug>
__global__ void async_copy_read_by_others_without_a_barrier(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  if (t % 4 == 0) cp_async16(&tile[t], &in[first + t]);
  cp_async_commit();
  cp_async_wait<0>();
  if (!kBug) __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];            // AT(async_copy_read_by_others_without_a_barrier)
}

// A block that is done raises a flag; the last one reads what the others wrote.
template <bool kBug>
__global__ void flag_without_a_fence(float* out, const float* in, unsigned* done) {
  SHARED_ARRAY(unsigned, before, [1]);
  const int t = threadIdx.x;
  if (t == 0) {
    out[1 + blockIdx.x] = in[blockIdx.x];             // AT(flag_without_a_fence)
    if (!kBug) __threadfence();
    before[0] = atomicAdd(done, 1u);
  }
  __syncthreads();
  if (t == 0 && before[0] == kBlocks - 1) {
    if (!kBug) __threadfence();
    out[0] = out[1] + out[2];                         // AT(flag_without_a_fence)
  }
}

// The block reduction of csrc/kernels/reduce.cuh, without the barrier at its end, used twice in a row.
template <bool kBug>
__device__ float block_sum(float x, float* scratch) {
  x = warp_reduce<Sum>(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;       // AT(reduction_reuses_its_scratch)
  __syncthreads();
  const float total = scratch[0] + scratch[1];        // AT(reduction_reuses_its_scratch)
  if (!kBug) __syncthreads();
  return total;
}

template <bool kBug>
__global__ void reduction_reuses_its_scratch(float* out, const float* in) {
  SHARED_ARRAY(float, scratch, [2]);
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const float sum = block_sum<kBug>(in[i], scratch);
  out[i] = sum + block_sum<kBug>(1.0f, scratch);
}

// ---- memory ------------------------------------------------------------------------------------------------------

template <bool kBug>
__global__ void uninitialised_shared(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  if (!kBug || t != 5) tile[t] = in[first + t];
  __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];
}

template <bool kBug>
__global__ void static_shared_out_of_bounds(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  tile[t + (kBug ? 1 : 0)] = in[first + t];           // AT(static_shared_out_of_bounds)
  __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];
}

template <bool kBug>
__global__ void dynamic_shared_too_small(float* out, const float* in) {
  DYNAMIC_SHARED(float, tile);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  tile[t] = in[first + t];                            // AT(dynamic_shared_too_small)
  __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];
}

template <bool kBug>
__global__ void global_out_of_bounds(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i + (kBug ? 1 : 0)] = in[i];                    // AT(global_out_of_bounds)
}

template <bool kBug>
__global__ void misaligned_vector_load(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int from = kBug ? min(i, kCount - 4) : i / 4 * 4;
  const float4 v = *reinterpret_cast<const float4*>(in + from);   // AT(misaligned_vector_load)
  out[i] = v.x;
}

template <bool kBug>
__global__ void misaligned_async_copy(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads + 4]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  if (t % 4 == 0) cp_async16(&tile[t], &in[first + (kBug ? 1 : 0)]);    // AT(misaligned_async_copy)
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  out[first + t] = tile[t];
}

template <bool kBug>
__global__ void async_copy_without_a_wait(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kThreads]);
  const int t = threadIdx.x, first = blockIdx.x * kThreads;
  if (t % 4 == 0) cp_async16(&tile[t], &in[first + t]);
  cp_async_commit();
  if (!kBug) cp_async_wait<0>();
  __syncthreads();
  out[first + t] = tile[kThreads - 1 - t];
}

// ---- divergence --------------------------------------------------------------------------------------------------

template <bool kBug>
__global__ void barrier_for_half_of_the_block(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (!kBug || threadIdx.x < 32) {
    __syncthreads();                                  // AT(barrier_for_half_of_the_block)
  }
  out[i] = in[i];
}

template <bool kBug>
__global__ void two_different_barriers(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (kBug && threadIdx.x < 32) {
    __syncthreads();                                  // AT(two_different_barriers)
  } else {
    __syncthreads();                                  // AT(two_different_barriers)
  }
  out[i] = in[i];
}

// Out of bounds threads leave early, and the others wait for them.
template <bool kBug>
__global__ void early_exit_before_a_barrier(float* out, const float* in) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (kBug && t >= 50) return;
  out[i] = in[i];
  __syncthreads();                                    // AT(early_exit_before_a_barrier)
}

template <bool kBug>
__global__ void loop_of_different_length(float* out, const float* in) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  const int rounds = kBug ? 1 + t / 60 : 2;
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();                                  // AT(loop_of_different_length)
  }
  out[i] = in[i];
}

template <bool kBug>
__global__ void shuffle_in_half_of_the_warp(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float x = in[i];
  if (!kBug || threadIdx.x % 32 < 16) {
    x = __shfl_xor_sync(0xffffffffu, x, 1);           // AT(shuffle_in_half_of_the_warp)
  }
  out[i] = x;
}

template <bool kBug>
__global__ void lane_outside_its_own_mask(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = __shfl_xor_sync(kBug ? 0x0000ffffu : 0xffffffffu, in[i], 1);         // AT(lane_outside_its_own_mask)
}

template <bool kBug>
__global__ void shuffle_from_a_lane_outside_the_mask(float* out, const float* in) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  const unsigned mask = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  out[i] = __shfl_xor_sync(mask, in[i], kBug ? 16 : 1);           // AT(shuffle_from_a_lane_outside_the_mask)
}

template <bool kBug>
__global__ void lanes_disagree_about_the_mask(float* out, const float* in) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  const unsigned mask = kBug && t % 2 ? 0xfffffffeu : 0xffffffffu;
  out[i] = __any_sync(mask, in[i] > 0.0f) ? in[i] : 0.0f;         // AT(lanes_disagree_about_the_mask)
}

template <bool kBug>
__global__ void exited_lane_in_the_mask(float* out, const float* in) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  out[i] = in[i];
  if (kBug && t % 32 == 0) return;
  out[i] = __shfl_sync(0xffffffffu, in[i], t % 32);   // AT(exited_lane_in_the_mask)
}

template <bool kBug>
__global__ void trap_on_bad_input(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (kBug && in[i] == 70.0f) __trap();               // AT(trap_on_bad_input)
  out[i] = in[i];
}

// ---- limits ------------------------------------------------------------------------------------------------------

template <bool kBug>
__global__ void too_much_static_shared(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [kBug ? 12289 : 12288]);  // AT(too_much_static_shared)
  const int i = blockIdx.x * kThreads + threadIdx.x;
  tile[threadIdx.x] = in[i];
  out[i] = tile[threadIdx.x];
}

// Static and dynamic arrays share what the architecture has.
__global__ void shared_of_both_kinds(float* out, const float* in) {
  SHARED_ARRAY(float, tile, [1024]);                  // AT(too_much_shared_in_all)
  DYNAMIC_SHARED(float, more);
  const int i = blockIdx.x * kThreads + threadIdx.x;
  tile[threadIdx.x] = in[i];
  more[threadIdx.x] = tile[threadIdx.x];
  out[i] = more[threadIdx.x];
}

__global__ void copy(float* out, const float* in) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (threadIdx.y == 0 && threadIdx.z == 0) out[i] = in[i];
}

// ---- the host's side ---------------------------------------------------------------------------------------------

struct Data {
  std::vector<float> in = std::vector<float>(kCount), out = std::vector<float>(kCount, -7.0f);
  Data() {
    for (int i = 0; i < kCount; ++i) in[i] = static_cast<float>(i);
  }
  bool holds(const std::function<float(int)>& expected) const {
    for (int i = 0; i < kCount; ++i) {
      if (!(out[i] == expected(i))) {                 // a NaN is wrong too
        std::printf("wrong: out[%d] is %g and not %g\n", i, out[i], expected(i));
        return false;
      }
    }
    return true;
  }
};

float reversed(int i) { return static_cast<float>(i / kThreads * kThreads + kThreads - 1 - i % kThreads); }
float same(int i) { return static_cast<float>(i); }
float neighbour(int i) { return static_cast<float>(i ^ 1); }
float quad(int i) { return static_cast<float>(i / 4 * 4); }
float warp_reversed(int i) { return static_cast<float>(i / 32 * 32 + 31 - i % 32); }
float block_start_quad(int i) { return static_cast<float>(i / kThreads * kThreads + i % 4); }
float block_total(int i) {
  const int first = i / kThreads * kThreads;
  return static_cast<float>(kThreads * first + kThreads * (kThreads - 1) / 2);
}
float block_total_and_count(int i) { return block_total(i) + kThreads; }

using Kernel = void (*)(float*, const float*);

bool run_plain(Kernel kernel, float (*expected)(int), size_t dynamic_shared = 0, dim3 block = dim3(kThreads)) {
  Data data;
  launch(kernel, dim3(kBlocks), block, dynamic_shared, nullptr, data.out.data(), data.in.data());
  return data.holds(expected);
}

template <bool kBug>
bool run_atomic() {
  Data data;
  float total = 0.0f;
  launch(missing_atomic<kBug>, dim3(kBlocks), dim3(kThreads), 0, nullptr, &total, data.in.data());
  return total == kCount * (kCount - 1) / 2;
}

template <bool kBug>
bool run_one_place() {
  Data data;
  launch(two_blocks_write_one_place<kBug>, dim3(kBlocks), dim3(kThreads), 0, nullptr, data.out.data());
  return data.out[0] == 1.0f;
}

template <bool kBug>
bool run_flag() {
  Data data;
  unsigned done = 0;
  launch(flag_without_a_fence<kBug>, dim3(kBlocks), dim3(kThreads), 0, nullptr, data.out.data(), data.in.data(),
         &done);
  return data.out[0] == 1.0f;
}

// The real kernel on a block table that names a block far outside the cache: what the bindings' checks prevent.
template <bool kBug>
bool run_block_table() {
  constexpr int kHeadDim = 64, kBlockSize = 16;
  std::vector<float> query(kHeadDim, 0.5f), cache(2 * kBlockSize * kHeadDim, 0.25f), out(kHeadDim);
  const std::vector<int32_t> table{1, kBug ? 3 : 0}, lens{20};
  paged_attention<float>({out.data(), query.data(), cache.data(), cache.data(), table.data(), lens.data(), kHeadDim,
                          kHeadDim, 2, 1, 1, 1, kHeadDim, kBlockSize, 0, 0.125f, nullptr, nullptr, nullptr, 0},
                         20, 3, nullptr);
  for (float x : out) {
    if (!(std::fabs(x - 0.25f) < 1e-6f)) return false;
  }
  return true;
}

struct Case {
  const char* name;
  std::function<bool(bool)> run;
};

#define PLAIN(name, expected) \
  {#name, [](bool bug) { return run_plain(bug ? name<true> : name<false>, expected); }}

const std::vector<Case> kCases = {
    PLAIN(missing_barrier, reversed),
    PLAIN(missing_barrier_at_the_end_of_a_loop, reversed),
    PLAIN(missing_syncwarp, block_total),
    PLAIN(shuffle_taken_for_a_barrier, warp_reversed),
    {"missing_atomic", [](bool bug) { return bug ? run_atomic<true>() : run_atomic<false>(); }},
    {"two_blocks_write_one_place", [](bool bug) { return bug ? run_one_place<true>() : run_one_place<false>(); }},
    PLAIN(async_copy_read_by_others_without_a_barrier, reversed),
    {"flag_without_a_fence", [](bool bug) { return bug ? run_flag<true>() : run_flag<false>(); }},
    PLAIN(reduction_reuses_its_scratch, block_total_and_count),
    PLAIN(uninitialised_shared, reversed),
    PLAIN(static_shared_out_of_bounds, reversed),
    {"dynamic_shared_too_small",
     [](bool bug) { return run_plain(dynamic_shared_too_small<true>, reversed, (bug ? 32 : 64) * sizeof(float)); }},
    PLAIN(global_out_of_bounds, same),
    PLAIN(misaligned_vector_load, quad),
    PLAIN(misaligned_async_copy, block_start_quad),
    PLAIN(async_copy_without_a_wait, reversed),
    PLAIN(barrier_for_half_of_the_block, same),
    PLAIN(two_different_barriers, same),
    PLAIN(early_exit_before_a_barrier, same),
    PLAIN(loop_of_different_length, same),
    PLAIN(shuffle_in_half_of_the_warp, neighbour),
    PLAIN(lane_outside_its_own_mask, neighbour),
    PLAIN(shuffle_from_a_lane_outside_the_mask, neighbour),
    PLAIN(lanes_disagree_about_the_mask, same),
    PLAIN(exited_lane_in_the_mask, same),
    PLAIN(trap_on_bad_input, same),
    PLAIN(too_much_static_shared, same),
    {"too_much_dynamic_shared",
     [](bool bug) { return run_plain(copy, same, (bug ? 164 : 163) * 1024); }},
    {"too_much_shared_in_all",
     [](bool bug) { return run_plain(shared_of_both_kinds, same, (bug ? 160 : 159) * 1024); }},
    {"too_much_for_another_architecture",
     [](bool bug) {
       twinfer::simt::options().limits = &twinfer::simt::architecture("sm_86");
       return run_plain(copy, same, (bug ? 100 : 99) * 1024);
     }},
    {"too_many_threads",
     [](bool bug) { return run_plain(copy, same, 0, bug ? dim3(kThreads, 17) : dim3(kThreads, 16)); }},
    {"too_deep_a_block",
     [](bool bug) { return run_plain(copy, same, 0, bug ? dim3(1, 1, 65) : dim3(kThreads, 1, 1)); }},
    {"no_threads_at_all", [](bool bug) { return run_plain(copy, same, 0, dim3(bug ? 0 : kThreads)); }},
    {"corrupt_block_table", [](bool bug) { return bug ? run_block_table<true>() : run_block_table<false>(); }},
};

}  // namespace

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "--list") == 0) {
    for (const Case& each : kCases) std::printf("%s\n", each.name);
    return 0;
  }
  if (count != 4) return 64;
  twinfer::simt::options().seed = std::strtoull(words[3], nullptr, 10);
  for (const Case& each : kCases) {
    if (std::strcmp(each.name, words[1]) != 0) continue;
    try {
      const bool later = std::strcmp(words[2], "bug_later") == 0;
      if (later && !each.run(false)) return 2;
      const bool right = each.run(later || std::strcmp(words[2], "bug") == 0);
      std::printf(right ? "ok\n" : "wrong\n");
      return right ? 0 : 2;
    } catch (const std::exception& error) {
      std::printf("error: %s\n", error.what());
      return 3;
    }
  }
  return 64;
}
