// Row-wise layers: every row is computed by one thread, alone, in an order that depends on its length only.
#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/layers.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {

void position_embedding(const PositionEmbedding& args, int threads) {
  const size_t bytes = static_cast<size_t>(args.hidden_size) * sizeof(float);
  parallel_rows(args.num_tokens, args.hidden_size, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(args.out[t], args.table + args.positions[t] * args.hidden_size, bytes);
    }
  });
}

void rms_norm(const RmsNorm& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, rms_norm_rows);
  parallel_rows(args.num_tokens, args.hidden_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void head_rms_norm(const HeadRmsNorm& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, head_rms_norm_rows);
  parallel_rows(args.num_tokens, args.num_heads * args.head_dim, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void fused_add_rms_norm(const FusedAddRmsNorm& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, fused_add_rms_norm_rows);
  parallel_rows(args.num_tokens, 2 * args.hidden_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void layer_norm(const LayerNorm& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, layer_norm_rows);
  parallel_rows(args.num_tokens, 2 * args.hidden_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void fused_add_layer_norm(const FusedAddLayerNorm& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, fused_add_layer_norm_rows);
  parallel_rows(args.num_tokens, 3 * args.hidden_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void rotary_embedding(const RotaryEmbedding& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, rotary_rows);
  const int64_t row_size = int64_t{args.num_heads + args.num_kv_heads} * args.head_dim;
  parallel_rows(args.num_tokens, row_size, threads, [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void silu_and_mul(const SiluAndMul& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, silu_and_mul_rows);
  // An exponential and a division are worth about eight additions.
  parallel_rows(args.num_tokens, 8 * args.ffn_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void gelu(const Gelu& args, Isa isa, int threads) {
  const auto rows = TWINFER_DISPATCH(isa, gelu_rows);
  parallel_rows(args.num_tokens, 8 * args.ffn_size, threads,
                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

}  // namespace twinfer::cpu
