// The host's side of csrc/kernels: which rung runs, with which grid. Built by nvcc for GPUs and by any C++17 compiler
// for the emulator.
//
// Every function takes a rung from 1 on, by its place in the ladder, or kBestRung: the highest that takes the call. One
// that was asked for by number and cannot take the call is refused with std::invalid_argument. T is float, __half or
// __nv_bfloat16.
#pragma once

#include <string>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/device.cuh"

namespace twinfer::device {

constexpr int kBestRung = 0;

// `improves`: the figure of a trace (fast/kernel_trace.py, KernelCounts) that is lower than the rung before has it. It
// is what the card at the head of the .cuh file claims, and a test holds the rung to it.
struct Rung {
  std::string name, improves;
};

struct Ladder {
  std::string operation;
  std::vector<Rung> rungs;
};
const std::vector<Ladder>& ladders();

// `name` as in ladders(), or empty for the best. Throws std::invalid_argument naming those there are.
int rung_number(const std::string& operation, const std::string& name);

// Launches a kernel that does nothing.
void probe(cudaStream_t stream);

// With a residual: residual += x, then out = rms_norm(residual).
template <class T>
void rms_norm(const RmsNormArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void layer_norm(const LayerNormArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void cache_write(const CacheWriteArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void copy_blocks(const CopyBlocksArguments<T>& args, int rung, cudaStream_t stream);

// How many splits v4 to v6 make of the longest context, `max_context` positions.
int num_splits(int max_context);
// `max_context`: the most positions that any query sees. Rungs from 4 on need the arguments' split memory.
template <class T>
void paged_attention(const PagedAttentionArguments<T>& args, int max_context, int rung, cudaStream_t stream);

// `max_query`: the most query rows of any sequence.
template <class T>
void prefill_attention(const PrefillAttentionArguments<T>& args, int max_query, int rung, cudaStream_t stream);

template <class T>
void silu_mul(const SiluMulArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void gelu(const GeluArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void rotary(const RotaryArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void softmax(const SoftmaxArguments<T>& args, int rung, cudaStream_t stream);
template <class T>
void argmax(const ArgmaxArguments<T>& args, int rung, cudaStream_t stream);

template <class T>
void swap_blocks(const SwapBlocksArguments<T>& args, int rung, cudaStream_t stream);
void philox(const PhiloxArguments& args, int rung, cudaStream_t stream);
void process_logits(const ProcessLogitsArguments& args, int rung, cudaStream_t stream);
template <class T>
void sample(const SampleArguments<T>& args, int rung, cudaStream_t stream);

}  // namespace twinfer::device
