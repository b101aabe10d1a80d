// Paged attention on random ragged batches, shapes, windows and thread counts, each row against a softmax in float64 and
// bit for bit against the same call on one thread. tests/kernels/test_sanitizers.py builds this with the address and
// undefined-behaviour sanitizers, and with ThreadSanitizer: buffers have exactly the size that the kernel may touch.
// Also what products ask for on its behalf (csrc/cpu/read_ahead.h): each line that it will read, and no other.
//
// Usage: attention_shapes CASES. TWINFER_ISA forces an instruction set. Exit status 1 and a line for the first wrong row.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/paged_attention.h"

namespace {

using namespace twinfer::cpu;

struct Batch {
  PagedAttention call{};
  std::vector<float> out, query, k_cache, v_cache;
  std::vector<int32_t> tables, starts{0}, lens;
  int64_t max_blocks = 0;
};

std::vector<float> random_floats(std::mt19937& random, int64_t count) {
  std::vector<float> floats(static_cast<size_t>(count));
  std::normal_distribution<float> normal;
  for (float& x : floats) x = normal(random);
  return floats;
}

int below(std::mt19937& random, int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); }

// Short sequences, and now and then one of several parts.
void add_sequences(std::mt19937& random, Batch& batch, int block_size) {
  const int count = 1 + below(random, 6);
  for (int s = 0; s < count; ++s) {
    const int rows = below(random, 4) == 0 ? 1 + below(random, 150) : below(random, 3);
    const int computed = below(random, 8) == 0 ? below(random, 1600) : below(random, 140);
    batch.starts.push_back(batch.starts.back() + rows);
    batch.lens.push_back(computed + rows);
    batch.max_blocks = std::max<int64_t>(batch.max_blocks, (computed + rows + block_size - 1) / block_size);
  }
}

Batch random_batch(std::mt19937& random) {
  Batch batch;
  const int block_sizes[] = {1, 4, 8, 16}, head_dims[] = {64, 64, 128, 32, 80, 33, 5};
  const int block_size = block_sizes[below(random, 4)], head_dim = head_dims[below(random, 7)];
  const int kv_heads = 1 + below(random, 3), heads = kv_heads * (1 + below(random, 7));
  add_sequences(random, batch, block_size);
  const auto num_seqs = static_cast<int64_t>(batch.lens.size());
  const int64_t num_tokens = batch.starts.back(), num_blocks = num_seqs * batch.max_blocks;
  batch.tables.resize(static_cast<size_t>(num_blocks));
  std::iota(batch.tables.begin(), batch.tables.end(), 0);
  std::shuffle(batch.tables.begin(), batch.tables.end(), random);
  batch.query = random_floats(random, num_tokens * heads * head_dim);
  batch.out.assign(batch.query.size(), NAN);
  batch.k_cache = random_floats(random, num_blocks * block_size * kv_heads * head_dim);
  batch.v_cache = random_floats(random, num_blocks * block_size * kv_heads * head_dim);
  const int64_t window = below(random, 2) == 0 ? kNoWindow : 1 + below(random, below(random, 2) == 0 ? 70 : 1200);
  const int64_t row = int64_t{heads} * head_dim;
  batch.call = {{batch.out.data(), row}, {batch.query.data(), row}, batch.k_cache.data(), batch.v_cache.data(),
                {batch.tables.data(), batch.max_blocks}, batch.starts.data(), batch.lens.data(), num_seqs, heads,
                kv_heads, head_dim, block_size, window, 1.0f / std::sqrt(static_cast<float>(head_dim))};
  return batch;
}

std::vector<double> expected_head(const PagedAttention& a, int64_t seq, int64_t row, int head) {
  const int64_t end = a.seq_lens[seq] - (a.query_start_loc[seq + 1] - row) + 1;
  const int64_t begin = std::max<int64_t>(0, end - a.sliding_window);
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const float* query = a.query[row] + int64_t{head} * a.head_dim;
  const auto at = [&](const float* cache, int64_t token) {
    const int64_t slot = int64_t{a.block_tables[seq][token / a.block_size]} * a.block_size + token % a.block_size;
    return cache + (slot * a.num_kv_heads + kv_head) * a.head_dim;
  };
  std::vector<double> scores, out(static_cast<size_t>(a.head_dim));
  for (int64_t t = begin; t < end; ++t) {
    double sum = 0;
    for (int d = 0; d < a.head_dim; ++d) sum += double{query[d]} * at(a.k_cache, t)[d];
    scores.push_back(sum * a.scale);
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  for (double& score : scores) total += score = std::exp(score - largest);
  for (int64_t t = begin; t < end; ++t) {
    const double weight = scores[static_cast<size_t>(t - begin)] / total;
    for (int d = 0; d < a.head_dim; ++d) out[static_cast<size_t>(d)] += weight * at(a.v_cache, t)[d];
  }
  return out;
}

using Lines = std::set<std::pair<bool, int64_t>>;  // (of V, number of the line in its cache)

// The lines of the tokens that rows see, for sequences whose rows go through a tile together.
Lines lines_seen(const PagedAttention& a) {
  Lines lines;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t rows = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
    if (rows == 0 || rows > kMaxJobRows / (a.num_heads / a.num_kv_heads)) continue;
    const int64_t first = std::max<int64_t>(0, a.seq_lens[seq] - rows + 1 - a.sliding_window);
    for (int64_t token = first; token < a.seq_lens[seq]; ++token) {
      const int64_t slot = int64_t{a.block_tables[seq][token / a.block_size]} * a.block_size + token % a.block_size;
      const int64_t begin = slot * a.num_kv_heads * a.head_dim;
      for (int64_t at = begin; at < begin + a.num_kv_heads * a.head_dim; at += kLineFloats) {
        for (const bool is_value : {false, true}) lines.insert({is_value, at / kLineFloats});
      }
    }
  }
  return lines;
}

// What several products with several chunks each ask for.
Lines lines_asked_for(std::mt19937& random, const PagedAttention& a, int threads) {
  const ContextLines contexts = lines_to_read(a, threads);
  Lines lines;
  double cuts[] = {0, random() / 4294967296.0, 1};
  for (int product = 0; product < 2; ++product) {
    ReadAhead ahead{&contexts, a.k_cache, a.v_cache, cuts[product], cuts[product + 1]};
    for (int thread = 0; thread < threads; ++thread) {
      const int64_t chunks = 1 + below(random, 9);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const LinesAhead part = lines_of_thread(ahead, thread).part(chunk, chunks);
        Runs runs(part, 1 + (part.end - part.begin) / (1 + below(random, Run::kRequests)));
        for (Run run = runs.next(nullptr); run.step > 0; run = runs.next(nullptr)) {
          const auto of = [&](const float* cache) { return reinterpret_cast<const float*>(run.at) - cache; };
          const int64_t in_values = of(a.v_cache), in_keys = of(a.k_cache);
          const bool is_value = a.v_cache > a.k_cache ? in_values >= 0 : in_keys < 0;
          const int64_t first = is_value ? in_values : in_keys;
          for (int i = 0; i < Run::kRequests; ++i) lines.insert({is_value, (first + i * run.step / 4) / kLineFloats});
        }
      }
    }
  }
  return lines;
}

bool asks_for_what_it_reads(std::mt19937& random, const PagedAttention& a) {
  const Lines asked = lines_asked_for(random, a, 1 + below(random, 4)), seen = lines_seen(a);
  if (!std::includes(seen.begin(), seen.end(), asked.begin(), asked.end())) return false;
  return asked.size() == seen.size() || seen.size() * kLineBytes > (size_t{4} << 20);  // no more than that is asked for
}

bool run_case(unsigned seed, Isa isa) {
  std::mt19937 random(seed);
  Batch batch = random_batch(random);
  paged_attention(batch.call, isa, 1);
  const std::vector<float> alone = batch.out;
  if (alone.empty()) return true;  // no rows, no work
  std::fill(batch.out.begin(), batch.out.end(), NAN);
  paged_attention(batch.call, isa, 2 + below(random, 3));
  if (std::memcmp(alone.data(), batch.out.data(), alone.size() * sizeof(float)) != 0) {
    std::printf("case %u: other bits with several threads\n", seed);
    return false;
  }
  const PagedAttention& a = batch.call;
  const bool has_whole_lines = int64_t{a.num_kv_heads} * a.head_dim % kLineFloats == 0;
  if (has_whole_lines && !asks_for_what_it_reads(random, a)) {
    std::printf("case %u: other lines are asked for than are read\n", seed);
    return false;
  }
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    for (int64_t row = a.query_start_loc[seq]; row < a.query_start_loc[seq + 1]; row += 1 + below(random, 40)) {
      const int head = below(random, a.num_heads);
      const std::vector<double> expected = expected_head(a, seq, row, head);
      for (int d = 0; d < a.head_dim; ++d) {
        const float got = a.out[row][head * a.head_dim + d];
        // The tolerance of tests/kernels/oracles.py: float32 rounds at 6e-8, in sums of up to 1,600 terms.
        if (std::abs(got - expected[static_cast<size_t>(d)]) <= 1e-5) continue;
        std::printf("case %u, sequence %lld, row %lld, head %d: %.9g, expected %.9g\n", seed,
                    static_cast<long long>(seq), static_cast<long long>(row), head, double{got},
                    expected[static_cast<size_t>(d)]);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CASES\n", argv[0]);
    return 2;
  }
  const Isa isa = active_isa();
  const int cases = std::atoi(argv[1]);
  for (int i = 0; i < cases; ++i) {
    if (!run_case(static_cast<unsigned>(i), isa)) return 1;
  }
  std::printf("%d cases, %s\n", cases, isa_name(isa));
  return 0;
}
