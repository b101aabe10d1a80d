// philox: the random 32-bit words of token ids 0 .. V-1, a pure function of (seed, output position, token id). Bit for
// bit those of reference/contracts/noise.py: word id % 4 of Philox4x32-10 with the counter (id / 4, position, 0, 0) and
// the key (low 32, high 32) bits of the seed. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
//
// Shapes: R rows, V vocabulary.
//
// rung            work                             why it is faster than the one before
// v1_word         a thread a word                  -
// v2_block        a thread a block of four         the ten rounds give four words: a quarter of the arithmetic, and one
//                                                  128-bit store
#pragma once

#include "kernels/arguments.h"
#include "kernels/device.cuh"

namespace twinfer::device {

constexpr int kPhiloxThreads = 128;

// The four words that token ids 4 * index .. 4 * index + 3 share.
__device__ __forceinline__ uint4 philox_block(uint64_t seed, uint32_t position, uint32_t index) {
  uint32_t c0 = index, c1 = position, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ __forceinline__ uint32_t word_of(const uint4& block, int i) {
  return i == 0 ? block.x : i == 1 ? block.y : i == 2 ? block.z : block.w;
}

__global__ void __launch_bounds__(kPhiloxThreads) philox_v1_word(PhiloxArguments a) {
  const int64_t i = int64_t{blockIdx.x} * kPhiloxThreads + threadIdx.x;
  if (i >= int64_t{a.num_rows} * a.vocab_size) return;
  const int64_t row = i / a.vocab_size;
  const int id = static_cast<int>(i % a.vocab_size);
  const uint4 block = philox_block(static_cast<uint64_t>(a.seeds[row]),
                                   static_cast<uint32_t>(a.output_positions[row]), static_cast<uint32_t>(id) / 4);
  a.out[row * a.out_stride + id] = static_cast<int32_t>(word_of(block, id % 4));
}

// Grid (parts of a row, R). Every row must start at a multiple of 16 bytes.
__global__ void __launch_bounds__(kPhiloxThreads) philox_v2_block(PhiloxArguments a) {
  const int64_t row = blockIdx.y;
  const int index = static_cast<int>(blockIdx.x * kPhiloxThreads + threadIdx.x), id = 4 * index;
  if (id >= a.vocab_size) return;
  const uint4 block = philox_block(static_cast<uint64_t>(a.seeds[row]),
                                   static_cast<uint32_t>(a.output_positions[row]), static_cast<uint32_t>(index));
  int32_t* out = a.out + row * a.out_stride + id;
  if (id + 4 <= a.vocab_size) {
    *reinterpret_cast<uint4*>(out) = block;
    return;
  }
  for (int i = 0; id + i < a.vocab_size; ++i) out[i] = static_cast<int32_t>(word_of(block, i));
}

}  // namespace twinfer::device
