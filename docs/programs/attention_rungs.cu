// The real rungs of paged attention, and what they read: docs/paged-attention-ladder.md.
// `attention_rungs RUNG SEQS HEADS KV_HEADS CONTEXT` runs one on float32 with D = 64 and B = 16.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
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

void run(int rung, int seqs, int heads, int kv_heads, int context) {
  const int blocks = (context + kBlockSize - 1) / kBlockSize;
  const size_t row = static_cast<size_t>(heads) * kHeadDim;
  std::vector<float> query = numbers(seqs * row, 1), out(seqs * row);
  const size_t cache = static_cast<size_t>(seqs * blocks + 1) * kBlockSize * kv_heads * kHeadDim;
  std::vector<float> keys = numbers(cache, 2), values = numbers(cache, 3);
  std::vector<int32_t> tables(static_cast<size_t>(seqs) * blocks), lens(seqs, context);
  // Neighbouring positions in distant blocks: the sequences' blocks alternate, from the end of the pool on.
  for (int s = 0; s < seqs; ++s) {
    for (int b = 0; b < blocks; ++b) tables[s * blocks + b] = seqs * blocks - (b * seqs + s);
  }
  const int splits = num_splits(context);
  const size_t parts = static_cast<size_t>(seqs) * heads * splits;
  std::vector<float> split_out(parts * kHeadDim), split_max(parts), split_sum(parts);

  PagedAttentionArguments<float> a{};
  a.out = out.data();
  a.query = query.data();
  a.k_cache = keys.data();
  a.v_cache = values.data();
  a.block_tables = tables.data();
  a.seq_lens = lens.data();
  a.out_stride = a.query_stride = static_cast<int64_t>(row);
  a.table_stride = blocks;
  a.num_seqs = seqs;
  a.num_heads = heads;
  a.num_kv_heads = kv_heads;
  a.head_dim = kHeadDim;
  a.block_size = kBlockSize;
  a.scale = 0.125f;
  a.split_out = split_out.data();
  a.split_max = split_max.data();
  a.split_sum = split_sum.data();
  a.num_splits = splits;
  watch_all("k", keys);
  watch_all("v", values);
  watch_all("query", query);
  watch_all("split", split_out);
  paged_attention<float>(a, context, rung, nullptr);
  double sum = 0.0;
  for (float x : out) sum += std::fabs(x);
  std::printf("sum %.4f\n", sum);
  watch::print();
}

}  // namespace

int main(int count, char** words) {
  if (count != 6) {
    std::printf("usage: attention_rungs RUNG SEQS HEADS KV_HEADS CONTEXT\n");
    return 64;
  }
  try {
    run(std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]), std::atoi(words[4]), std::atoi(words[5]));
    return 0;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 3;
  }
}
