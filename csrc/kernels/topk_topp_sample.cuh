// topk_topp_sample: one token a row. Temperature, min_p, top-k, top-p, then the argmax of logit / temperature + Gumbel
// noise, all in float64: the kept set and the draw of reference/sampler.py. A row with a NaN gives -1; a temperature
// below 1e-5 takes the largest logit. Equal logits rank by ascending id everywhere.
//
// Nothing is sorted. The border of a filter is the largest number t such that the logits >= t have enough mass: k of
// them for top-k, a probability of top_p for top-p. As bits that order like their floats, t is found from its highest
// bits down, each by summing the mass once over the row. Sums run in one order whatever the batch, so a row's token does
// not depend on it.
//
// Shapes: R rows, V vocabulary.
//
// rung            work                 reads of a row for a border    why it is faster than the one before
// v1_naive        a thread a row       32                             -
// v2_block        a block a row        32                             256 threads a row; neighbours read neighbours
// v3_eight_way    a block a row        11                             three bits of t a pass: seven sums at once in
//                                                                     registers, for one read
#pragma once

#include "kernels/argmax.cuh"
#include "kernels/philox.cuh"

namespace twinfer::device {

constexpr int kSampleThreads = 256;
constexpr double kGreedyTemperature = 1e-5;

// Bits of a float that order as unsigned numbers as the floats do; both zeros are one.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// Who works on a row: a thread alone, or a block. Every thread of a team gets the same sums, bit for bit.
struct LoneThread {
  static constexpr int kSize = 1;
  __device__ int rank() const { return 0; }
  template <int kCount>
  __device__ void sum(double (&)[kCount]) const {}
  __device__ Candidate best(Candidate mine) const { return mine; }
  __device__ void best(double&, int&) const {}
};

struct SampleScratch {
  double sums[kSampleThreads / kWarpSize][7];
  double values[kSampleThreads / kWarpSize];
  Candidate candidates[kSampleThreads / kWarpSize];
  int ids[kSampleThreads / kWarpSize];
};

// The lower id of equals. kNoIndex loses against all that exist.
__device__ __forceinline__ bool beats(double value, int id, double best_value, int best_id) {
  return value > best_value || (value == best_value && id < best_id);
}

struct Block {
  static constexpr int kSize = kSampleThreads;
  static constexpr int kWarps = kSampleThreads / kWarpSize;
  SampleScratch* scratch;

  __device__ int rank() const { return static_cast<int>(threadIdx.x); }

  // Butterflies within the warps, then the warps in ascending order.
  template <int kCount>
  __device__ void sum(double (&x)[kCount]) const {
    const int warp = rank() / kWarpSize;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        x[i] += __shfl_xor_sync(kAllLanes, x[i], distance);
      }
      if (rank() % kWarpSize == 0) scratch->sums[warp][i] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = scratch->sums[0][i];
      for (int other = 1; other < kWarps; ++other) x[i] += scratch->sums[other][i];
    }
    __syncthreads();                                  // the next use of scratch must not overtake this read
  }

  __device__ Candidate best(Candidate mine) const {
    mine = warp_best(mine);
    if (rank() % kWarpSize == 0) scratch->candidates[rank() / kWarpSize] = mine;
    __syncthreads();
    mine = scratch->candidates[0];
    for (int warp = 1; warp < kWarps; ++warp) mine = better(mine, scratch->candidates[warp]);
    return mine;
  }

  __device__ void best(double& value, int& id) const {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const double other = __shfl_xor_sync(kAllLanes, value, distance);
      const int other_id = __shfl_xor_sync(kAllLanes, id, distance);
      if (beats(other, other_id, value, id)) value = other, id = other_id;
    }
    if (rank() % kWarpSize == 0) scratch->values[rank() / kWarpSize] = value, scratch->ids[rank() / kWarpSize] = id;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) {
      if (beats(scratch->values[warp], scratch->ids[warp], value, id)) value = scratch->values[warp], id = scratch->ids[warp];
    }
  }
};

// A row and what is left of it: logits at or above min_p's bound that rank before (key, id).
template <class T>
struct SampleRow {
  const T* logits;
  int size;
  double temperature, largest;                        // largest logit / temperature
  double lowest = -INFINITY;                          // min_p's bound on logit / temperature
  uint32_t key = 0;                                   // the border: above it all are kept, at it the ids below `id`
  int id = kNoIndex;

  __device__ float logit(int i) const { return to_float(logits[i]); }
  __device__ double scaled(float x) const { return static_cast<double>(x) / temperature; }
  __device__ double weight(float x) const { return exp(scaled(x) - largest); }
  __device__ bool keeps(float x, int i) const {
    const uint32_t bits = ordered_bits(x);
    return scaled(x) >= lowest && (bits > key || (bits == key && i < id));
  }
};

struct CountMass {
  template <class T>
  __device__ double operator()(const SampleRow<T>&, float) const {
    return 1.0;
  }
};
struct ProbabilityMass {
  template <class T>
  __device__ double operator()(const SampleRow<T>& row, float x) const {
    return row.weight(x);
  }
};

// Mass of the kept tokens whose ordered bits are in [low, high].
template <class Mass, class Team, class T>
__device__ double mass_between(const Team& team, const SampleRow<T>& row, uint32_t low, uint32_t high) {
  double mass[1] = {0.0};
  for (int i = team.rank(); i < row.size; i += Team::kSize) {
    const float x = row.logit(i);
    const uint32_t bits = ordered_bits(x);
    if (bits >= low && bits <= high && row.keeps(x, i)) mass[0] += Mass()(row, x);
  }
  team.sum(mass);
  return mass[0];
}

// The largest t such that the kept tokens of ordered bits >= t have `share` or more of `total`; kBits bits of it a pass.
template <int kBits, class Mass, class Team, class T>
__device__ uint32_t border(const Team& team, const SampleRow<T>& row, double share, double total) {
  constexpr int kDigits = (1 << kBits) - 1;           // besides 0, which always has enough
  uint64_t t = 0;
  for (int low = 31 / kBits * kBits; low >= 0; low -= kBits) {
    double mass[kDigits] = {};
    for (int i = team.rank(); i < row.size; i += Team::kSize) {
      const float x = row.logit(i);
      const uint64_t bits = ordered_bits(x);
      if (bits < t + (uint64_t{1} << low) || !row.keeps(x, i)) continue;
      const double m = Mass()(row, x);
#pragma unroll
      for (int d = 1; d <= kDigits; ++d) mass[d - 1] += bits >= t + (uint64_t{static_cast<unsigned>(d)} << low) ? m : 0.0;
    }
    team.sum(mass);
    int digit = 0;
#pragma unroll
    for (int d = 1; d <= kDigits; ++d) digit = mass[d - 1] / total >= share ? d : digit;
    t += static_cast<uint64_t>(digit) << low;
  }
  return static_cast<uint32_t>(t);
}

// The id before which `count` of the kept tokens with these ordered bits stand.
template <class Team, class T>
__device__ int id_behind(const Team& team, const SampleRow<T>& row, uint32_t bits, double count) {
  int low = 0, high = row.size;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    double before[1] = {0.0};
    for (int i = team.rank(); i < middle; i += Team::kSize) {
      const float x = row.logit(i);
      before[0] += ordered_bits(x) == bits && row.keeps(x, i) ? 1.0 : 0.0;
    }
    team.sum(before);
    if (before[0] >= count) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Keeps `count` of those at the border, the lowest ids first.
template <class Team, class T>
__device__ void cut(const Team& team, SampleRow<T>& row, uint32_t bits, double count, double equals) {
  const int id = count < equals ? id_behind(team, row, bits, count) : row.key == bits ? row.id : kNoIndex;
  row.key = bits;
  row.id = id;
}

template <int kBits, class Team, class T>
__device__ void keep_top_k(const Team& team, SampleRow<T>& row, int k) {
  const uint32_t t = border<kBits, CountMass>(team, row, k, 1.0);
  const double equals = mass_between<CountMass>(team, row, t, t);
  const double above = t == 0xffffffffu ? 0.0 : mass_between<CountMass>(team, row, t + 1, 0xffffffffu);
  cut(team, row, t, k - above, equals);
}

// Probabilities are over what top-k left.
template <int kBits, class Team, class T>
__device__ void keep_top_p(const Team& team, SampleRow<T>& row, double top_p) {
  const double total = mass_between<ProbabilityMass>(team, row, 0, 0xffffffffu);
  const uint32_t t = border<kBits, ProbabilityMass>(team, row, top_p, total);
  const double equals = mass_between<CountMass>(team, row, t, t);
  double reached = t == 0xffffffffu ? 0.0 : mass_between<ProbabilityMass>(team, row, t + 1, 0xffffffffu) / total;
  const double each = row.weight(from_ordered_bits(t)) / total;
  double count = 0.0;
  for (; count < equals && reached < top_p; ++count) reached += each;
  cut(team, row, t, count, equals);
}

__device__ __forceinline__ double gumbel(uint32_t word) {
  return -log(-log((static_cast<double>(word) + 0.5) * 2.3283064365386963e-10));    // 2^-32
}

template <class Team, class T>
__device__ int64_t draw(const Team& team, const SampleRow<T>& row, uint64_t seed, uint32_t position) {
  double best = -INFINITY;
  int best_id = kNoIndex;
  for (int block = team.rank(); 4 * block < row.size; block += Team::kSize) {
    uint4 words{};
    bool has_words = false;
    for (int i = 4 * block; i < row.size && i < 4 * block + 4; ++i) {
      const float x = row.logit(i);
      if (!row.keeps(x, i)) continue;
      if (!has_words) words = philox_block(seed, position, static_cast<uint32_t>(block));
      has_words = true;
      const double score = row.scaled(x) + gumbel(word_of(words, i % 4));
      if (beats(score, i, best, best_id)) best = score, best_id = i;
    }
  }
  team.best(best, best_id);
  return best_id;
}

template <int kBits, class Team, class T>
__device__ int64_t sample_row(const Team& team, const SampleArguments<T>& a, int64_t r) {
  SampleRow<T> row{a.logits + r * a.logits_stride, a.vocab_size, a.temperature[r], 0.0};
  const Candidate top = team.best(best_of(row.logits, row.size, team.rank(), Team::kSize));
  // Infinities have no probabilities. Minus infinity throughout is what a mask over all tokens leaves.
  const bool is_finite = fabsf(top.value) < INFINITY; // nor is NaN
  if (!is_finite || row.temperature < kGreedyTemperature) return argmax_result(top);
  row.largest = row.scaled(top.value);
  if (a.min_p[r] > 0.0) row.lowest = row.largest + log(a.min_p[r]);
  if (a.top_k[r] > 0 && a.top_k[r] < row.size) keep_top_k<kBits>(team, row, a.top_k[r]);
  if (a.top_p[r] < 1.0) keep_top_p<kBits>(team, row, a.top_p[r]);
  return draw(team, row, static_cast<uint64_t>(a.seeds[r]), static_cast<uint32_t>(a.output_positions[r]));
}

// Two blocks a multiprocessor: without a number the compiler keeps to 64 registers, and spills.
#define TWINFER_SAMPLE_BOUNDS __launch_bounds__(kSampleThreads, 2)

template <class T>
__global__ void TWINFER_SAMPLE_BOUNDS topk_topp_sample_v1_naive(SampleArguments<T> a) {
  const int64_t r = int64_t{blockIdx.x} * kSampleThreads + threadIdx.x;
  if (r < a.num_rows) a.out[r] = sample_row<1>(LoneThread(), a, r);
}

template <int kBits, class T>
__device__ __forceinline__ void sample_block_row(const SampleArguments<T>& a, SampleScratch* scratch) {
  const int64_t token = sample_row<kBits>(Block{scratch}, a, blockIdx.x);
  if (threadIdx.x == 0) a.out[blockIdx.x] = token;
}

template <class T>
__global__ void TWINFER_SAMPLE_BOUNDS topk_topp_sample_v2_block(SampleArguments<T> a) {
  SHARED_ARRAY(SampleScratch, scratch, [1]);
  sample_block_row<1>(a, scratch);
}

template <class T>
__global__ void TWINFER_SAMPLE_BOUNDS topk_topp_sample_v3_eight_way(SampleArguments<T> a) {
  SHARED_ARRAY(SampleScratch, scratch, [1]);
  sample_block_row<3>(a, scratch);
}

#undef TWINFER_SAMPLE_BOUNDS

}  // namespace twinfer::device
