// Six ways for 256 threads to add 1,024 numbers: docs/reductions.md. `reductions NAME` runs one and tells what it did.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "kernels/device.cuh"

#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"
#include "traced.h"

namespace {

using namespace twinfer::device;

constexpr int kThreads = 256;
constexpr int kCount = 4 * kThreads;

// Each thread's share of the numbers: every 256th from its own on.
__device__ float own_sum(const float* x) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < kCount; i += kThreads) sum += x[i];
  return sum;
}

// ---- 1: what a loop in C does ------------------------------------------------------------------------------------

__global__ void one_thread(const float* x, float* out) {
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int i = 0; i < kCount; ++i) sum += x[i];
  *out = sum;
}

// ---- 2: everybody adds to one place ------------------------------------------------------------------------------

__global__ void atomics(const float* x, float* out) {
  SHARED_ARRAY(float, total, [1]);
  if (threadIdx.x == 0) total[0] = 0.0f;
  __syncthreads();
  atomicAdd(&total[0], own_sum(x));
  __syncthreads();
  if (threadIdx.x == 0) *out = total[0];
}

// ---- 3: a tree of neighbours -------------------------------------------------------------------------------------

// Round by round the survivors stand farther apart, so every warp keeps running for one lane.
__global__ void divergent_tree(const float* x, float* out) {
  SHARED_ARRAY(float, scratch, [kThreads]);
  const unsigned t = threadIdx.x;
  scratch[t] = own_sum(x);
  __syncthreads();
  for (unsigned distance = 1; distance < kThreads; distance *= 2) {
    if (t % (2 * distance) == 0) scratch[t] += scratch[t + distance];
    __syncthreads();
  }
  if (t == 0) *out = scratch[0];
}

// ---- 4: the same tree, the work packed into the first threads ----------------------------------------------------

// No warp runs for one lane any more, and its lanes' numbers lie 2, 4, 8, ... apart: in the same banks.
__global__ void strided_tree(const float* x, float* out) {
  SHARED_ARRAY(float, scratch, [kThreads]);
  const unsigned t = threadIdx.x;
  scratch[t] = own_sum(x);
  __syncthreads();
  for (unsigned distance = 1; distance < kThreads; distance *= 2) {
    const unsigned i = 2 * distance * t;
    if (i < kThreads) scratch[i] += scratch[i + distance];
    __syncthreads();
  }
  if (t == 0) *out = scratch[0];
}

// ---- 5 and 6: what the project's kernels use ---------------------------------------------------------------------

__global__ void halving_tree(const float* x, float* out) {
  SHARED_ARRAY(float, scratch, [kThreads]);
  const float sum = block_reduce_tree<Sum, kThreads>(own_sum(x), scratch);
  if (threadIdx.x == 0) *out = sum;
}

__global__ void shuffle(const float* x, float* out) {
  SHARED_ARRAY(float, scratch, [kThreads / kWarpSize]);
  const float sum = block_reduce_shuffle<Sum, kThreads>(own_sum(x), scratch);
  if (threadIdx.x == 0) *out = sum;
}

// ---- how the numbers get in: three ways to read them -------------------------------------------------------------

// Thread t reads numbers 4 t to 4 t + 3, one by one.
__global__ void own_piece(const float* x, float* out) {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) sum += x[4 * threadIdx.x + i];
  out[threadIdx.x] = sum;
}

__global__ void every_256th(const float* x, float* out) { out[threadIdx.x] = own_sum(x); }

// The same four as own_piece, with one instruction.
__global__ void one_vector(const float* x, float* out) {
  float values[kVector<float>];
  load_vector(x + 4 * threadIdx.x, values);
  out[threadIdx.x] = values[0] + values[1] + values[2] + values[3];
}

struct Way {
  const char* name;
  void (*kernel)(const float*, float*);
};
constexpr Way kWays[] = {{"one_thread", one_thread},         {"atomics", atomics},
                         {"divergent_tree", divergent_tree}, {"strided_tree", strided_tree},
                         {"halving_tree", halving_tree},     {"shuffle", shuffle},
                         {"own_piece", own_piece},           {"every_256th", every_256th},
                         {"one_vector", one_vector}};

void run(const Way& way) {
  alignas(128) static float x[kCount];
  std::vector<float> out(kThreads);
  for (int i = 0; i < kCount; ++i) x[i] = static_cast<float>(i);
  traced::run({{"x", x, sizeof x}},
              [&] { launch(way.kernel, dim3(1), dim3(kThreads), 0, nullptr, x, out.data()); });
  std::printf("sum %.0f\n", out[0]);
}

}  // namespace

int main(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "";
  for (const Way& way : kWays) {
    if (name != way.name) continue;
    try {
      run(way);
      return 0;
    } catch (const std::exception& error) {
      std::printf("error: %s\n", error.what());
      return 3;
    }
  }
  std::printf("usage: reductions NAME, one of:\n");
  for (const Way& way : kWays) std::printf("  %s\n", way.name);
  return 64;
}
