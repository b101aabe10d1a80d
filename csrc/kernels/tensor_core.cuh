// Attention's two matrix products on the tensor cores, as both attention kernels use them: 16 query rows of a warp times
// the keys of one KV head, and the weights times the values. float16 or bfloat16 in, float32 out.
//
// mma.sync m16n8k16 wants its operands spread over the lanes in a fixed way: lane l has rows l / 4 and l / 4 + 8 of A,
// column l / 4 of B, and along k the numbers 2c, 2c + 1, 2c + 8 and 2c + 9 with c = l % 4. What k stands for is free as
// long as A and B agree. So a lane takes 8 neighbouring dimensions for two steps of k, which one 128-bit load brings,
// and for the values 8 neighbouring dimensions for the same column of eight products. Nothing has to be transposed.
//
// The result of the first product has rows and columns where the second wants them as A: the weights never leave their
// registers. FlashAttention-2: Dao, 2023.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kMmaRows = 16;                          // of queries; keys come in eights

__device__ __forceinline__ uint32_t pack_pair(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 8 numbers as 4 registers; zeros where there is no row.
template <class T>
__device__ __forceinline__ void load_words(const T* address, uint32_t (&words)[4]) {
  Packed<uint32_t> packed{};
  if (address != nullptr) packed = *reinterpret_cast<const Packed<uint32_t>*>(address);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = packed.values[i];
}

// One warp's 16 query rows: the operand A of the first product, and what has become of them.
template <class T, int kHeadDim>
struct MmaAttention {
  static_assert(kHeadDim % 64 == 0, "eights of dimensions for each of eight columns");
  uint32_t query[kHeadDim / 16][4];
  // The sum of weight * V, not yet divided by `sum`. Column n of product t is dimension 64 (t / 8) + 8 n + t % 8.
  float weighted[kHeadDim / 8][4];
  float largest[2], sum[2];                           // of rows l / 4 and l / 4 + 8; each lane sums its own columns

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  // `rows` are those of this lane, null for none.
  __device__ __forceinline__ void begin(const T* const (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = Max::kIdentity;
      sum[r] = 0.0f;
#pragma unroll
      for (int half = 0; half < kHeadDim / 32; ++half) {
        uint32_t words[4];
        load_words(rows[r] == nullptr ? nullptr : rows[r] + 32 * half + lane() % 4 * 8, words);
        query[2 * half][r] = words[0];
        query[2 * half][r + 2] = words[1];
        query[2 * half + 1][r] = words[2];
        query[2 * half + 1][r + 2] = words[3];
      }
    }
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weighted[tile][i] = 0.0f;
    }
  }

  // logits of 8 keys. `key` is key l / 4, null for none. Entries: row l / 4 of keys 2c and 2c + 1, then row l / 4 + 8.
  __device__ __forceinline__ void multiply_keys(const T* key, float (&logits)[4]) const {
#pragma unroll
    for (int half = 0; half < kHeadDim / 32; ++half) {
      uint32_t words[4];
      load_words(key == nullptr ? nullptr : key + 32 * half + lane() % 4 * 8, words);
      const uint32_t even[2] = {words[0], words[1]}, odd[2] = {words[2], words[3]};
      mma_m16n8k16(T{}, logits, query[2 * half], even, logits);
      mma_m16n8k16(T{}, logits, query[2 * half + 1], odd, logits);
    }
  }

  // Turns logits of 8 kTiles keys into weights and scales down what was summed before. Keys that a row does not see
  // have Max::kIdentity. The four lanes of a row agree on its largest logit by two shuffles.
  template <int kTiles>
  __device__ __forceinline__ void weigh(float (&logits)[kTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = Max::kIdentity;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) most = fmaxf(most, fmaxf(logits[t][2 * r], logits[t][2 * r + 1]));
      most = fmaxf(largest[r], warp_reduce<Max, 4>(most));
      const float shrink = expf(largest[r] - most);
      largest[r] = most;
      sum[r] *= shrink;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          logits[t][i] = logits[t][i] == Max::kIdentity ? 0.0f : expf(logits[t][i] - most);
          sum[r] += logits[t][i];
        }
      }
#pragma unroll
      for (int tile = 0; tile < kHeadDim / 8; ++tile) {
        weighted[tile][2 * r] *= shrink;
        weighted[tile][2 * r + 1] *= shrink;
      }
      WATCH("largest", largest[r]);
      WATCH("sum", sum[r]);
    }
  }

  // Adds the values of 16 keys by their weights, which `weigh` left in two tiles. `values` are keys 2c, 2c + 1, 2c + 8
  // and 2c + 9, null for none: weight 0 would not silence a NaN that lies there.
  __device__ __forceinline__ void add_values(const float (&first)[4], const float (&second)[4],
                                             const T* const (&values)[4]) {
    const uint32_t weights[4] = {pack_pair(T{}, first[0], first[1]), pack_pair(T{}, first[2], first[3]),
                                 pack_pair(T{}, second[0], second[1]), pack_pair(T{}, second[2], second[3])};
#pragma unroll
    for (int group = 0; group < kHeadDim / 64; ++group) {
      uint32_t words[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_words(values[k] == nullptr ? nullptr : values[k] + 64 * group + lane() / 4 * 8, words[k]);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Two keys of one dimension side by side: the lower halves, then the upper ones.
        const uint32_t low[2] = {(words[0][w] & 0xffff) | words[1][w] << 16,
                                 (words[2][w] & 0xffff) | words[3][w] << 16};
        const uint32_t high[2] = {words[0][w] >> 16 | (words[1][w] & 0xffff0000),
                                  words[2][w] >> 16 | (words[3][w] & 0xffff0000)};
        float(&even)[4] = weighted[8 * group + 2 * w], (&odd)[4] = weighted[8 * group + 2 * w + 1];
        mma_m16n8k16(T{}, even, weights, low, even);
        mma_m16n8k16(T{}, odd, weights, high, odd);
      }
    }
  }

  // The sum of all columns, in each of a row's four lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warp_reduce<Sum, 4>(sum[r]);
  }

  // Row l / 4 + 8 r of the result. The same column of eight products is what a lane has of 8 neighbouring dimensions.
  __device__ __forceinline__ void store_row(int r, T* out) const {
#pragma unroll
    for (int group = 0; group < kHeadDim / 64; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float numbers[8];
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) numbers[tile] = weighted[8 * group + tile][2 * r + i] / sum[r];
        store_vector(out + 64 * group + (lane() % 4 * 2 + i) * 8, numbers);
      }
    }
  }
};

}  // namespace twinfer::device
