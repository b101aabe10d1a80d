#include "cuda/rungs.h"
#include "kernels/paged_attention.cuh"

namespace twinfer::device {

namespace {

// 96 KiB of logits: what every architecture from sm_80 on has, with room for the kernel's other arrays.
constexpr int kLargestSharedContext = 24 * 1024;

template <class T, int kMaxDim>
void launch_naive(const PagedAttentionArguments<T>& args, cudaStream_t stream) {
  launch(paged_attention_v1_naive<T, kMaxDim>,
         blocks_for(int64_t{args.num_seqs} * args.num_heads, kAttentionThreads), dim3(kAttentionThreads), 0, stream,
         args);
}

template <class T>
void launch_naive_of_dim(const PagedAttentionArguments<T>& args, cudaStream_t stream) {
  if (args.head_dim <= 64) return launch_naive<T, 64>(args, stream);
  if (args.head_dim <= 128) return launch_naive<T, 128>(args, stream);
  launch_naive<T, kLargestHeadDim>(args, stream);
}

template <class T, int kHeadDim>
void launch_vectorised(const PagedAttentionArguments<T>& args, int max_context, int rung, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(args.num_heads), seqs = static_cast<unsigned>(args.num_seqs);
  const auto splits = static_cast<unsigned>(args.num_splits);
  const dim3 threads(kAttentionThreads);
  const size_t rows = size_t{heads} * seqs * splits;
  name_memory("split_out", args.split_out, rows * args.head_dim);
  name_memory("split_max", args.split_max, rows);
  name_memory("split_sum", args.split_sum, rows);
  if (rung == 3) {
    launch(paged_attention_v3_vectorised<T, kHeadDim>, dim3(heads, seqs), threads, max_context * sizeof(float), stream,
           args);
    return;
  }
  if constexpr (sizeof(T) == 2 && kHeadDim > 0) {
    if (rung == 6) {
      const int group = args.num_heads / args.num_kv_heads, parts = (group + kMmaRows - 1) / kMmaRows;
      launch(paged_attention_v6_tensor_cores<T, kHeadDim>,
             dim3(static_cast<unsigned>(args.num_kv_heads * parts), seqs, splits), threads, 0, stream, args);
      launch(paged_attention_join<T>, dim3(heads, seqs), threads, 0, stream, args);
      return;
    }
  }
  if (rung == 4) {
    launch(paged_attention_v4_split_kv<T, kHeadDim>, dim3(heads, seqs, splits), threads, 0, stream, args);
  } else {
    const int group = args.num_heads / args.num_kv_heads, parts = (group + kGroupedHeads - 1) / kGroupedHeads;
    launch(paged_attention_v5_grouped<T, kHeadDim>,
           dim3(static_cast<unsigned>(args.num_kv_heads * parts), seqs, splits), threads, 0, stream, args);
  }
  launch(paged_attention_join<T>, dim3(heads, seqs), threads, 0, stream, args);
}

}  // namespace

int num_splits(int max_context) { return (max_context + kSplitTokens - 1) / kSplitTokens; }

template <class T>
void paged_attention(const PagedAttentionArguments<T>& args, int max_context, int rung, cudaStream_t stream) {
  if (args.num_seqs == 0) return;
  // Where 128-bit loads do not fit, the path for any head dim does.
  const bool fits =
      vectors_fit<T>(args.head_dim, {{args.query, args.query_stride}, {args.k_cache, 0}, {args.v_cache, 0}});
  rung = choose_tensor_cores<T>(rung, 6, args.head_dim, fits);
  if ((rung == 2 || rung == 3) && max_context > kLargestSharedContext) {
    throw std::invalid_argument("rung: rungs 2 and 3 keep a float for each of at most " +
                                std::to_string(kLargestSharedContext) + " visible tokens in shared memory, got " +
                                std::to_string(max_context) + "; use v4_split_kv or v5_grouped.");
  }
  if (rung == 1) return launch_naive_of_dim(args, stream);
  if (rung == 2) {
    const dim3 grid(static_cast<unsigned>(args.num_heads), static_cast<unsigned>(args.num_seqs));
    launch(paged_attention_v2_shared_reduce<T>, grid, dim3(kAttentionThreads), max_context * sizeof(float), stream,
           args);
    return;
  }
  if (fits && args.head_dim == 64) return launch_vectorised<T, 64>(args, max_context, rung, stream);
  if (fits && args.head_dim == 128) return launch_vectorised<T, 128>(args, max_context, rung, stream);
  launch_vectorised<T, 0>(args, max_context, rung, stream);
}

#define INSTANTIATE(T) template void paged_attention(const PagedAttentionArguments<T>&, int, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
