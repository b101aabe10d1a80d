#include "cuda/rungs.h"
#include "kernels/activation.cuh"
#include "kernels/layer_norm.cuh"
#include "kernels/rms_norm.cuh"
#include "kernels/rotary.cuh"

namespace twinfer::device {

namespace {

__global__ void __launch_bounds__(1) nothing(int) {}

template <class T, bool kAdd>
void launch_rms_norm(const RmsNormArguments<T>& args, int rung, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(args.num_tokens));
  switch (rung) {
    case 1:
      launch(rms_norm_v1_naive<T, kAdd>, blocks_for(args.num_tokens, kNormThreads), dim3(kNormThreads), 0, stream,
             args);
      break;
    case 2: launch(rms_norm_v2_tree<T, kAdd>, rows, dim3(kNormThreads), 0, stream, args); break;
    case 3: launch(rms_norm_v3_shuffle<T, kAdd>, rows, dim3(kNormThreads), 0, stream, args); break;
    default: launch(rms_norm_v4_vectorised<T, kAdd>, rows, dim3(kNormThreads), 0, stream, args); break;
  }
}

}  // namespace

void probe(cudaStream_t stream) { launch(nothing, dim3(1), dim3(1), 0, stream, 0); }

template <class T>
void rms_norm(const RmsNormArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.hidden_size == 0) return;
  const bool fits = vectors_fit<T>(args.hidden_size, {{args.out, args.out_stride}, {args.x, args.x_stride},
                                                      {args.residual, args.residual_stride}, {args.weight, 0}});
  rung = choose_rung(rung, 4, fits);
  if (args.residual != nullptr) return launch_rms_norm<T, true>(args, rung, stream);
  launch_rms_norm<T, false>(args, rung, stream);
}

template <class T>
void layer_norm(const LayerNormArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.hidden_size == 0) return;
  const dim3 rows(static_cast<unsigned>(args.num_tokens)), threads(kLayerNormThreads);
  switch (rung) {
    case 1:
      launch(layer_norm_v1_naive<T>, blocks_for(args.num_tokens, kLayerNormThreads), threads, 0, stream, args);
      break;
    case 2: launch(layer_norm_v2_shuffle<T>, rows, threads, 0, stream, args); break;
    default: launch(layer_norm_v3_welford<T>, rows, threads, 0, stream, args); break;
  }
}

// Grid of the vectorised activations: parts of a row, then rows.
template <class T>
dim3 activation_grid(int num_tokens, int ffn_size) {
  dim3 grid = blocks_for(ffn_size, kActivationThreads * static_cast<int>(16 / sizeof(T)));
  grid.y = static_cast<unsigned>(num_tokens);
  return grid;
}

template <class T>
void silu_mul(const SiluMulArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.ffn_size == 0) return;
  const bool fits = args.num_tokens <= kMostGridRows &&
                    vectors_fit<T>(args.ffn_size, {{args.out, args.out_stride}, {args.gate_up, args.gate_up_stride}});
  if (choose_rung(rung, 2, fits) == 1) {
    launch(silu_mul_v1_element<T>, blocks_for(int64_t{args.num_tokens} * args.ffn_size, kActivationThreads),
           dim3(kActivationThreads), 0, stream, args);
    return;
  }
  launch(silu_mul_v2_vectorised<T>, activation_grid<T>(args.num_tokens, args.ffn_size), dim3(kActivationThreads), 0,
         stream, args);
}

template <class T>
void gelu(const GeluArguments<T>& args, int rung, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.ffn_size == 0) return;
  const bool fits = args.num_tokens <= kMostGridRows &&
                    vectors_fit<T>(args.ffn_size, {{args.out, args.out_stride}, {args.x, args.x_stride}});
  if (choose_rung(rung, 2, fits) == 1) {
    launch(gelu_v1_element<T>, blocks_for(int64_t{args.num_tokens} * args.ffn_size, kActivationThreads),
           dim3(kActivationThreads), 0, stream, args);
    return;
  }
  launch(gelu_v2_vectorised<T>, activation_grid<T>(args.num_tokens, args.ffn_size), dim3(kActivationThreads), 0,
         stream, args);
}

template <class T>
void rotary(const RotaryArguments<T>& args, int rung, cudaStream_t stream) {
  const int64_t pairs = int64_t{args.num_tokens} * (args.num_heads + args.num_kv_heads) * (args.head_dim / 2);
  if (pairs == 0) return;
  if (rung == 1) {
    launch(rotary_v1_pair<T>, blocks_for(pairs, kRotaryThreads), dim3(kRotaryThreads), 0, stream, args);
    return;
  }
  launch(rotary_v2_token<T>, dim3(static_cast<unsigned>(args.num_tokens)), dim3(kRotaryThreads), 0, stream, args);
}

#define INSTANTIATE(T)                                                             \
  template void rms_norm(const RmsNormArguments<T>&, int, cudaStream_t);           \
  template void layer_norm(const LayerNormArguments<T>&, int, cudaStream_t);       \
  template void gelu(const GeluArguments<T>&, int, cudaStream_t);                  \
  template void silu_mul(const SiluMulArguments<T>&, int, cudaStream_t);           \
  template void rotary(const RotaryArguments<T>&, int, cudaStream_t);
TWINFER_FOR_EACH_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace twinfer::device
