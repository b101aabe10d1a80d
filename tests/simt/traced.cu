// Kernels whose accesses can be counted on paper, each run under a trace. `traced NAME` prints for every instruction and
// array "DID SPACE ARRAY WIDTH: INSTRUCTIONS instructions, LANES lanes, SECTORS sectors of FEWEST, WAVEFRONTS wavefronts
// of FEWEST", then "barriers N, unnamed N" and the operations of warps.
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "kernels/device.cuh"
#include "simt/trace.h"

namespace {

using namespace twinfer;

constexpr int kFloats = 32 * 33;

// Every lane its own number, `stride` apart.
__global__ void strided(const float* in, float* out, int stride) {
  out[threadIdx.x] = in[threadIdx.x * static_cast<unsigned>(stride)];
}

__global__ void one_number_for_all(const float* in, float* out) { out[threadIdx.x] = in[5]; }

__global__ void vectors(const float4* in, float4* out) { out[threadIdx.x] = in[threadIdx.x]; }

// Half of the warp leaves the loop early: two rounds of 32 lanes, two of 16.
__global__ void unequal_rounds(const float* in, float* out) {
  const int rounds = threadIdx.x < 16 ? 2 : 4;
  float sum = 0.0f;
  for (int i = 0; i < rounds; ++i) sum += in[32 * i + static_cast<int>(threadIdx.x)];
  out[threadIdx.x] = sum;
}

// A lane writes two numbers of its own row; then all read one number, and each one of another row.
template <int kRow>
__global__ void transposed(float* out) {
  SHARED_ARRAY(float, tile, [32][kRow]);
  tile[threadIdx.x][0] = 1.0f;
  tile[threadIdx.x][1] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = tile[1][0] + tile[31 - threadIdx.x][1];
}

__global__ void wide_shared(const float4* in, float4* out) {
  SHARED_ARRAY(float4, tile, [32]);
  tile[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void counted(int* counter) {
  atomicAdd(counter, 1);
  if (__shfl_xor_sync(0xffffffffu, 1, 1) != 1) *counter = 0;
}

__global__ void wanders(const float* elsewhere, float* out) { out[threadIdx.x] = *elsewhere; }

struct Data {
  std::vector<float> in = std::vector<float>(kFloats, 1.0f), out = std::vector<float>(kFloats);
  int counter = 0;
  float* aligned(std::vector<float>& x) {             // to 128 bytes, so that sectors can be counted on paper
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(x.data()) + 127) / 128 * 128);
  }
};

void run(const std::string& name, Data& data) {
  const float* in = data.aligned(data.in);
  float* out = data.aligned(data.out);
  const dim3 one(1), warp(32);
  const auto* wide_in = reinterpret_cast<const float4*>(in);
  auto* wide_out = reinterpret_cast<float4*>(out);
  if (name == "neighbours") return device::launch(strided, one, warp, 0, nullptr, in, out, 1);
  if (name == "every_eighth") return device::launch(strided, one, warp, 0, nullptr, in, out, 8);
  if (name == "one_number_for_all") return device::launch(one_number_for_all, one, warp, 0, nullptr, in, out);
  if (name == "shifted") return device::launch(strided, one, warp, 0, nullptr, in + 1, out, 1);
  if (name == "two_blocks") return device::launch(strided, dim3(2), dim3(64), 0, nullptr, in, out, 1);
  if (name == "vectors") return device::launch(vectors, one, warp, 0, nullptr, wide_in, wide_out);
  if (name == "unequal_rounds") return device::launch(unequal_rounds, one, warp, 0, nullptr, in, out);
  if (name == "columns") return device::launch(transposed<32>, one, warp, 0, nullptr, out);
  if (name == "padded_columns") return device::launch(transposed<33>, one, warp, 0, nullptr, out);
  if (name == "two_way") return device::launch(transposed<2>, one, warp, 0, nullptr, out);
  if (name == "wide_shared") return device::launch(wide_shared, one, warp, 0, nullptr, wide_in, wide_out);
  if (name == "counted") return device::launch(counted, one, warp, 0, nullptr, &data.counter);
  static const float elsewhere = 2.0f;
  if (name == "wanders") return device::launch(wanders, one, warp, 0, nullptr, &elsewhere, out);
  std::printf("no such kernel\n");
}

const char* text(simt::Did did) {
  return did == simt::Did::kRead ? "read" : did == simt::Did::kWrite ? "write" : "atomic";
}

void print(const simt::Trace& trace) {
  for (const auto& [key, counts] : trace.counts()) {
    const bool shared = key.space == simt::Space::kShared;
    const simt::Named& array = shared ? trace.shared_arrays()[key.array] : trace.buffers()[key.array];
    std::printf("%s %s %s %u: %d instructions, %d lanes, %d sectors of %d, %d wavefronts of %d\n", text(key.did),
                shared ? "shared" : "global", array.name.c_str(), key.width, static_cast<int>(counts.instructions),
                static_cast<int>(counts.lanes), static_cast<int>(counts.sectors),
                static_cast<int>(counts.fewest_sectors), static_cast<int>(counts.wavefronts),
                static_cast<int>(counts.fewest_wavefronts));
  }
  const simt::TracedLaunch& launch = trace.launches().back();
  std::printf("barriers %d, unnamed %d\n", static_cast<int>(launch.barriers), static_cast<int>(launch.unnamed));
  for (const auto& [name, count] : launch.operations) std::printf("%s %d\n", name.c_str(), static_cast<int>(count));
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 64;
  Data data;
  const auto named = [](const char* name, const std::vector<float>& x) {
    return simt::Named{name, reinterpret_cast<uintptr_t>(x.data()), x.size() * sizeof(float), simt::ValueType::kFloat32};
  };
  simt::Trace trace({named("in", data.in), named("out", data.out),
                     {"counter", reinterpret_cast<uintptr_t>(&data.counter), sizeof data.counter,
                      simt::ValueType::kInt32}},
                    {0, 0, 0});
  simt::active_trace() = &trace;
  run(words[1], data);
  simt::active_trace() = nullptr;
  print(trace);
  return 0;
}
