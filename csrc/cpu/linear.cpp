// y = x W^T + b with W packed (csrc/cpu/packed_matrix.h) and x in float32.
//
// Invariant: the inputs are summed in blocks of kSumDepth, each by one chain from zero, sum = fma(x[k], w[k], sum) with
// ascending k; the sums of the blocks are added in their order, and the bias last. This holds for any number of rows,
// any split into chunks and any number of threads; it is what makes generation batch-invariant, and the tests demand
// equal bits. AVX2 and AVX-512 agree bit for bit too; the baseline rounds each product, since it cannot fuse.
// One chain over all inputs would be simpler and has three times the error at C = 576, four times at 1536.
//
// A weight is q * d + m of numbers with 4 or 8 and 11 bits: the product is exact, so that w is rounded once at most and
// has the bits of the dequantised float32 weight that the reference tier multiplies by.
#include "cpu/linear.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/sampler.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/linear.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

// Weights that one chunk should read at least when few rows make the product wait for memory: shorter streams end
// before the prefetcher has caught up with them.
constexpr int64_t kMinChunkBytes = 96 * 1024;
constexpr int64_t kMinChunkRows = 48;  // below this, decoding the weights again for each chunk of rows would show

struct ChunkPlan {
  const PackedMatrix* weight;
  int64_t num_rows;
  int64_t rows_per_chunk, tiles_per_chunk;

  int64_t num_tiles() const { return static_cast<int64_t>(weight->tiles().size()); }
  int64_t tile_chunks() const { return (num_tiles() + tiles_per_chunk - 1) / tiles_per_chunk; }
  int64_t num_chunks() const { return tile_chunks() * ((num_rows + rows_per_chunk - 1) / rows_per_chunk); }

  // Chunks of the same rows follow each other: their part of x stays in the cache.
  LinearChunk operator[](int64_t index) const {
    const int64_t tile = index % tile_chunks() * tiles_per_chunk, row = index / tile_chunks() * rows_per_chunk;
    return {weight->tiles().data() + tile, std::min(tiles_per_chunk, num_tiles() - tile), weight->in_features(), row,
            static_cast<int>(std::min(rows_per_chunk, num_rows - row))};
  }
};

ChunkPlan plan_chunks(const Linear& args, int threads) {
  ChunkPlan plan{args.weight, args.num_tokens, kMaxChunkRows, 1};
  const int64_t num_tiles = plan.num_tiles();
  const int64_t tile_bytes = static_cast<int64_t>(args.weight->num_bytes()) / num_tiles;
  const int64_t most = std::max<int64_t>(1, num_tiles / (2 * threads));
  plan.tiles_per_chunk = std::clamp<int64_t>(kMinChunkBytes / (tile_bytes * args.num_tokens), 1, most);
  while (threads > 1 && plan.num_chunks() < 4 * threads && plan.rows_per_chunk > kMinChunkRows) {
    plan.rows_per_chunk /= 2;
  }
  return plan;
}

int64_t work_of(const Linear& args) {
  return args.num_tokens * args.weight->out_features() * args.weight->in_features() / 2;
}

}  // namespace

int tile_columns(Isa isa) { return TWINFER_DISPATCH(isa, kTileColumns); }

void linear(const Linear& args, Isa isa, int threads) {
  if (args.num_tokens == 0) return;
  const ChunkPlan plan = plan_chunks(args, threads);
  const auto multiply = TWINFER_DISPATCH(isa, store_chunk);
  parallel_for(plan.num_chunks(), work_of(args), threads, [&](int64_t chunk, int) { multiply(args, plan[chunk]); });
}

void linear_argmax(const LinearArgmax& args, Isa isa, int threads) {
  if (args.num_tokens == 0) return;
  const Linear product{{nullptr, 0}, args.x, args.weight, nullptr, args.num_tokens};
  const ChunkPlan plan = plan_chunks(product, threads);
  const auto argmax = TWINFER_DISPATCH(isa, argmax_chunk);
  // [tile chunks, T]: chunks of other columns of a row may be computed at the same time
  std::vector<RowMax> best(static_cast<size_t>(plan.tile_chunks() * args.num_tokens));
  parallel_for(plan.num_chunks(), work_of(product), threads, [&](int64_t index, int) {
    const LinearChunk chunk = plan[index];
    argmax(product, chunk, best.data() + index % plan.tile_chunks() * args.num_tokens + chunk.first_row);
  });
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    RowMax row = best[static_cast<size_t>(t)];
    for (int64_t i = 1; i < plan.tile_chunks(); ++i) {
      const RowMax& other = best[static_cast<size_t>(i * args.num_tokens + t)];
      const bool has_nan = row.has_nan || other.has_nan;
      if (other.value > row.value) row = other;
      row.has_nan = has_nan;
    }
    args.out[t] = row.has_nan ? -1 : row.id;
  }
}

void embedding(const Embedding& args, int threads) {
  parallel_rows(args.num_tokens, 4 * args.weight->in_features(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) args.weight->unpack_row(args.ids[t], args.out[t]);
  });
}

}  // namespace twinfer::cpu
