// Masks, bias and penalties; then temperature, min_p, top-k, top-p and the draw, row by row. A draw is the argmax of logit / temperature + Gumbel noise,
// and the noise is a pure function of (seed, output position, token id): neither the batch nor the shortcuts below
// can change a token.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/sampler.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/sampler.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

constexpr double kGreedyTemperature = 1e-5;

struct Candidate {
  float logit;
  int32_t id;
};

// Descending logit, ties by ascending id. Logits order candidates exactly as logit / temperature does in double:
// two different floats are further apart than the rounding of the division.
bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

struct RowParams {
  double temperature;
  int64_t top_k;  // in [1, V], V = off
  double top_p;
  double min_p;
  uint64_t seed;
  uint32_t output_position;
};

// Uniform in (0, 1): the middle of the interval that the 32-bit word stands for.
double gumbel(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -std::log(-std::log(u));
}

// A bound on gumbel(word) without a logarithm. From -log u >= 1 - u follows gumbel <= -log(1 - u), and
// 1 - u > 2^-(z + 1) where z counts the leading zeros of the complement of the word.
constexpr double kLog2Above = 0.693147181;  // > ln 2 by more than the rounding of two logarithms
double gumbel_bound(uint32_t word) {
  const uint32_t complement = ~word;
  const int zeros = complement == 0 ? 32 : __builtin_clz(complement);
  return (zeros + 1) * kLog2Above;
}
constexpr double kLargestNoise = 33 * kLog2Above;

// The running argmax of z + noise, ties to the lowest id. Candidates that cannot win are dismissed by a bound on
// their noise before any logarithm is taken.
class Draw {
 public:
  explicit Draw(const RowParams& row)
      : temperature_(row.temperature),
        position_(row.output_position),
        key_{static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)} {}

  void offer(float logit, int32_t id) {
    const PhiloxCounter words = block(id / 4);
    offer(logit, id, words[static_cast<size_t>(id % 4)]);
  }

  // The ids [4 * index, 4 * index + count), which share one Philox block.
  void offer_block(const float* logits, int32_t index, int count) {
    float largest = logits[0];
    for (int i = 1; i < count; ++i) largest = std::max(largest, logits[i]);
    if (static_cast<double>(largest) < hopeless_) return;
    const PhiloxCounter words = block(index);
    for (int i = 0; i < count; ++i) offer(logits[i], 4 * index + i, words[static_cast<size_t>(i)]);
  }

  int64_t id() const { return id_; }

 private:
  PhiloxCounter block(int32_t index) const {
    return philox4x32_10({static_cast<uint32_t>(index), position_, 0, 0}, key_);
  }

  void offer(float logit, int32_t id, uint32_t word) {
    const double z = static_cast<double>(logit) / temperature_;
    if (z + gumbel_bound(word) < best_) return;
    const double score = z + gumbel(word);
    if (score < best_ || (score == best_ && id > id_)) return;
    best_ = score;
    id_ = id;
    const double limit = (best_ - kLargestNoise) * temperature_;
    hopeless_ = limit - 1e-9 * std::abs(limit);
  }

  double temperature_;
  uint32_t position_;
  PhiloxKey key_;
  double best_ = -std::numeric_limits<double>::infinity();
  double hopeless_ = -std::numeric_limits<double>::infinity();  // a logit below this cannot win
  int32_t id_ = std::numeric_limits<int32_t>::max();
};

// The k first candidates of `before`, in no order. A heap of the k best passes over the row once and rejects nearly
// every logit with one comparison; with a large k partitioning the whole row is cheaper.
void keep_top_k(const float* logits, int64_t vocab_size, int64_t k, std::vector<Candidate>& kept) {
  if (k > vocab_size / 16) {
    for (int64_t i = 0; i < vocab_size; ++i) kept.push_back({logits[i], static_cast<int32_t>(i)});
    if (k < vocab_size) std::nth_element(kept.begin(), kept.begin() + k, kept.end(), before);
    kept.resize(static_cast<size_t>(k));
    return;
  }
  for (int64_t i = 0; i < k; ++i) kept.push_back({logits[i], static_cast<int32_t>(i)});
  std::make_heap(kept.begin(), kept.end(), before);
  for (int64_t i = k; i < vocab_size; ++i) {
    // Ids ascend, so an equal logit comes after the worst one kept.
    if (!(logits[i] > kept.front().logit)) continue;
    std::pop_heap(kept.begin(), kept.end(), before);
    kept.back() = {logits[i], static_cast<int32_t>(i)};
    std::push_heap(kept.begin(), kept.end(), before);
  }
}

double weight(float logit, float largest, double temperature) {
  return std::exp(static_cast<double>(logit) / temperature - static_cast<double>(largest) / temperature);
}

// Cuts `kept`, which is sorted, after the candidate whose cumulative probability reaches top_p. `total` is the sum
// of the weights over which probabilities are taken.
void keep_top_p(float largest, double total, const RowParams& row, std::vector<Candidate>& kept) {
  double cumulative = 0.0;
  size_t count = 0;
  while (count < kept.size() && cumulative < row.top_p) {
    cumulative += weight(kept[count++].logit, largest, row.temperature) / total;
  }
  kept.resize(count);
}

void sort_and_keep_top_p(float largest, const RowParams& row, std::vector<Candidate>& kept) {
  std::sort(kept.begin(), kept.end(), before);
  double total = 0.0;
  for (const Candidate& c : kept) total += weight(c.logit, largest, row.temperature);
  keep_top_p(largest, total, row, kept);
}

// Top-p over the whole vocabulary without sorting it. All tokens of probability below (1 - top_p) / V hold less
// than 1 - top_p together, so the prefix reaches top_p before any of them; half of that leaves room for rounding.
void keep_top_p_of_all(const float* logits, int64_t vocab_size, float largest, const RowParams& row,
                       std::vector<Candidate>& kept) {
  double total = 0.0;
  for (int64_t i = 0; i < vocab_size; ++i) total += weight(logits[i], largest, row.temperature);
  const double smallest = 0.5 * (1.0 - row.top_p) / static_cast<double>(vocab_size) * total;
  const double lowest = static_cast<double>(largest) / row.temperature + std::log(smallest);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (static_cast<double>(logits[i]) / row.temperature < lowest) continue;
    kept.push_back({logits[i], static_cast<int32_t>(i)});
  }
  std::sort(kept.begin(), kept.end(), before);
  keep_top_p(largest, total, row, kept);
}

// The tokens at least min_p times as likely as the most likely one, then top-k and top-p among them.
void keep_min_p(const float* logits, int64_t vocab_size, float largest, const RowParams& row,
                std::vector<Candidate>& kept) {
  const double lowest = static_cast<double>(largest) / row.temperature + std::log(row.min_p);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (static_cast<double>(logits[i]) / row.temperature < lowest) continue;
    kept.push_back({logits[i], static_cast<int32_t>(i)});
  }
  if (row.top_k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + row.top_k, kept.end(), before);
    kept.resize(static_cast<size_t>(row.top_k));
  }
  if (row.top_p < 1.0) sort_and_keep_top_p(largest, row, kept);
}

int64_t draw_from_all(const float* logits, int64_t vocab_size, int32_t most_likely, const RowParams& row) {
  Draw draw(row);
  draw.offer(logits[most_likely], most_likely);
  for (int64_t i = 0; i < vocab_size; i += 4) {
    draw.offer_block(logits + i, static_cast<int32_t>(i / 4), static_cast<int>(std::min<int64_t>(4, vocab_size - i)));
  }
  return draw.id();
}

int64_t sample_row(const float* logits, int64_t vocab_size, const RowMax& top, const RowParams& row,
                   std::vector<Candidate>& kept) {
  if (top.has_nan) return -1;
  if (row.temperature < kGreedyTemperature) return top.id;
  const bool all_k = row.top_k == vocab_size, all_p = row.top_p >= 1.0, all_min_p = row.min_p <= 0.0;
  if (all_k && all_p && all_min_p) return draw_from_all(logits, vocab_size, top.id, row);
  kept.clear();
  if (!all_min_p) {
    keep_min_p(logits, vocab_size, top.value, row, kept);
  } else if (all_k) {
    keep_top_p_of_all(logits, vocab_size, top.value, row, kept);
  } else {
    keep_top_k(logits, vocab_size, row.top_k, kept);
    if (!all_p) sort_and_keep_top_p(top.value, row, kept);
  }
  Draw draw(row);
  for (const Candidate& c : kept) draw.offer(c.logit, c.id);
  return draw.id();
}

RowParams row_params(const Sample& args, int64_t r) {
  const int64_t k = args.top_k[r];
  return {args.temperature[r], k <= 0 ? args.vocab_size : std::min(k, args.vocab_size), args.top_p[r],
          args.min_p[r], static_cast<uint64_t>(args.seeds[r]), static_cast<uint32_t>(args.output_positions[r])};
}

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Rounds once. What would leave float32 stays at its largest finite number: a penalty masks no token.
float rounded(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::min(std::max(value, -kLargest), kLargest));
}

// The ids ascend, so what lies between them is masked and they are left alone.
void mask_all_but(const int32_t* allowed, int64_t count, float* logits, int64_t vocab_size) {
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    std::fill(logits + next, logits + allowed[i], kMasked);
    next = int64_t{allowed[i]} + 1;
  }
  std::fill(logits + next, logits + vocab_size, kMasked);
}

void process_row(const ProcessLogits& args, int64_t p, float* logits) {
  const int64_t first_allowed = args.allowed.starts[p], num_allowed = args.allowed.starts[p + 1] - first_allowed;
  if (num_allowed > 0) mask_all_but(args.allowed.ids + first_allowed, num_allowed, logits, args.vocab_size);
  for (int64_t i = args.masked.starts[p]; i < args.masked.starts[p + 1]; ++i) logits[args.masked.ids[i]] = kMasked;
  for (int64_t i = args.biased.starts[p]; i < args.biased.starts[p + 1]; ++i) {
    float& logit = logits[args.biased.ids[i]];
    if (logit != kMasked) logit = rounded(static_cast<double>(logit) + args.biases[i]);
  }
  const double repetition = args.repetition_penalty[p];
  const double presence = args.presence_penalty[p], frequency = args.frequency_penalty[p];
  for (int64_t i = args.seen.starts[p]; i < args.seen.starts[p + 1]; ++i) {
    float& logit = logits[args.seen.ids[i]];
    if (logit == kMasked) continue;
    double z = static_cast<double>(logit);
    z = z > 0.0 ? z / repetition : z * repetition;
    z -= frequency * static_cast<double>(args.counts[i]);
    if (args.counts[i] > 0) z -= presence;
    logit = rounded(z);
  }
}

// Most words of a grammar's mask are all zeros, so they are the quick ones.
void mask_row(const int32_t* bitmask, float* logits, int64_t vocab_size) {
  for (int64_t i = 0; i < vocab_size; i += 32) {
    const auto word = static_cast<uint32_t>(bitmask[i / 32]);
    const int64_t end = std::min(i + 32, vocab_size);
    if (word == 0) {
      std::fill(logits + i, logits + end, kMasked);
    } else if (word != 0xFFFFFFFFu) {
      for (int64_t t = i; t < end; ++t) {
        if ((word >> (t - i) & 1u) == 0) logits[t] = kMasked;
      }
    }
  }
}

}  // namespace

void apply_token_bitmask(const TokenBitmask& args, Isa isa, int threads) {
  const auto row_max = TWINFER_DISPATCH(isa, row_max);
  const int64_t num_words = (args.vocab_size + 31) / 32;
  parallel_for(args.num_masked, args.num_masked * args.vocab_size, threads, [&](int64_t p, int) {
    float* logits = args.logits[args.rows[p]];
    // A mask must not hide a NaN: the row is left for `sample` to refuse.
    if (!row_max(logits, args.vocab_size).has_nan) mask_row(args.bitmasks + p * num_words, logits, args.vocab_size);
  });
}

void process_logits(const ProcessLogits& args, Isa isa, int threads) {
  const auto row_max = TWINFER_DISPATCH(isa, row_max);
  parallel_for(args.num_processed, args.num_processed * args.vocab_size, threads, [&](int64_t p, int) {
    float* logits = args.logits[args.rows[p]];
    // A mask must not hide a NaN: the row is left for `sample` to refuse.
    if (!row_max(logits, args.vocab_size).has_nan) process_row(args, p, logits);
  });
}

void sample(const Sample& args, Isa isa, int threads) {
  const auto row_max = TWINFER_DISPATCH(isa, row_max);
  const int64_t work = args.num_rows * args.vocab_size;
  // One list of candidates for each thread, large enough from the start: bodies of parallel_for must not throw.
  const size_t team = worth_a_team(args.num_rows, work, threads) ? static_cast<size_t>(threads) : 1;
  std::vector<std::vector<Candidate>> kept(team);
  for (auto& list : kept) list.reserve(static_cast<size_t>(args.vocab_size));
  parallel_for(args.num_rows, work, threads, [&](int64_t r, int thread) {
    const float* logits = args.logits[r];
    args.out[r] = sample_row(logits, args.vocab_size, row_max(logits, args.vocab_size), row_params(args, r),
                             kept[static_cast<size_t>(thread)]);
  });
}

void gumbel_noise(uint64_t seed, uint32_t output_position, double* out, int64_t vocab_size) {
  const PhiloxKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int64_t i = 0; i < vocab_size; i += 4) {
    const PhiloxCounter words = philox4x32_10({static_cast<uint32_t>(i / 4), output_position, 0, 0}, key);
    for (int64_t j = i; j < std::min(i + 4, vocab_size); ++j) out[j] = gumbel(words[static_cast<size_t>(j - i)]);
  }
}

}  // namespace twinfer::cpu
