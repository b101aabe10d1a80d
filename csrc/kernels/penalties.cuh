// penalties: what happens to a row of logits before temperature, in place: allowed ids, masked ids, bias, repetition,
// presence and frequency. Order and arithmetic are those of reference/contracts/logits.py: float64, rounded to float32
// once for the bias and once for the penalties, never beyond the finite numbers, and a masked logit stays masked. A row
// with a NaN is left as it is, so that sampling can refuse it.
//
// Shapes: R rows of logits, P of them processed, V vocabulary.
//
// rung            work                 why it is faster than the one before
// v1_naive        a thread a row       -
// v2_block        a block a row        256 threads share the lists and the row, neighbours read neighbours; whether a
//                                      token is allowed is found by bisection of the sorted list, not by a walk along it
#pragma once

#include "kernels/arguments.h"
#include "kernels/device.cuh"

namespace twinfer::device {

constexpr int kPenaltyThreads = 256;

// Rounds once.
__device__ __forceinline__ float rounded(double value) {
  constexpr double kLargest = 3.4028234663852886e38;
  return static_cast<float>(fmin(fmax(value, -kLargest), kLargest));
}

// Products and differences by name: fused, the result would have other bits than on the CPU.
__device__ __forceinline__ float penalized(float logit, double repetition, double presence, double frequency,
                                           int count) {
  double z = static_cast<double>(logit);
  z = z > 0.0 ? z / repetition : __dmul_rn(z, repetition);
  z = __dsub_rn(z, __dmul_rn(frequency, static_cast<double>(count)));
  if (count > 0) z = __dsub_rn(z, presence);
  return rounded(z);
}

// Whether `id` stands in the ascending ids[0 : count].
__device__ __forceinline__ bool contains(const int32_t* ids, int64_t count, int id) {
  int64_t low = 0, high = count;                      // the first that is not below `id` is in [low, high]
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ids[middle] < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && ids[low] == id;
}

// The steps of one row. Each thread does every kStep-th item, and steps that touch the same logits wait for each other.
template <int kStep, class Wait>
__device__ __forceinline__ void process_row(const ProcessLogitsArguments& a, int64_t p, float* logits, int first,
                                            Wait wait) {
  const int64_t allowed = a.allowed.starts[p], num_allowed = a.allowed.starts[p + 1] - allowed;
  if (num_allowed > 0) {
    for (int i = first; i < a.vocab_size; i += kStep) {
      if (!contains(a.allowed.ids + allowed, num_allowed, i)) logits[i] = -INFINITY;
    }
  }
  wait();
  for (int64_t i = a.masked.starts[p] + first; i < a.masked.starts[p + 1]; i += kStep) {
    logits[a.masked.ids[i]] = -INFINITY;
  }
  wait();
  for (int64_t i = a.biased.starts[p] + first; i < a.biased.starts[p + 1]; i += kStep) {
    float* logit = logits + a.biased.ids[i];
    if (*logit != -INFINITY) *logit = rounded(static_cast<double>(*logit) + a.biases[i]);
  }
  wait();
  for (int64_t i = a.seen.starts[p] + first; i < a.seen.starts[p + 1]; i += kStep) {
    float* logit = logits + a.seen.ids[i];
    if (*logit == -INFINITY) continue;
    *logit = penalized(*logit, a.repetition_penalty[p], a.presence_penalty[p], a.frequency_penalty[p], a.counts[i]);
  }
}

__global__ void __launch_bounds__(kPenaltyThreads) penalties_v1_naive(ProcessLogitsArguments a) {
  const int64_t p = int64_t{blockIdx.x} * kPenaltyThreads + threadIdx.x;
  if (p >= a.num_processed) return;
  float* logits = a.logits + a.rows[p] * a.logits_stride;
  for (int i = 0; i < a.vocab_size; ++i) {
    if (logits[i] != logits[i]) return;
  }
  process_row<1>(a, p, logits, 0, [] {});
}

__global__ void __launch_bounds__(kPenaltyThreads) penalties_v2_block(ProcessLogitsArguments a) {
  const int64_t p = blockIdx.x;
  const int tid = static_cast<int>(threadIdx.x);
  float* logits = a.logits + a.rows[p] * a.logits_stride;
  bool has_nan = false;
  for (int i = tid; i < a.vocab_size; i += kPenaltyThreads) has_nan = has_nan || logits[i] != logits[i];
  if (__syncthreads_or(has_nan)) return;
  process_row<kPenaltyThreads>(a, p, logits, tid, [] { __syncthreads(); });
}

}  // namespace twinfer::device
