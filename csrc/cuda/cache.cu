#include "kernels/cache.cuh"

#include "cuda/rungs.h"

namespace twinfer::device {

template <class T>
void cache_write(const CacheWriteArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.row_size == 0) return;
  const bool fits = vectors_fit<T>(args.row_size, {{args.key, args.key_stride}, {args.value, args.value_stride},
                                                   {args.k_cache, 0}, {args.v_cache, 0}});
  if (choose_rung(rung, 2, fits) == 1) {
    launch(cache_write_v1_element<T>, blocks_for(int64_t{args.num_tokens} * args.row_size, kCopyThreads),
           dim3(kCopyThreads), 0, stream, args);
    return;
  }
  launch(cache_write_v2_vectorised<T>, dim3(static_cast<unsigned>(args.num_tokens)), dim3(kCopyThreads), 0, stream,
         args);
}

template <class T>
void copy_blocks(const CopyBlocksArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_pairs == 0 || args.block_elements == 0) return;
  const bool fits = vectors_fit<T>(args.block_elements, {{args.k_cache, 0}, {args.v_cache, 0}});
  if (choose_rung(rung, 2, fits) == 1) {
    launch(copy_blocks_v1_element<T>, blocks_for(args.num_pairs * args.block_elements, kCopyThreads),
           dim3(kCopyThreads), 0, stream, args);
    return;
  }
  launch(copy_blocks_v2_vectorised<T>, dim3(static_cast<unsigned>(args.num_pairs)), dim3(kCopyThreads), 0, stream,
         args);
}

template <class T>
void swap_blocks(const SwapBlocksArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_pairs == 0 || args.block_elements == 0) return;
  const bool fits = vectors_fit<T>(args.block_elements, {{args.source, 0}, {args.target, 0}});
  if (choose_rung(rung, 2, fits) == 1) {
    launch(swap_blocks_v1_element<T>, blocks_for(args.num_pairs * args.block_elements, kCopyThreads),
           dim3(kCopyThreads), 0, stream, args);
    return;
  }
  launch(swap_blocks_v2_vectorised<T>, dim3(static_cast<unsigned>(args.num_pairs)), dim3(kCopyThreads), 0, stream,
         args);
}

#define INSTANTIATE(T)                                                             \
  template void cache_write(const CacheWriteArguments<T>&, int, cudaStream_t);     \
  template void copy_blocks(const CopyBlocksArguments<T>&, int, cudaStream_t);     \
  template void swap_blocks(const SwapBlocksArguments<T>&, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
