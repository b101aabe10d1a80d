// Causal attention of ragged chunks over the paged cache: the newest tokens of each sequence, all at once.
//
// Rows query_start_loc[s] to query_start_loc[s + 1] are the last tokens of sequence s, whose K and V, and those of all
// tokens before them, are in the cache. A row at position p sees the positions 0 to p, with a window only the newest
// `window` of these. A chunk may be a whole prompt, a part of one behind cached blocks, or one decoded token. Query
// head h reads KV head h / (H / Hkv).
//
// Shapes: T query tokens of S sequences, H query heads, Hkv KV heads, D head dim, B block size.
//
// rung                 block of threads          shared memory       why it is faster than the one before
// v1_naive             128 (token, head) pairs,  none                -
//                      a thread each
// v2_tiled             16 (token, head) pairs    about 48 D          K and V are read from the cache once for 16 queries,
//                      of one KV head, 32        sizeof(T) + 2 KiB   by 128-bit loads, and then from shared memory
//                      positions at a time
// v3_tensor_cores      64 such pairs, 16 a       64 (2 D + 40) B     float16 and bfloat16: the products happen in the
//                      warp                                          tensor cores; the weights stay in registers, and K
//                                                                    and V are read from shared memory once for 16
//                                                                    pairs, not once for each 4
//
// A pair is a token and one of the G heads that share a KV head: a chunk of few tokens still fills a tile when G is
// large, and all of a tile read the same K and V. D = 64 and D = 128 are compiled apart with 128-bit loads (rows must
// then start at multiples of 16 bytes); any other D up to 256 takes one path number by number.
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/paged_cache.cuh"
#include "kernels/reduce.cuh"
#include "kernels/tensor_core.cuh"

namespace twinfer::device {

constexpr int kPrefillThreads = 128;
constexpr int kPrefillBlocks = 4;                     // on one multiprocessor at least: at most 128 registers a thread

// The sequence that a query row belongs to: the last that starts at or before it. One without rows starts where the
// next does, so it is never the last.
template <class T>
__device__ __forceinline__ int sequence_of(const PrefillAttentionArguments<T>& a, int row) {
  int first = 0, last = a.num_seqs - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (a.query_start_loc[middle] <= row) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

// What the query at `position` sees.
template <class T>
__device__ __forceinline__ Span causal_span(const PrefillAttentionArguments<T>& a, int position) {
  return {a.window > 0 ? max(0, position + 1 - a.window) : 0, position + 1};
}

// Online softmax as in paged_attention_v1_naive. `kMaxDim` bounds D; the accumulator lives in the thread's local memory.
template <class T, int kMaxDim>
__global__ void __launch_bounds__(kPrefillThreads) prefill_attention_v1_naive(PrefillAttentionArguments<T> a) {
  const int64_t pair = int64_t{blockIdx.x} * kPrefillThreads + threadIdx.x;
  if (pair >= int64_t{a.num_tokens} * a.num_heads) return;
  const int row = static_cast<int>(pair / a.num_heads), head = static_cast<int>(pair % a.num_heads);
  const int seq = sequence_of(a, row), kv_head = head / (a.num_heads / a.num_kv_heads);
  const T* query = a.query + row * a.query_stride + int64_t{head} * a.head_dim;
  float weighted[kMaxDim];
  for (int d = 0; d < a.head_dim; ++d) weighted[d] = 0.0f;
  float largest = Max::kIdentity, sum = 0.0f;
  const Span span = causal_span(a, a.seq_lens[seq] - (a.query_start_loc[seq + 1] - row));
  for (int position = span.begin; position < span.end; ++position) {
    const int64_t offset = cache_offset(a, seq, kv_head, position);
    float logit = 0.0f;
    for (int d = 0; d < a.head_dim; ++d) logit += to_float(query[d]) * to_float(a.k_cache[offset + d]);
    logit *= a.scale;
    const float before = largest;
    largest = fmaxf(largest, logit);
    const float shrink = expf(before - largest), weight = expf(logit - largest);
    sum = sum * shrink + weight;
    for (int d = 0; d < a.head_dim; ++d) {
      weighted[d] = weighted[d] * shrink + weight * to_float(a.v_cache[offset + d]);
    }
    WATCH("largest", largest);
    WATCH("sum", sum);
  }
  T* out = a.out + row * a.out_stride + int64_t{head} * a.head_dim;
  for (int d = 0; d < a.head_dim; ++d) out[d] = from_float<T>(weighted[d] / sum);
}

// ---- v2: K and V in shared-memory tiles -------------------------------------------------------------------------

constexpr int kTilePairs = 16;
constexpr int kTileKeys = 32;                         // a lane has one key
constexpr int kWarpPairs = kTilePairs / (kPrefillThreads / kWarpSize);

// The pairs of one block of threads: some of those of a sequence and a KV head.
template <class T>
struct PairTile {
  int seq, kv_head, group, first_row, first_position, first, count;

  // Grid (tiles, Hkv, S). `count` is 0 or less where a shorter sequence has no such tile.
  __device__ __forceinline__ PairTile(const PrefillAttentionArguments<T>& a, int tile_pairs)
      : seq(static_cast<int>(blockIdx.z)),
        kv_head(static_cast<int>(blockIdx.y)),
        group(a.num_heads / a.num_kv_heads),
        first_row(a.query_start_loc[seq]),
        first_position(0),
        first(static_cast<int>(blockIdx.x) * tile_pairs),
        count(0) {
    const int rows = a.query_start_loc[seq + 1] - first_row;
    first_position = a.seq_lens[seq] - rows;
    count = min(tile_pairs, rows * group - first);
  }
  __device__ __forceinline__ int row(int pair) const { return first_row + (first + pair) / group; }
  __device__ __forceinline__ int position(int pair) const { return first_position + (first + pair) / group; }
  __device__ __forceinline__ int head(int pair) const { return kv_head * group + (first + pair) % group; }
  // Positions that any pair of the tile sees.
  __device__ __forceinline__ Span span(const PrefillAttentionArguments<T>& a) const {
    return {causal_span(a, position(0)).begin, position(count - 1) + 1};
  }
};

// Rows of D numbers in shared memory. They lie one vector further apart than they are long (an odd distance where they
// are read number by number), so that lanes that read the same d of different rows meet in no bank.
template <class T, int kHeadDim>
struct TileRows {
  static constexpr bool kVectors = kHeadDim > 0;
  static constexpr int kStep = kVectors ? kVector<T> : 1;
  static constexpr int kElements = (kVectors ? kHeadDim : kLargestHeadDim) / kWarpSize;   // that a lane has of a row

  static __host__ __device__ __forceinline__ int stride(int head_dim) {
    return kVectors ? kHeadDim + kVector<T> : head_dim | 1;
  }
  static __device__ __forceinline__ int length(int head_dim) { return kVectors ? kHeadDim : head_dim; }

  static __device__ __forceinline__ void copy(T* to, const T* from) {
    if constexpr (kVectors) {
      copy_vector(to, from);
    } else {
      *to = *from;
    }
  }
  static __device__ __forceinline__ void clear(T* to) {
    if constexpr (kVectors) {
      clear_vector(to);
    } else {
      *to = from_float<T>(0.0f);
    }
  }
  static __device__ __forceinline__ void load(const T* from, float (&x)[kStep]) {
    if constexpr (kVectors) {
      load_vector(from, x);
    } else {
      x[0] = to_float(*from);
    }
  }
};

template <class T, int kHeadDim>
__device__ __forceinline__ void load_queries(const PrefillAttentionArguments<T>& a, const PairTile<T>& tile, T* rows) {
  using Rows = TileRows<T, kHeadDim>;
  const int length = Rows::length(a.head_dim), steps = length / Rows::kStep, stride = Rows::stride(a.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < kTilePairs * steps; i += kPrefillThreads) {
    const int pair = i / steps, d = i % steps * Rows::kStep;
    // A pair past the last repeats it: the same arithmetic for all, and no read out of bounds.
    const int real = min(pair, tile.count - 1);
    Rows::copy(rows + pair * stride + d,
               a.query + tile.row(real) * a.query_stride + int64_t{tile.head(real)} * a.head_dim + d);
  }
}

// K or V of the positions from `begin` on. Past the last visible one there is nothing to read: zeros, as weight 0 would
// not silence a NaN that lies there.
template <class T, int kHeadDim>
__device__ __forceinline__ void load_positions(const PrefillAttentionArguments<T>& a, const PairTile<T>& tile,
                                               const T* cache, int begin, int end, T* rows) {
  using Rows = TileRows<T, kHeadDim>;
  const int length = Rows::length(a.head_dim), steps = length / Rows::kStep, stride = Rows::stride(a.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * steps; i += kPrefillThreads) {
    const int key = i / steps, d = i % steps * Rows::kStep;
    T* to = rows + key * stride + d;
    if (begin + key < end) {
      Rows::copy(to, cache + cache_offset(a, tile.seq, tile.kv_head, begin + key) + d);
    } else {
      Rows::clear(to);
    }
  }
}

// The online softmax of a warp's pairs: every lane has the same.
struct PairState {
  float largest[kWarpPairs], sum[kWarpPairs], shrink[kWarpPairs];
};

// Logits of the warp's pairs and 32 keys, one a lane; leaves their exp(logit - largest) in `weights`.
template <class T, int kHeadDim>
__device__ __forceinline__ void tile_weights(const PrefillAttentionArguments<T>& a, const PairTile<T>& tile, int begin,
                                             const T* queries, const T* keys, PairState& state,
                                             float (*weights)[kTileKeys]) {
  using Rows = TileRows<T, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, stride = Rows::stride(a.head_dim);
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kWarpPairs;
  float logit[kWarpPairs] = {};
  for (int d = 0; d < Rows::length(a.head_dim); d += Rows::kStep) {
    float key[Rows::kStep], query[Rows::kStep];
    Rows::load(keys + lane * stride + d, key);
#pragma unroll
    for (int p = 0; p < kWarpPairs; ++p) {
      Rows::load(queries + (first + p) * stride + d, query);
#pragma unroll
      for (int i = 0; i < Rows::kStep; ++i) logit[p] += query[i] * key[i];
    }
  }
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
    const Span span = causal_span(a, tile.position(first + p));
    const bool seen = begin + lane >= span.begin && begin + lane < span.end;
    const float x = seen ? logit[p] * a.scale : Max::kIdentity, before = state.largest[p];
    state.largest[p] = fmaxf(before, warp_reduce<Max>(x));
    const float weight = seen ? expf(x - state.largest[p]) : 0.0f;
    state.shrink[p] = expf(before - state.largest[p]);
    state.sum[p] = state.sum[p] * state.shrink[p] + warp_reduce<Sum>(weight);
    weights[first + p][lane] = weight;
    WATCH("largest", state.largest[p]);
    WATCH("sum", state.sum[p]);
  }
}

// weighted[p][i] = what it was, scaled down to the new largest logit, + sum over the keys of weight * V.
template <class T, int kHeadDim>
__device__ __forceinline__ void add_values(int head_dim, const T* values, const float (*weights)[kTileKeys],
                                           const PairState& state,
                                           float (&weighted)[kWarpPairs][TileRows<T, kHeadDim>::kElements]) {
  using Rows = TileRows<T, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, stride = Rows::stride(head_dim);
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kWarpPairs;
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
#pragma unroll
    for (int i = 0; i < Rows::kElements; ++i) weighted[p][i] *= state.shrink[p];
  }
  for (int key = 0; key < kTileKeys; ++key) {
#pragma unroll
    for (int i = 0; i < Rows::kElements; ++i) {
      const int d = lane + kWarpSize * i;
      const float value = d < Rows::length(head_dim) ? to_float(values[key * stride + d]) : 0.0f;
#pragma unroll
      for (int p = 0; p < kWarpPairs; ++p) weighted[p][i] += weights[first + p][key] * value;
    }
  }
}

// Grid (tiles of the longest chunk, Hkv, S); dynamic shared memory: kTilePairs + kTileKeys rows.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillBlocks)
    prefill_attention_v2_tiled(PrefillAttentionArguments<T> a) {
  using Rows = TileRows<T, kHeadDim>;
  DYNAMIC_SHARED(T, queries);                         // [kTilePairs] rows, then [kTileKeys] rows of K or V
  SHARED_ARRAY(float, weights, [kTilePairs][kTileKeys]);
  const PairTile<T> tile(a, kTilePairs);
  if (tile.count <= 0) return;                        // the whole block: a longer chunk has this tile
  T* const rows = queries + kTilePairs * Rows::stride(a.head_dim);
  load_queries<T, kHeadDim>(a, tile, queries);
  PairState state;
  float weighted[kWarpPairs][Rows::kElements] = {};
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
    state.largest[p] = Max::kIdentity;
    state.sum[p] = 0.0f;
  }
  const Span span = tile.span(a);
  for (int begin = span.begin; begin < span.end; begin += kTileKeys) {
    load_positions<T, kHeadDim>(a, tile, a.k_cache, begin, span.end, rows);
    __syncthreads();
    tile_weights<T, kHeadDim>(a, tile, begin, queries, rows, state, weights);
    __syncthreads();                                  // nobody needs K any more; weights are there for all lanes
    load_positions<T, kHeadDim>(a, tile, a.v_cache, begin, span.end, rows);
    __syncthreads();
    add_values<T, kHeadDim>(a.head_dim, rows, weights, state, weighted);
    __syncthreads();
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
    const int pair = static_cast<int>(threadIdx.x) / kWarpSize * kWarpPairs + p;
    if (pair >= tile.count) continue;
    T* out = a.out + tile.row(pair) * a.out_stride + int64_t{tile.head(pair)} * a.head_dim;
#pragma unroll
    for (int i = 0; i < Rows::kElements; ++i) {
      const int d = lane + kWarpSize * i;
      if (d < Rows::length(a.head_dim)) out[d] = from_float<T>(weighted[p][i] / state.sum[p]);
    }
  }
}

// ---- v3: the tensor cores ---------------------------------------------------------------------------------------

constexpr int kMmaPairs = kPrefillThreads / kWarpSize * kMmaRows;

// K and V of 32 positions. Lanes read 16 bytes of 8 rows of K at once, and of every second row of V: the distances
// between rows are such that eight lanes meet in no bank.
template <class T, int kHeadDim>
struct MmaTiles {
  alignas(16) T keys[kTileKeys][kHeadDim + 32];
  alignas(16) T values[kTileKeys][kHeadDim + 8];
};

template <class T, int kHeadDim>
__device__ __forceinline__ void load_tiles(const PrefillAttentionArguments<T>& a, const PairTile<T>& tile, int begin,
                                           int end, MmaTiles<T, kHeadDim>& tiles) {
  constexpr int kSteps = kHeadDim / kVector<T>;
  for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * kSteps; i += kPrefillThreads) {
    const int key = i / kSteps, d = i % kSteps * kVector<T>;
    if (begin + key < end) {
      const int64_t offset = cache_offset(a, tile.seq, tile.kv_head, begin + key) + d;
      copy_vector(&tiles.keys[key][d], a.k_cache + offset);
      copy_vector(&tiles.values[key][d], a.v_cache + offset);
    } else {
      clear_vector(&tiles.keys[key][d]);
      clear_vector(&tiles.values[key][d]);
    }
  }
}

// The warp's 16 pairs and the 32 positions from `begin` on.
template <class T, int kHeadDim>
__device__ __forceinline__ void mma_tile(const PrefillAttentionArguments<T>& a, const Span (&seen)[2], int begin,
                                         const MmaTiles<T, kHeadDim>& tiles, MmaAttention<T, kHeadDim>& mma) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, row = lane / 4, column = lane % 4 * 2;
  float logits[kTileKeys / 8][4] = {};
#pragma unroll
  for (int t = 0; t < kTileKeys / 8; ++t) {
    mma.multiply_keys(tiles.keys[8 * t + row], logits[t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = begin + 8 * t + column + i % 2;
      const bool sees = position >= seen[i / 2].begin && position < seen[i / 2].end;
      logits[t][i] = sees ? logits[t][i] * a.scale : Max::kIdentity;
    }
  }
  mma.weigh(logits);
#pragma unroll
  for (int half = 0; half < kTileKeys / 16; ++half) {
    const auto* values = &tiles.values[16 * half + column];
    mma.add_values(logits[2 * half], logits[2 * half + 1], {values[0], values[1], values[8], values[9]});
  }
}

// Grid (tiles of the longest chunk, Hkv, S). T is __half or __nv_bfloat16.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kPrefillThreads, 2) prefill_attention_v3_tensor_cores(PrefillAttentionArguments<T> a) {
  using Tiles = MmaTiles<T, kHeadDim>;
  SHARED_ARRAY(Tiles, tiles, [1]);
  const PairTile<T> tile(a, kMmaPairs);
  if (tile.count <= 0) return;                        // the whole block: a longer chunk has this tile
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kMmaRows;
  const T* rows[2] = {nullptr, nullptr};
  Span seen[2] = {{0, 0}, {0, 0}};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int pair = first + lane / 4 + 8 * r;
    if (pair >= tile.count) continue;
    rows[r] = a.query + tile.row(pair) * a.query_stride + int64_t{tile.head(pair)} * a.head_dim;
    seen[r] = causal_span(a, tile.position(pair));
  }
  MmaAttention<T, kHeadDim> mma;
  mma.begin(rows);
  const Span span = tile.span(a);
  // Later positions are the business of the warps that follow, and of none where there are no pairs.
  const int last = first < tile.count ? tile.position(min(first + kMmaRows, tile.count) - 1) : -1;
  for (int begin = span.begin; begin < span.end; begin += kTileKeys) {
    load_tiles(a, tile, begin, span.end, tiles[0]);
    __syncthreads();
    if (begin <= last) mma_tile(a, seen, begin, tiles[0], mma);
    __syncthreads();
  }
  mma.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int pair = first + lane / 4 + 8 * r;
    if (pair >= tile.count) continue;
    T* out = a.out + tile.row(pair) * a.out_stride + int64_t{tile.head(pair)} * a.head_dim;
    mma.store_row(r, out);
  }
}

}  // namespace twinfer::device
