// The real rungs of attention, and what they read: docs/paged-attention-ladder.md and docs/flash-attention.md.
// `attention_rungs decode|prefill RUNG ROWS HEADS KV_HEADS CONTEXT` runs one on float32 with D = 64 and B = 16; ROWS are
// sequences with a query each, or the newest tokens of one sequence.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "cuda/launchers.h"
#include "watch.h"

namespace {

using namespace twinfer::device;

constexpr int kHeadDim = 64, kBlockSize = 16;

// A number for each place that is no neighbour's.
std::vector<float> numbers(size_t count, unsigned seed) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>((i * 2654435761u + seed) % 1000) / 500.0f - 1.0f;
  return x;
}

template <class T>
void watch_all(const char* name, const std::vector<T>& x) {
  watch::region(name, x.data(), x.size() * sizeof(T));
}

// K and V of `seqs` sequences in one pool, whose blocks alternate: neighbouring positions lie in distant blocks.
struct Pool {
  int blocks_each;
  std::vector<float> keys, values;
  std::vector<int32_t> tables, lens;

  Pool(int seqs, int kv_heads, int context)
      : blocks_each((context + kBlockSize - 1) / kBlockSize), tables(static_cast<size_t>(seqs) * blocks_each),
        lens(seqs, context) {
    const size_t count = static_cast<size_t>(seqs * blocks_each + 1) * kBlockSize * kv_heads * kHeadDim;
    keys = numbers(count, 2);
    values = numbers(count, 3);
    for (int s = 0; s < seqs; ++s) {
      for (int b = 0; b < blocks_each; ++b) tables[s * blocks_each + b] = seqs * blocks_each - (b * seqs + s);
    }
    watch_all("k", keys);
    watch_all("v", values);
  }

  // The arguments that both operations have.
  template <class Arguments>
  void fill(Arguments& a, int heads, int kv_heads) const {
    a.k_cache = keys.data();
    a.v_cache = values.data();
    a.block_tables = tables.data();
    a.seq_lens = lens.data();
    a.out_stride = a.query_stride = static_cast<int64_t>(heads) * kHeadDim;
    a.table_stride = blocks_each;
    a.num_seqs = static_cast<int>(lens.size());
    a.num_heads = heads;
    a.num_kv_heads = kv_heads;
    a.head_dim = kHeadDim;
    a.block_size = kBlockSize;
    a.scale = 0.125f;
  }
};

void print_sum(const std::vector<float>& out) {
  double sum = 0.0;
  for (float x : out) sum += std::fabs(x);
  std::printf("sum %.4f\n", sum);
  watch::print();
}

// One query a sequence, `rows` sequences.
void run_decode(int rung, int rows, int heads, int kv_heads, int context) {
  const Pool pool(rows, kv_heads, context);
  const std::vector<float> query = numbers(static_cast<size_t>(rows) * heads * kHeadDim, 1);
  std::vector<float> out(query.size());
  const int splits = num_splits(context);
  const size_t parts = static_cast<size_t>(rows) * heads * splits;
  std::vector<float> split_out(parts * kHeadDim), split_max(parts), split_sum(parts);
  watch_all("split", split_out);
  PagedAttentionArguments<float> a{};
  pool.fill(a, heads, kv_heads);
  a.out = out.data();
  a.query = query.data();
  a.split_out = split_out.data();
  a.split_max = split_max.data();
  a.split_sum = split_sum.data();
  a.num_splits = splits;
  paged_attention<float>(a, context, rung, nullptr);
  print_sum(out);
}

// One sequence, its newest `rows` tokens.
void run_prefill(int rung, int rows, int heads, int kv_heads, int context) {
  const Pool pool(1, kv_heads, context);
  const std::vector<float> query = numbers(static_cast<size_t>(rows) * heads * kHeadDim, 1);
  const std::vector<int32_t> starts{0, rows};
  std::vector<float> out(query.size());
  PrefillAttentionArguments<float> a{};
  pool.fill(a, heads, kv_heads);
  a.out = out.data();
  a.query = query.data();
  a.query_start_loc = starts.data();
  a.num_tokens = rows;
  prefill_attention<float>(a, rows, rung, nullptr);
  print_sum(out);
}

}  // namespace

int main(int count, char** words) {
  const std::string step = count == 7 ? words[1] : "";
  if (step != "decode" && step != "prefill") {
    std::printf("usage: attention_rungs decode|prefill RUNG ROWS HEADS KV_HEADS CONTEXT\n");
    return 64;
  }
  try {
    (step == "decode" ? run_decode : run_prefill)(std::atoi(words[2]), std::atoi(words[3]), std::atoi(words[4]),
                                                  std::atoi(words[5]), std::atoi(words[6]));
    return 0;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 3;
  }
}
