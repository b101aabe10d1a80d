#include "cuda/rungs.h"
#include "kernels/prefill_attention.cuh"

namespace twinfer::device {

namespace {

template <class T, int kMaxDim>
void launch_naive(const PrefillAttentionArguments<T>& args, cudaStream_t stream) {
  launch(prefill_attention_v1_naive<T, kMaxDim>, blocks_for(int64_t{args.num_tokens} * args.num_heads, kPrefillThreads),
         dim3(kPrefillThreads), 0, stream, args);
}

template <class T>
void launch_naive_of_dim(const PrefillAttentionArguments<T>& args, cudaStream_t stream) {
  if (args.head_dim <= 64) return launch_naive<T, 64>(args, stream);
  if (args.head_dim <= 128) return launch_naive<T, 128>(args, stream);
  launch_naive<T, kLargestHeadDim>(args, stream);
}

// Tiles of the longest chunk, KV heads, sequences.
template <class T>
dim3 tile_grid(const PrefillAttentionArguments<T>& args, int max_query, int tile_pairs) {
  dim3 grid = blocks_for(int64_t{max_query} * (args.num_heads / args.num_kv_heads), tile_pairs);
  grid.y = static_cast<unsigned>(args.num_kv_heads);
  grid.z = static_cast<unsigned>(args.num_seqs);
  return grid;
}

template <class T, int kHeadDim>
void launch_tiled(const PrefillAttentionArguments<T>& args, int max_query, int rung, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2 && kHeadDim > 0) {
    if (rung == 3) {
      launch(prefill_attention_v3_tensor_cores<T, kHeadDim>, tile_grid(args, max_query, kMmaPairs),
             dim3(kPrefillThreads), 0, stream, args);
      return;
    }
  }
  const size_t rows = kTilePairs + kTileKeys, stride = TileRows<T, kHeadDim>::stride(args.head_dim);
  launch(prefill_attention_v2_tiled<T, kHeadDim>, tile_grid(args, max_query, kTilePairs), dim3(kPrefillThreads),
         rows * stride * sizeof(T), stream, args);
}

}  // namespace

template <class T>
void prefill_attention(const PrefillAttentionArguments<T>& args, int max_query, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0) return;
  // Where 128-bit loads do not fit, the path for any head dim does.
  const bool fits =
      vectors_fit<T>(args.head_dim, {{args.query, args.query_stride}, {args.k_cache, 0}, {args.v_cache, 0}});
  const bool out_fits = vectors_fit<T>(args.head_dim, {{args.out, args.out_stride}});
  rung = choose_tensor_cores<T>(rung, 3, args.head_dim, fits && out_fits);
  if (rung == 1) return launch_naive_of_dim(args, stream);
  if (fits && args.head_dim == 64) return launch_tiled<T, 64>(args, max_query, rung, stream);
  if (fits && args.head_dim == 128) return launch_tiled<T, 128>(args, max_query, rung, stream);
  launch_tiled<T, 0>(args, max_query, rung, stream);
}

#define INSTANTIATE(T) template void prefill_attention(const PrefillAttentionArguments<T>&, int, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
