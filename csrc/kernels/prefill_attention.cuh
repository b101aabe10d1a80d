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
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"
#include "kernels/paged_cache.cuh"
#include "kernels/reduce.cuh"

namespace twinfer::device {

constexpr int kPrefillThreads = 128;

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
  }
  T* out = a.out + row * a.out_stride + int64_t{head} * a.head_dim;
  for (int d = 0; d < a.head_dim; ++d) out[d] = from_float<T>(weighted[d] / sum);
}

}  // namespace twinfer::device
