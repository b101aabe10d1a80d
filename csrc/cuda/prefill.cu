#include "cuda/rungs.h"
#include "kernels/prefill_attention.cuh"

namespace twinfer::device {

namespace {

template <class T, int kMaxDim>
void launch_naive(const PrefillAttentionArguments<T>& args, cudaStream_t stream) {
  launch(prefill_attention_v1_naive<T, kMaxDim>, blocks_for(int64_t{args.num_tokens} * args.num_heads, kPrefillThreads),
         dim3(kPrefillThreads), 0, stream, args);
}

}  // namespace

template <class T>
void prefill_attention(const PrefillAttentionArguments<T>& args, int /*max_query*/, int /*rung*/, cudaStream_t stream) {
  if (args.num_tokens == 0) return;
  if (args.head_dim <= 64) return launch_naive<T, 64>(args, stream);
  if (args.head_dim <= 128) return launch_naive<T, 128>(args, stream);
  launch_naive<T, kLargestHeadDim>(args, stream);
}

#define INSTANTIATE(T) template void prefill_attention(const PrefillAttentionArguments<T>&, int, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
