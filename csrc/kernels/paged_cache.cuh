// Where attention finds a position: the block table's side of the paged cache [N, B, Hkv, D].
#pragma once

#include "kernels/arguments.h"
#include "kernels/device.cuh"

namespace twinfer::device {

constexpr int kLargestHeadDim = 256;

// Positions that a query sees.
struct Span {
  int begin, end;
  __device__ __forceinline__ int size() const { return end - begin; }
};

// Where the head's K (or V) of a position begins. `Arguments` are those of either kind of attention.
template <class Arguments>
__device__ __forceinline__ int64_t cache_offset(const Arguments& a, int seq, int kv_head, int position) {
  const int64_t block = a.block_tables[seq * a.table_stride + position / a.block_size];
  const int64_t slot = block * a.block_size + position % a.block_size;
  return (slot * a.num_kv_heads + kv_head) * a.head_dim;
}

}  // namespace twinfer::device
