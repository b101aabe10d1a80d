#include "cuda/rungs.h"
#include "kernels/argmax.cuh"
#include "kernels/softmax.cuh"

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

#define INSTANTIATE(T)                                                             \
  template void softmax(const SoftmaxArguments<T>&, int, cudaStream_t);            \
  template void argmax(const ArgmaxArguments<T>&, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
