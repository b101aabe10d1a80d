// Masks, bias and penalties; then temperature, min_p, top-k, top-p and the draw, row by row. A draw is the argmax of logit / temperature + Gumbel noise,
// and the noise is a pure function of (seed, output position, token id): neither the batch nor the shortcuts below
// can change a token.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
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
    if (static_cast<double>(logit) < hopeless_) return;
    if (id / 4 != last_index_) last_words_ = block(last_index_ = id / 4);
    offer(logit, id, last_words_[static_cast<size_t>(id % 4)]);
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
  int32_t last_index_ = -1;  // candidates often come in the order of ids
  PhiloxCounter last_words_{};
  double best_ = -std::numeric_limits<double>::infinity();
  double hopeless_ = -std::numeric_limits<double>::infinity();  // a logit below this cannot win
  int32_t id_ = std::numeric_limits<int32_t>::max();
};

// The passes over a row, in the instruction set of the call.
struct Passes {
  RowMax (*row_max)(const float* logits, int64_t size);
  int64_t (*group_maxima)(const float* logits, int64_t size, float* maxima);
  int64_t (*collect)(const float* logits, int64_t size, float lowest, Candidate* candidates);
  double (*weigh)(const float* logits, int64_t size, double largest, double temperature, double* weights);
};

Passes passes_of(Isa isa) {
  return {TWINFER_DISPATCH(isa, row_max), TWINFER_DISPATCH(isa, group_maxima), TWINFER_DISPATCH(isa, collect),
          TWINFER_DISPATCH(isa, weigh)};
}

// A list in memory that is large enough for the vocabulary: bodies of parallel_for must not throw. It is no vector
// because a vector writes to all of its memory first.
class Candidates {
 public:
  explicit Candidates(Candidate* memory) : begin_(memory), end_(memory) {}

  Candidate* begin() const { return begin_; }
  Candidate* end() const { return end_; }
  int64_t size() const { return end_ - begin_; }
  Candidate& operator[](int64_t i) const { return begin_[i]; }
  void clear() { end_ = begin_; }
  void push_back(const Candidate& candidate) { *end_++ = candidate; }
  void resize(int64_t size) { end_ = begin_ + size; }

 private:
  Candidate* begin_;
  Candidate* end_;
};

// One thread's lists.
struct Lists {
  Candidates kept, border;
  double* weights;                // [V]
  float* maxima;                  // [V]

  static size_t num_bytes(int64_t vocab_size) {
    return static_cast<size_t>(vocab_size) * (2 * sizeof(Candidate) + sizeof(double) + sizeof(float));
  }
  static Lists at(char* memory, int64_t vocab_size) {
    auto* weights = reinterpret_cast<double*>(memory);
    auto* candidates = reinterpret_cast<Candidate*>(weights + vocab_size);
    return {Candidates(candidates), Candidates(candidates + vocab_size), weights,
            reinterpret_cast<float*>(candidates + 2 * vocab_size)};
  }
};

// Sets `kept` to the tokens with a logit of at least `lowest`.
void collect(const Passes& passes, const float* logits, int64_t vocab_size, float lowest, Candidates& kept) {
  kept.resize(passes.collect(logits, vocab_size, lowest, kept.begin()));
}

// The k first candidates of `before`, in no order. Of the largest logits of small groups, the k-th is no larger than
// the k-th of all: only logits from there on are looked at one by one.
void keep_top_k(const Passes& passes, const float* logits, int64_t vocab_size, int64_t k, Lists& lists) {
  float lowest = -std::numeric_limits<float>::infinity();
  const int64_t groups = passes.group_maxima(logits, vocab_size, lists.maxima);
  if (k <= groups) {
    float* nth = lists.maxima + k - 1;
    std::nth_element(lists.maxima, nth, lists.maxima + groups, std::greater<float>());
    lowest = *nth;
  }
  Candidates& kept = lists.kept;
  collect(passes, logits, vocab_size, lowest, kept);
  if (k < kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + k, kept.end(), before);
    kept.resize(k);
  }
}

double weight(float logit, float largest, double temperature) {
  return std::exp(static_cast<double>(logit) / temperature - static_cast<double>(largest) / temperature);
}

// Cuts `kept`, which is sorted, after the candidate whose cumulative probability reaches top_p. `total` is the sum
// of the weights over which probabilities are taken.
void keep_top_p(float largest, double total, const RowParams& row, Candidates& kept) {
  double cumulative = 0.0;
  int64_t count = 0;
  while (count < kept.size() && cumulative < row.top_p) {
    cumulative += weight(kept[count++].logit, largest, row.temperature) / total;
  }
  kept.resize(count);
}

void sort_and_keep_top_p(float largest, const RowParams& row, Candidates& kept) {
  std::sort(kept.begin(), kept.end(), before);
  double total = 0.0;
  for (const Candidate& c : kept) total += weight(c.logit, largest, row.temperature);
  keep_top_p(largest, total, row, kept);
}

// Buckets of equal width for the logits in [lowest, largest], the largest in bucket 0.
struct Buckets {
  static constexpr int kCount = 4096;
  float largest;
  float scale;

  Buckets(float largest_logit, float lowest)
      : largest(largest_logit), scale(static_cast<float>(kCount - 1) / std::max(largest_logit - lowest, 1e-30f)) {}
  // Never descends as the logit falls.
  int operator()(float logit) const { return std::min(static_cast<int>((largest - logit) * scale), kCount - 1); }
};

constexpr int64_t kSortable = 512;  // candidates that are sorted sooner than spread over buckets

// The last candidate that top-p keeps, among `candidates` and none of the others. Weights are summed by bucket, and only
// the bucket in which the sum reaches top_p is sorted.
Candidate last_of_top_p(const Candidates& candidates, const Buckets& bucket_of, double target,
                        const double* weights, Candidates& border) {
  double sums[Buckets::kCount] = {};
  for (const Candidate& c : candidates) sums[bucket_of(c.logit)] += weights[c.id];
  int bucket = 0;
  double cumulative = 0.0;
  while (bucket < Buckets::kCount - 1 && cumulative + sums[bucket] < target) cumulative += sums[bucket++];
  border.clear();
  for (const Candidate& c : candidates) {
    if (bucket_of(c.logit) == bucket) border.push_back(c);
  }
  std::sort(border.begin(), border.end(), before);
  int64_t last = 0;
  while (last + 1 < border.size() && (cumulative += weights[border[last].id]) < target) ++last;
  return border[last];
}

// Top-p over the whole vocabulary without sorting it. All tokens of probability below (1 - top_p) / V hold less
// than 1 - top_p together, so the prefix reaches top_p before any of them; half of that leaves room for rounding.
void keep_top_p_of_all(const Passes& passes, const float* logits, int64_t vocab_size, float largest,
                       const RowParams& row, Lists& lists) {
  const double total = passes.weigh(logits, vocab_size, largest, row.temperature, lists.weights);
  const double smallest = 0.5 * (1.0 - row.top_p) / static_cast<double>(vocab_size) * total;
  const auto lowest = static_cast<float>(largest + std::log(smallest) * row.temperature);
  Candidates& kept = lists.kept;
  collect(passes, logits, vocab_size, lowest, kept);
  if (kept.size() <= kSortable) {
    std::sort(kept.begin(), kept.end(), before);
    return keep_top_p(largest, total, row, kept);
  }
  const Candidate last = last_of_top_p(kept, Buckets(largest, lowest), row.top_p * total, lists.weights,
                                       lists.border);
  const auto is_cut = [&](const Candidate& c) { return before(last, c); };
  kept.resize(std::remove_if(kept.begin(), kept.end(), is_cut) - kept.begin());
}

// The tokens at least min_p times as likely as the most likely one, then top-k and top-p among them.
void keep_min_p(const float* logits, int64_t vocab_size, float largest, const RowParams& row,
                Candidates& kept) {
  const double lowest = static_cast<double>(largest) / row.temperature + std::log(row.min_p);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (static_cast<double>(logits[i]) / row.temperature < lowest) continue;
    kept.push_back({logits[i], static_cast<int32_t>(i)});
  }
  if (row.top_k < kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + row.top_k, kept.end(), before);
    kept.resize(row.top_k);
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

// Candidates in ascending order of ids may share Philox blocks.
int64_t draw_from(const Candidates& kept, const RowMax& top, const RowParams& row) {
  Draw draw(row);
  draw.offer(top.value, top.id);
  for (const Candidate& c : kept) draw.offer(c.logit, c.id);
  return draw.id();
}

int64_t sample_row(const Passes& passes, const float* logits, int64_t vocab_size, const RowParams& row,
                   Lists& lists) {
  const RowMax top = passes.row_max(logits, vocab_size);
  Candidates& kept = lists.kept;
  if (top.has_nan) return -1;
  if (row.temperature < kGreedyTemperature) return top.id;
  const bool all_k = row.top_k == vocab_size, all_p = row.top_p >= 1.0, all_min_p = row.min_p <= 0.0;
  if (all_k && all_p && all_min_p) return draw_from_all(logits, vocab_size, top.id, row);
  kept.clear();
  if (!all_min_p) {
    keep_min_p(logits, vocab_size, top.value, row, kept);
  } else if (all_k) {
    keep_top_p_of_all(passes, logits, vocab_size, top.value, row, lists);
  } else {
    keep_top_k(passes, logits, vocab_size, row.top_k, lists);
    if (!all_p) sort_and_keep_top_p(top.value, row, kept);
  }
  return draw_from(kept, top, row);
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
  const Passes passes = passes_of(isa);
  const int64_t work = args.num_rows * args.vocab_size;
  const size_t team = worth_a_team(args.num_rows, work, threads) ? static_cast<size_t>(threads) : 1;
  const size_t list_bytes = (Lists::num_bytes(args.vocab_size) + 63) / 64 * 64;
  thread_local std::vector<char> memory;  // of the calling thread, kept from call to call
  if (memory.size() < team * list_bytes) memory.resize(team * list_bytes);
  char* lists = memory.data();
  parallel_for(args.num_rows, work, threads, [&](int64_t r, int thread) {
    Lists own = Lists::at(lists + list_bytes * static_cast<size_t>(thread), args.vocab_size);
    args.out[r] = sample_row(passes, args.logits[r], args.vocab_size, row_params(args, r), own);
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
