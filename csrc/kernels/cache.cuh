// The paged cache [N, B, Hkv, D]: tokens in, blocks copied. Nothing is computed; the ladder is about memory alone.
//
// cache_write: token t's K and V go to slot_mapping[t] = block * B + offset; nowhere if that is -1 (a row that only pads).
// copy_blocks: for every pair (from, to) block `to` becomes block `from` (copy-on-write). The pairs of a call are
// copied at the same time: no `to` may stand in two pairs or be the `from` of another.
// swap_blocks: the same from one memory to another, of which one may be pinned memory of the host: its blocks cross the
// bus while the kernel reads or writes them, all pairs in one launch where cudaMemcpyAsync would take a call for each.
//
// rung            work                                     why it is faster than the one before
// v1_element      a thread a number                        -
// v2_vectorised   a thread 16 bytes, a block a token or    a quarter (float32) or an eighth of the instructions, and
//                 a pair                                   the division by the row's length is gone
#pragma once

#include "kernels/arguments.h"
#include "kernels/numeric.cuh"

namespace twinfer::device {

constexpr int kCopyThreads = 128;

template <class T>
__global__ void __launch_bounds__(kCopyThreads) cache_write_v1_element(CacheWriteArguments<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i >= int64_t{a.num_tokens} * a.row_size) return;
  const int64_t token = i / a.row_size, element = i % a.row_size;
  const int64_t slot = a.slot_mapping[token], target = slot * a.row_size + element;
  if (slot < 0) return;
  a.k_cache[target] = a.key[token * a.key_stride + element];
  a.v_cache[target] = a.value[token * a.value_stride + element];
}

// Rows must be multiples of 16 bytes long and apart, and every tensor must start at one.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) cache_write_v2_vectorised(CacheWriteArguments<T> a) {
  const int64_t token = blockIdx.x, slot = a.slot_mapping[token], target = slot * a.row_size;
  if (slot < 0) return;
  const auto* key = reinterpret_cast<const uint4*>(a.key + token * a.key_stride);
  const auto* value = reinterpret_cast<const uint4*>(a.value + token * a.value_stride);
  auto* k = reinterpret_cast<uint4*>(a.k_cache + target);
  auto* v = reinterpret_cast<uint4*>(a.v_cache + target);
  for (int i = static_cast<int>(threadIdx.x); i < a.row_size / kVector<T>; i += kCopyThreads) {
    k[i] = key[i];
    v[i] = value[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kCopyThreads) copy_blocks_v1_element(CopyBlocksArguments<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i >= a.num_pairs * a.block_elements) return;
  const int64_t pair = i / a.block_elements, element = i % a.block_elements;
  const int64_t from = a.pairs[2 * pair] * a.block_elements + element;
  const int64_t to = a.pairs[2 * pair + 1] * a.block_elements + element;
  a.k_cache[to] = a.k_cache[from];
  a.v_cache[to] = a.v_cache[from];
}

// A block of the cache must be a multiple of 16 bytes long, and both caches must start at one.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) copy_blocks_v2_vectorised(CopyBlocksArguments<T> a) {
  const int64_t from = a.pairs[2 * int64_t{blockIdx.x}] * a.block_elements;
  const int64_t to = a.pairs[2 * int64_t{blockIdx.x} + 1] * a.block_elements;
  const auto* k_from = reinterpret_cast<const uint4*>(a.k_cache + from);
  const auto* v_from = reinterpret_cast<const uint4*>(a.v_cache + from);
  auto* k_to = reinterpret_cast<uint4*>(a.k_cache + to);
  auto* v_to = reinterpret_cast<uint4*>(a.v_cache + to);
  const int vectors = static_cast<int>(a.block_elements / kVector<T>);
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kCopyThreads) {
    k_to[i] = k_from[i];
    v_to[i] = v_from[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kCopyThreads) swap_blocks_v1_element(SwapBlocksArguments<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i >= a.num_pairs * a.block_elements) return;
  const int64_t pair = i / a.block_elements, element = i % a.block_elements;
  a.target[a.pairs[2 * pair + 1] * a.block_elements + element] =
      a.source[a.pairs[2 * pair] * a.block_elements + element];
}

// As for copy_blocks.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) swap_blocks_v2_vectorised(SwapBlocksArguments<T> a) {
  const int64_t pair = blockIdx.x;
  const auto* from = reinterpret_cast<const uint4*>(a.source + a.pairs[2 * pair] * a.block_elements);
  auto* to = reinterpret_cast<uint4*>(a.target + a.pairs[2 * pair + 1] * a.block_elements);
  const int vectors = static_cast<int>(a.block_elements / kVector<T>);
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kCopyThreads) to[i] = from[i];
}

}  // namespace twinfer::device
