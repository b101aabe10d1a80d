// The kernels of docs/gpu-for-c.md. Each takes one idea from C to CUDA; `first_steps NAME ARGUMENTS` runs one.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kernels/device.cuh"
#include "traced.h"

namespace {

using twinfer::device::launch;

// y = a x + y, as everybody writes it.
void saxpy_in_c(int n, float a, const float* x, float* y) {
  for (int i = 0; i < n; ++i) y[i] = a * x[i] + y[i];
}

// The body of the loop, and nothing else. Which i this is follows from where the thread stands.
__global__ void saxpy(int n, float a, const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];                  // the last block may reach past the end
}

// Every thread says where it stands.
__global__ void who_am_i(int* block, int* thread, int* lane) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  block[i] = blockIdx.x;
  thread[i] = threadIdx.x;
  lane[i] = threadIdx.x % 32;
}

// Lane t of a warp reads number t * stride + first.
__global__ void strided_load(const float* x, float* out, int stride, int first) {
  out[threadIdx.x] = x[threadIdx.x * stride + first];
}

// The numbers of a block in reverse order, through memory that its threads share.
template <bool kBarrier>
__global__ void reverse(const float* in, float* out) {
  SHARED_ARRAY(float, tile, [64]);
  const int t = threadIdx.x;
  tile[t] = in[t];
  if (kBarrier) __syncthreads();                      // nobody reads before everybody has written
  out[t] = tile[63 - t];
}

// A warp writes a row of a square and reads a column of it. kWidth is 32, or 33 to move each row on by a bank.
template <int kWidth>
__global__ void transpose(const float* in, float* out) {
  SHARED_ARRAY(float, tile, [32 * kWidth]);
  const int t = threadIdx.x;
  for (int row = 0; row < 32; ++row) tile[row * kWidth + t] = in[row * 32 + t];
  __syncthreads();
  for (int row = 0; row < 32; ++row) out[row * 32 + t] = tile[t * kWidth + row];
}

// ---- the host's side ---------------------------------------------------------------------------------------------

std::vector<float> counting(int n) {
  std::vector<float> x(n);
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(i);
  return x;
}

void run_saxpy() {
  const int n = 1000;
  std::vector<float> x = counting(n), in_c(n, 1.0f), on_device(n, 1.0f);
  saxpy_in_c(n, 2.0f, x.data(), in_c.data());
  launch(saxpy, dim3((n + 255) / 256), dim3(256), 0, nullptr, n, 2.0f, x.data(), on_device.data());
  std::printf("%s\n", in_c == on_device ? "equal" : "different");
}

void run_who_am_i() {
  const int n = 128;
  std::vector<int> block(n), thread(n), lane(n);
  launch(who_am_i, dim3(2), dim3(64), 0, nullptr, block.data(), thread.data(), lane.data());
  for (int i = 0; i < n; ++i) std::printf("%d %d %d %d\n", i, block[i], thread[i], lane[i]);
}

void run_strided_load(int stride, int first) {
  alignas(128) static float x[32 * 32 + 32];          // sectors are counted from where memory begins
  std::vector<float> out(32);
  traced::run({{"x", x, sizeof x}}, [&] {
    launch(strided_load, dim3(1), dim3(32), 0, nullptr, x, out.data(), stride, first);
  });
}

void run_reverse(bool with_barrier, uint64_t seed) {
  twinfer::simt::options().seed = seed;
  std::vector<float> in = counting(64), out(64);
  launch(with_barrier ? reverse<true> : reverse<false>, dim3(1), dim3(64), 0, nullptr, in.data(), out.data());
  int wrong = 0;
  for (int t = 0; t < 64; ++t) wrong += !(out[t] == static_cast<float>(63 - t));
  std::printf("%d\n", wrong);
}

void run_transpose(bool padded) {
  std::vector<float> in = counting(32 * 32), out(32 * 32);
  traced::run({}, [&] {
    launch(padded ? transpose<33> : transpose<32>, dim3(1), dim3(32), 0, nullptr, in.data(), out.data());
  });
}

}  // namespace

int main(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "";
  const int number = count > 2 ? std::atoi(words[2]) : 0, second = count > 3 ? std::atoi(words[3]) : 0;
  try {
    if (name == "saxpy") return run_saxpy(), 0;
    if (name == "who_am_i") return run_who_am_i(), 0;
    if (name == "strided_load" && number >= 1 && number <= 32) return run_strided_load(number, second), 0;
    if (name == "reverse") return run_reverse(number != 0, static_cast<uint64_t>(second)), 0;
    if (name == "transpose") return run_transpose(number != 0), 0;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 3;
  }
  std::printf("usage: first_steps saxpy|who_am_i|strided_load STRIDE FIRST|reverse BARRIER SEED|transpose PADDED\n");
  return 64;
}
