#include "cuda/rungs.h"
#include "kernels/argmax.cuh"
#include "kernels/penalties.cuh"
#include "kernels/philox.cuh"
#include "kernels/softmax.cuh"
#include "kernels/topk_topp_sample.cuh"

namespace twinfer::device {

template <class T>
void softmax(const SoftmaxArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_rows == 0 || args.row_size == 0) return;
  const dim3 rows(static_cast<unsigned>(args.num_rows)), threads(kSoftmaxThreads);
  switch (rung) {
    case 1: launch(softmax_v1_naive<T>, blocks_for(args.num_rows, kSoftmaxThreads), threads, 0, stream, args); break;
    case 2: launch(softmax_v2_shuffle<T>, rows, threads, 0, stream, args); break;
    default: launch(softmax_v3_online<T>, rows, threads, 0, stream, args); break;
  }
}

template <class T>
void argmax(const ArgmaxArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_rows == 0) return;
  const dim3 rows(static_cast<unsigned>(args.num_rows)), threads(kArgmaxThreads);
  switch (rung) {
    case 1: launch(argmax_v1_naive<T>, blocks_for(args.num_rows, kArgmaxThreads), threads, 0, stream, args); break;
    case 2: launch(argmax_v2_tree<T>, rows, threads, 0, stream, args); break;
    default: launch(argmax_v3_shuffle<T>, rows, threads, 0, stream, args); break;
  }
}

void philox(const PhiloxArguments& args, int rung, cudaStream_t stream) {
  if (args.num_rows == 0 || args.vocab_size == 0) return;
  const bool fits = args.num_rows <= kMostGridRows && vectors_fit<int32_t>(4, {{args.out, args.out_stride}});
  const dim3 threads(kPhiloxThreads);
  if (choose_rung(rung, 2, fits) == 1) {
    launch(philox_v1_word, blocks_for(int64_t{args.num_rows} * args.vocab_size, kPhiloxThreads), threads, 0, stream,
           args);
    return;
  }
  dim3 grid = blocks_for(args.vocab_size, 4 * kPhiloxThreads);
  grid.y = static_cast<unsigned>(args.num_rows);
  launch(philox_v2_block, grid, threads, 0, stream, args);
}

void process_logits(const ProcessLogitsArguments& args, int rung, cudaStream_t stream) {
  if (args.num_processed == 0) return;
  const dim3 threads(kPenaltyThreads);
  if (rung == 1) {
    launch(penalties_v1_naive, blocks_for(args.num_processed, kPenaltyThreads), threads, 0, stream, args);
    return;
  }
  launch(penalties_v2_block, dim3(static_cast<unsigned>(args.num_processed)), threads, 0, stream, args);
}

template <class T>
void sample(const SampleArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_rows == 0) return;
  const dim3 rows(static_cast<unsigned>(args.num_rows)), threads(kSampleThreads);
  switch (rung) {
    case 1:
      launch(topk_topp_sample_v1_naive<T>, blocks_for(args.num_rows, kSampleThreads), threads, 0, stream, args);
      break;
    case 2: launch(topk_topp_sample_v2_block<T>, rows, threads, 0, stream, args); break;
    default: launch(topk_topp_sample_v3_eight_way<T>, rows, threads, 0, stream, args); break;
  }
}

#define INSTANTIATE(T)                                                             \
  template void softmax(const SoftmaxArguments<T>&, int, cudaStream_t);            \
  template void argmax(const ArgmaxArguments<T>&, int, cudaStream_t);              \
  template void sample(const SampleArguments<T>&, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
