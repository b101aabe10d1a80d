// Paged attention over a ragged batch: prefill chunks and decodes in one call.
//
// Invariant: what a query row gets depends on its query and its context alone. Every row walks its context in the
// same tiles and, inside a tile, adds in the same order; the number of rows processed together, the threads and the
// batch only decide when that happens. This is what makes generation batch-invariant, and the tests demand equal
// bits.
//
// The online softmax is that of Milakov and Gimelshein (2018), tiled as in FlashAttention (Dao et al., 2022); the
// block table is vLLM's (Kwon et al., 2023).
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/paged_attention.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/paged_attention.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

constexpr int kFloatsPerLine = 16;  // a cache line, and the widest vector

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], AlignedDelete>;

AlignedFloats allocate_zeros(size_t count) {
  AlignedFloats floats(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
  std::fill_n(floats.get(), count, 0.0f);
  return floats;
}

size_t round_up(size_t count) { return (count + kFloatsPerLine - 1) / kFloatsPerLine * kFloatsPerLine; }

// Splits every sequence's query rows into items and returns them with the longest context first: the last item to
// finish is then a short one.
std::vector<AttentionItem> split(const PagedAttention& args) {
  const int rows_per_item = std::max(1, kMaxItemRows / (args.num_heads / args.num_kv_heads));
  std::vector<AttentionItem> items;
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t begin = args.query_start_loc[s], end = args.query_start_loc[s + 1];
    const int64_t computed = args.seq_lens[s] - (end - begin);
    for (int64_t row = begin; row < end; row += rows_per_item) {
      const int num_rows = static_cast<int>(std::min<int64_t>(rows_per_item, end - row));
      items.push_back({s, row, num_rows, computed + (row - begin) + 1});
    }
  }
  std::sort(items.begin(), items.end(), [](const AttentionItem& a, const AttentionItem& b) {
    return a.first_context != b.first_context ? a.first_context > b.first_context : a.first_row < b.first_row;
  });
  return items;
}

struct ScratchLayout {
  size_t rows;   // M
  size_t depth;  // D
  size_t width;

  size_t row_floats() const { return round_up(rows * width); }
  size_t size() const {
    return 2 * row_floats() + rows * kTile + depth * kTile + kTile * width + 2 * round_up(rows);
  }
  Scratch at(float* base) const {
    Scratch scratch{};
    const auto take = [&base](size_t count) { return std::exchange(base, base + count); };
    scratch.query = take(row_floats());
    scratch.acc = take(row_floats());
    scratch.weights = take(rows * kTile);
    scratch.keys = take(depth * kTile);
    scratch.values = take(kTile * width);
    scratch.row_max = take(round_up(rows));
    scratch.row_sum = take(round_up(rows));
    scratch.width = static_cast<int>(width);
    return scratch;
  }
};

}  // namespace

void paged_attention(const PagedAttention& args, Isa isa, int threads) {
  const std::vector<AttentionItem> items = split(args);
  const int group = args.num_heads / args.num_kv_heads;
  int64_t most_rows = 0, work = 0;
  for (const AttentionItem& item : items) {
    most_rows = std::max<int64_t>(most_rows, item.num_rows);
    // Two multiply-adds for each head, context token and dimension, eight or so at a time.
    const int64_t seen = std::min(item.first_context, args.sliding_window);
    work += item.num_rows * args.num_heads * seen * args.head_dim / 4;
  }
  const int64_t jobs = static_cast<int64_t>(items.size()) * args.num_kv_heads;
  const size_t depth = static_cast<size_t>(args.head_dim);
  const ScratchLayout layout{static_cast<size_t>(most_rows * group), depth, round_up(depth)};
  const int team = worth_a_team(jobs, work, threads) ? threads : 1;
  const AlignedFloats memory = allocate_zeros(layout.size() * static_cast<size_t>(team));

  const auto attend = args.head_dim == 64    ? TWINFER_DISPATCH(isa, attend<64>)
                      : args.head_dim == 128 ? TWINFER_DISPATCH(isa, attend<128>)
                                             : TWINFER_DISPATCH(isa, attend<0>);
  parallel_for(jobs, work, threads, [&](int64_t job, int thread) {
    const Scratch scratch = layout.at(memory.get() + layout.size() * static_cast<size_t>(thread));
    attend(args, items[static_cast<size_t>(job / args.num_kv_heads)], static_cast<int>(job % args.num_kv_heads),
           scratch);
  });
}

}  // namespace twinfer::cpu
