// Attention of one new token a sequence over the paged cache: the decode step. Kwon et al., SOSP 2023.
//
// Position p of a sequence lies in block block_tables[s][p / B] at offset p % B. With a window only the newest `window`
// positions are seen, the others' blocks are not read. Query head h reads KV head h / (H / Hkv).
//
// Shapes: S sequences, H query heads, Hkv KV heads, D head dim, B block size, P splits; G = H / Hkv.
//
// rung                 block of threads          shared memory       why it is faster than the one before
// v1_naive             128 (sequence, head)      none                -
//                      pairs, a thread each
// v2_shared_reduce     one (sequence, head)      4 (n + 384) B       128 threads for one head where there was one; V is
//                                                for n positions     read by neighbouring lanes at neighbouring places
// v3_vectorised        one (sequence, head)      4 (n + 4 D) B       K and V come by 128-bit loads, D / 4 (float32) or
//                                                                    D / 8 lanes a position; sums by shuffles
// v4_split_kv          256 positions of one      4 (256 + 4 D) B     a long context is spread over the whole GPU, and
//                      (sequence, head)                              shared memory no longer grows with it; a second
//                                                                    kernel joins the splits
// v5_grouped           256 positions of one      16 (256 + 4 D) B    K and V are loaded once for 4 query heads of the
//                      sequence and 4 of the G                       group and not 4 times
//                      heads of a KV head
// v6_tensor_cores      256 positions of one      256 (D + 10) B      float16 and bfloat16: sums over D and over positions
//                      sequence and 16 of the G                      happen inside the tensor cores, and not by a shuffle
//                      heads of a KV head                            for every power of two; one load for 16 heads
//
// D = 64 and D = 128 are compiled apart with 128-bit loads (rows must then start at multiples of 16 bytes); any other D
// up to 256 takes one path in which a warp reads a position number by number.
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/paged_cache.cuh"
#include "kernels/reduce.cuh"
#include "kernels/tensor_core.cuh"

namespace twinfer::device {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionBlocks = 6;                   // on one multiprocessor at least: at most 80 registers a thread
constexpr int kAttentionWarps = kAttentionThreads / kWarpSize;
constexpr int kSplitTokens = 256;
constexpr int kGroupedHeads = 4;

template <class T>
__device__ __forceinline__ Span visible_span(const PagedAttentionArguments<T>& a, int seq) {
  const int end = a.seq_lens[seq];
  return {a.window > 0 ? max(0, end - a.window) : 0, end};
}

// ---- v1: one thread does everything for one head ----------------------------------------------------------------

// Online softmax (Milakov and Gimelshein, 2018): when a larger logit comes, what has been summed is scaled down.
// `kMaxDim` bounds D; the accumulator is too large for registers and lives in the thread's local memory.
template <class T, int kMaxDim>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention_v1_naive(PagedAttentionArguments<T> a) {
  const int pair = static_cast<int>(blockIdx.x * kAttentionThreads + threadIdx.x);
  if (pair >= a.num_seqs * a.num_heads) return;
  const int seq = pair / a.num_heads, head = pair % a.num_heads;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const T* query = a.query + seq * a.query_stride + int64_t{head} * a.head_dim;
  float weighted[kMaxDim];
  for (int d = 0; d < a.head_dim; ++d) weighted[d] = 0.0f;
  float largest = Max::kIdentity, sum = 0.0f;
  const Span span = visible_span(a, seq);
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
  T* out = a.out + seq * a.out_stride + int64_t{head} * a.head_dim;
  for (int d = 0; d < a.head_dim; ++d) out[d] = from_float<T>(sum > 0.0f ? weighted[d] / sum : 0.0f);
}

// ---- v2: a block of threads for one head, logits in shared memory -----------------------------------------------

// Grid (H, S). A thread takes whole positions for the logits, then whole dimensions for the sum over V.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention_v2_shared_reduce(PagedAttentionArguments<T> a) {
  DYNAMIC_SHARED(float, logits);                      // [n]
  SHARED_ARRAY(float, query, [kLargestHeadDim]);      // [D], scaled
  SHARED_ARRAY(float, scratch, [kAttentionThreads]);
  const int head = static_cast<int>(blockIdx.x), seq = static_cast<int>(blockIdx.y);
  const int tid = static_cast<int>(threadIdx.x), kv_head = head / (a.num_heads / a.num_kv_heads);
  const Span span = visible_span(a, seq);
  for (int d = tid; d < a.head_dim; d += kAttentionThreads) {
    query[d] = to_float(a.query[seq * a.query_stride + int64_t{head} * a.head_dim + d]) * a.scale;
  }
  __syncthreads();
  float largest = Max::kIdentity;
  for (int i = tid; i < span.size(); i += kAttentionThreads) {
    const T* key = a.k_cache + cache_offset(a, seq, kv_head, span.begin + i);
    float logit = 0.0f;
    for (int d = 0; d < a.head_dim; ++d) logit += query[d] * to_float(key[d]);
    logits[i] = logit;
    largest = fmaxf(largest, logit);
  }
  largest = block_reduce_tree<Max, kAttentionThreads>(largest, scratch);
  float sum = 0.0f;
  for (int i = tid; i < span.size(); i += kAttentionThreads) {
    logits[i] = expf(logits[i] - largest);
    sum += logits[i];
  }
  sum = block_reduce_tree<Sum, kAttentionThreads>(sum, scratch);   // its barriers also publish the weights
  WATCH("largest", largest);
  WATCH("sum", sum);
  T* out = a.out + seq * a.out_stride + int64_t{head} * a.head_dim;
  for (int d = tid; d < a.head_dim; d += kAttentionThreads) {
    float weighted = 0.0f;
    for (int i = 0; i < span.size(); ++i) {
      weighted += logits[i] * to_float(a.v_cache[cache_offset(a, seq, kv_head, span.begin + i) + d]);
    }
    out[d] = from_float<T>(sum > 0.0f ? weighted / sum : 0.0f);
  }
}

// ---- v3 to v5: one body, for one or several heads over all or some positions ------------------------------------

// How the lanes of a warp share the D numbers of a position: each holds kElements, and kLanes together hold all.
template <class T, int kHeadDim>
struct HeadSlice {
  static constexpr int kElements = kVector<T>;
  static constexpr int kLanes = kHeadDim / kElements;
  static_assert(kLanes <= kWarpSize && kWarpSize % kLanes == 0, "positions must not cross warps");

  static __device__ __forceinline__ int dimension(int lane, int i) { return lane * kElements + i; }
  static __device__ __forceinline__ void load(const T* head, int lane, int, float (&x)[kElements]) {
    load_vector(head + lane * kElements, x);
  }
};

// Any D up to 256: a warp a position, number by number.
template <class T>
struct HeadSlice<T, 0> {
  static constexpr int kElements = kLargestHeadDim / kWarpSize;
  static constexpr int kLanes = kWarpSize;

  static __device__ __forceinline__ int dimension(int lane, int i) { return lane + kWarpSize * i; }
  static __device__ __forceinline__ void load(const T* head, int lane, int head_dim, float (&x)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int d = dimension(lane, i);
      x[i] = d < head_dim ? to_float(head[d]) : 0.0f;
    }
  }
};

// Shared memory of attend; `logits` is [kHeads][capacity] of the block's dynamic shared memory.
template <int kHeadDim, int kHeads>
struct AttendScratch {
  float reduce[kAttentionWarps];
  float weighted[kHeads][kAttentionWarps][kHeadDim > 0 ? kHeadDim : kLargestHeadDim];
};

template <int kHeads>
struct SoftmaxState {
  float largest[kHeads], sum[kHeads];
};

// logits[h][i] = scale * query_h . key of position span.begin + i. Returns each thread's largest in `largest`.
template <class T, int kHeadDim, int kHeads>
__device__ __forceinline__ void attend_logits(const PagedAttentionArguments<T>& a, int seq, int first_head, int heads,
                                              Span span, float* logits, int capacity, float (&largest)[kHeads]) {
  using Slice = HeadSlice<T, kHeadDim>;
  constexpr int kGroups = kAttentionThreads / Slice::kLanes;       // positions under way at once
  const int tid = static_cast<int>(threadIdx.x), lane = tid % Slice::kLanes, group = tid / Slice::kLanes;
  const int kv_head = first_head / (a.num_heads / a.num_kv_heads);
  float query[kHeads][Slice::kElements];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // A head past the last of its group repeats the last: the same arithmetic for all, and no read out of bounds.
    const int head = first_head + min(h, heads - 1);
    Slice::load(a.query + seq * a.query_stride + int64_t{head} * a.head_dim, lane, a.head_dim, query[h]);
    largest[h] = Max::kIdentity;
  }
  // All groups go round equally often, past the end too: the shuffles below want every lane of the warp.
  for (int first = 0; first < span.size(); first += kGroups) {
    const int i = first + group;
    float key[Slice::kElements], logit[kHeads] = {};
    if (i < span.size()) {
      Slice::load(a.k_cache + cache_offset(a, seq, kv_head, span.begin + i), lane, a.head_dim, key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int j = 0; j < Slice::kElements; ++j) logit[h] += query[h][j] * key[j];
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float total = warp_reduce<Sum, Slice::kLanes>(logit[h]) * a.scale;
      if (i >= span.size()) continue;
      if (lane == 0) logits[h * capacity + i] = total;
      largest[h] = fmaxf(largest[h], total);
    }
  }
}

// Turns logits into exp(logit - largest) in place.
template <int kHeads>
__device__ __forceinline__ SoftmaxState<kHeads> attend_weights(int size, float* logits, int capacity,
                                                               const float (&largest)[kHeads], float* scratch) {
  SoftmaxState<kHeads> state;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    state.largest[h] = block_reduce_shuffle<Max, kAttentionThreads>(largest[h], scratch);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kAttentionThreads) {
      const float weight = expf(logits[h * capacity + i] - state.largest[h]);
      logits[h * capacity + i] = weight;
      sum += weight;
    }
    state.sum[h] = block_reduce_shuffle<Sum, kAttentionThreads>(sum, scratch);   // also publishes the weights
    WATCH("largest", state.largest[h]);
    WATCH("sum", state.sum[h]);
  }
  return state;
}

// weighted[h][warp][d] = sum over the warp's positions of weight * V. Ends with a barrier.
template <class T, int kHeadDim, int kHeads>
__device__ __forceinline__ void attend_values(const PagedAttentionArguments<T>& a, int seq, int kv_head, Span span,
                                              const float* logits, int capacity,
                                              AttendScratch<kHeadDim, kHeads>& scratch) {
  using Slice = HeadSlice<T, kHeadDim>;
  constexpr int kGroups = kAttentionThreads / Slice::kLanes;
  const int tid = static_cast<int>(threadIdx.x), lane = tid % Slice::kLanes, group = tid / Slice::kLanes;
  float weighted[kHeads][Slice::kElements] = {};
  for (int i = group; i < span.size(); i += kGroups) {
    float value[Slice::kElements];
    Slice::load(a.v_cache + cache_offset(a, seq, kv_head, span.begin + i), lane, a.head_dim, value);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float weight = logits[h * capacity + i];
#pragma unroll
      for (int j = 0; j < Slice::kElements; ++j) weighted[h][j] += weight * value[j];
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < Slice::kElements; ++j) {
      // Lanes that hold the same dimensions stand kLanes apart.
#pragma unroll
      for (int distance = Slice::kLanes; distance < kWarpSize; distance *= 2) {
        weighted[h][j] += __shfl_xor_sync(kAllLanes, weighted[h][j], distance);
      }
      const int d = Slice::dimension(lane, j);
      if (tid % kWarpSize < Slice::kLanes && d < a.head_dim) scratch.weighted[h][tid / kWarpSize][d] = weighted[h][j];
    }
  }
  __syncthreads();
}

template <int kHeadDim, int kHeads>
__device__ __forceinline__ float sum_over_warps(const AttendScratch<kHeadDim, kHeads>& scratch, int h, int d) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kAttentionWarps; ++warp) total += scratch.weighted[h][warp][d];
  return total;
}

// Grid (H, S); dynamic shared memory: a float for each position that any query sees.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    paged_attention_v3_vectorised(PagedAttentionArguments<T> a) {
  using Scratch = AttendScratch<kHeadDim, 1>;
  DYNAMIC_SHARED(float, logits);                      // [n]
  SHARED_ARRAY(Scratch, scratch, [1]);
  const int head = static_cast<int>(blockIdx.x), seq = static_cast<int>(blockIdx.y);
  const Span span = visible_span(a, seq);
  float largest[1];
  attend_logits<T, kHeadDim, 1>(a, seq, head, 1, span, logits, 0, largest);
  const SoftmaxState<1> state = attend_weights<1>(span.size(), logits, 0, largest, scratch[0].reduce);
  attend_values<T, kHeadDim, 1>(a, seq, head / (a.num_heads / a.num_kv_heads), span, logits, 0, scratch[0]);
  T* out = a.out + seq * a.out_stride + int64_t{head} * a.head_dim;
  for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kAttentionThreads) {
    out[d] = from_float<T>(state.sum[0] > 0.0f ? sum_over_warps(scratch[0], 0, d) / state.sum[0] : 0.0f);
  }
}

// One split of `heads` heads that share a KV head: its own softmax, to be joined by paged_attention_join.
template <class T, int kHeadDim, int kHeads>
__device__ __forceinline__ void attend_split(const PagedAttentionArguments<T>& a, int seq, int first_head, int heads,
                                             int split) {
  using Scratch = AttendScratch<kHeadDim, kHeads>;
  SHARED_ARRAY(float, logits, [kHeads * kSplitTokens]);
  SHARED_ARRAY(Scratch, scratch, [1]);
  Span span = visible_span(a, seq);
  span.begin += split * kSplitTokens;
  span.end = min(span.end, span.begin + kSplitTokens);
  if (span.size() <= 0) return;                       // the whole block: a longer sequence has this split
  float largest[kHeads];
  attend_logits<T, kHeadDim, kHeads>(a, seq, first_head, heads, span, logits, kSplitTokens, largest);
  const SoftmaxState<kHeads> state =
      attend_weights<kHeads>(span.size(), logits, kSplitTokens, largest, scratch[0].reduce);
  const int kv_head = first_head / (a.num_heads / a.num_kv_heads);
  attend_values<T, kHeadDim, kHeads>(a, seq, kv_head, span, logits, kSplitTokens, scratch[0]);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) continue;
    const int64_t row = (int64_t{seq} * a.num_heads + first_head + h) * a.num_splits + split;
    for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kAttentionThreads) {
      a.split_out[row * a.head_dim + d] = sum_over_warps(scratch[0], h, d) / state.sum[h];
    }
    if (threadIdx.x == 0) {
      a.split_max[row] = state.largest[h];
      a.split_sum[row] = state.sum[h];
    }
  }
}

// Grid (H, S, P).
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    paged_attention_v4_split_kv(PagedAttentionArguments<T> a) {
  attend_split<T, kHeadDim, 1>(a, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x), 1,
                               static_cast<int>(blockIdx.z));
}

// Grid (Hkv * ceil(G / 4), S, P).
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    paged_attention_v5_grouped(PagedAttentionArguments<T> a) {
  const int group = a.num_heads / a.num_kv_heads;     // G
  const int parts = (group + kGroupedHeads - 1) / kGroupedHeads;
  const int kv_head = static_cast<int>(blockIdx.x) / parts;
  const int first = static_cast<int>(blockIdx.x) % parts * kGroupedHeads;
  attend_split<T, kHeadDim, kGroupedHeads>(a, static_cast<int>(blockIdx.y), kv_head * group + first,
                                           min(kGroupedHeads, group - first), static_cast<int>(blockIdx.z));
}

// ---- v6: the tensor cores ---------------------------------------------------------------------------------------

constexpr int kMmaKeys = 16;                          // that a warp takes at once

// What the warps bring together. Rows lie 8 floats further apart than they are long, so that the pairs of floats which
// 16 lanes write at once fall into 32 banks.
template <int kHeadDim>
struct MmaScratch {
  float largest[kAttentionWarps][kMmaRows], sum[kAttentionWarps][kMmaRows];
  float2 weighted[kAttentionWarps][kMmaRows][kHeadDim / 2 + 4];   // in the order of the products' columns
};

// One warp's share of a split: every fourth 16 positions.
template <class T, int kHeadDim>
__device__ __forceinline__ void mma_attend(const PagedAttentionArguments<T>& a, int seq, int kv_head, int first_head,
                                           int heads, Span span, MmaScratch<kHeadDim>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int row = lane / 4, column = lane % 4 * 2;
  const T* query = a.query + seq * a.query_stride + int64_t{first_head} * a.head_dim;
  MmaAttention<T, kHeadDim> mma;
  mma.begin({row < heads ? query + int64_t{row} * a.head_dim : nullptr,
             row + 8 < heads ? query + int64_t{row + 8} * a.head_dim : nullptr});
  const auto at = [&](const T* cache, int position) {
    return position < span.end ? cache + cache_offset(a, seq, kv_head, position) : nullptr;
  };
  for (int begin = span.begin + warp * kMmaKeys; begin < span.end; begin += kAttentionWarps * kMmaKeys) {
    float logits[2][4] = {};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      mma.multiply_keys(at(a.k_cache, begin + 8 * t + row), logits[t]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = begin + 8 * t + column + i % 2 < span.end;
        logits[t][i] = seen ? logits[t][i] * a.scale : Max::kIdentity;
      }
    }
    mma.weigh(logits);
    mma.add_values(logits[0], logits[1], {at(a.v_cache, begin + column), at(a.v_cache, begin + column + 1),
                                          at(a.v_cache, begin + column + 8), at(a.v_cache, begin + column + 9)});
  }
  mma.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (column == 0) {                                // the four lanes of a row have the same
      scratch.largest[warp][row + 8 * r] = mma.largest[r];
      scratch.sum[warp][row + 8 * r] = mma.sum[r];
    }
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 8; ++tile) {
      scratch.weighted[warp][row + 8 * r][4 * tile + column / 2] =
          make_float2(mma.weighted[tile][2 * r], mma.weighted[tile][2 * r + 1]);
    }
  }
  __syncthreads();
}

// Grid (Hkv * ceil(G / 16), S, P). T is __half or __nv_bfloat16.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, 3) paged_attention_v6_tensor_cores(PagedAttentionArguments<T> a) {
  using Scratch = MmaScratch<kHeadDim>;
  SHARED_ARRAY(Scratch, scratch, [1]);
  const int group = a.num_heads / a.num_kv_heads;     // G
  const int parts = (group + kMmaRows - 1) / kMmaRows;
  const int kv_head = static_cast<int>(blockIdx.x) / parts, seq = static_cast<int>(blockIdx.y);
  const int skipped = static_cast<int>(blockIdx.x) % parts * kMmaRows, heads = min(kMmaRows, group - skipped);
  const int first_head = kv_head * group + skipped, split = static_cast<int>(blockIdx.z);
  Span span = visible_span(a, seq);
  span.begin += split * kSplitTokens;
  span.end = min(span.end, span.begin + kSplitTokens);
  if (span.size() <= 0) return;                       // the whole block: a longer sequence has this split
  mma_attend<T, kHeadDim>(a, seq, kv_head, first_head, heads, span, scratch[0]);
  for (int i = static_cast<int>(threadIdx.x); i < heads * kHeadDim; i += kAttentionThreads) {
    const int h = i / kHeadDim, d = i % kHeadDim;
    const int column = (d / 64 * 8 + d % 8) * 8 + d % 64 / 8;         // of all products side by side
    float largest = scratch[0].largest[0][h], sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int warp = 1; warp < kAttentionWarps; ++warp) largest = fmaxf(largest, scratch[0].largest[warp][h]);
#pragma unroll
    for (int warp = 0; warp < kAttentionWarps; ++warp) {
      const float weight = expf(scratch[0].largest[warp][h] - largest);
      const float2 pair = scratch[0].weighted[warp][h][column / 2];
      sum += scratch[0].sum[warp][h] * weight;
      weighted += (column % 2 == 0 ? pair.x : pair.y) * weight;
    }
    const int64_t out = (int64_t{seq} * a.num_heads + first_head + h) * a.num_splits + split;
    a.split_out[out * kHeadDim + d] = weighted / sum;
    if (d == 0) {
      a.split_max[out] = largest;
      a.split_sum[out] = sum;
    }
  }
}

// The second kernel of v4 to v6, grid (H, S): the splits' means, weighed by their sums on one scale.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention_join(PagedAttentionArguments<T> a) {
  const int head = static_cast<int>(blockIdx.x), seq = static_cast<int>(blockIdx.y);
  const int used = (visible_span(a, seq).size() + kSplitTokens - 1) / kSplitTokens;
  const int64_t first = (int64_t{seq} * a.num_heads + head) * a.num_splits;
  float largest = Max::kIdentity;
  for (int p = 0; p < used; ++p) largest = fmaxf(largest, a.split_max[first + p]);
  for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kAttentionThreads) {
    float weighted = 0.0f, sum = 0.0f;
    for (int p = 0; p < used; ++p) {
      const float weight = a.split_sum[first + p] * expf(a.split_max[first + p] - largest);
      weighted += weight * a.split_out[(first + p) * a.head_dim + d];
      sum += weight;
    }
    a.out[seq * a.out_stride + int64_t{head} * a.head_dim + d] = from_float<T>(sum > 0.0f ? weighted / sum : 0.0f);
  }
}

}  // namespace twinfer::device
