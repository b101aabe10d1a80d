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
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/sampler.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/linear.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

constexpr int64_t kMaxChunkInputs = 192 * 1024;  // 768 KB of x: every tile reads them again
constexpr int64_t kMinChunkRows = 48;  // below this, decoding the weights again for each chunk of rows would show

int64_t work_of(const Linear& args) {
  return args.num_tokens * args.weight->out_features() * args.weight->in_features() / 2;
}

int64_t num_tiles(const PackedMatrix& weight) { return static_cast<int64_t>(weight.tiles().size()); }

// How a product is cut up: tiles [0, num_tiles) times all rows. It decides who computes what, never what is computed.
class ChunkPlan {
 public:
  ChunkPlan(const Linear& args, int64_t num_tiles, int threads)
      : weight_(args.weight), num_rows_(args.num_tokens), num_tiles_(num_tiles),
        threads_(worth_a_team(num_tiles * num_rows_, work_of(args), threads) ? threads : 1) {
    rows_per_chunk_ = std::clamp(kMaxChunkInputs / weight_->in_features(), kMinChunkRows, rows_per_chunk_);
    while (threads_ > 1 && num_whole() < 4 * threads_ && rows_per_chunk_ > kMinChunkRows) rows_per_chunk_ /= 2;
    // Where the last round has not a chunk for each thread, its chunks are cut once more, by their rows.
    last_round_ = threads_ > 1 && rows_of_last_chunks() > 1 ? num_whole() % threads_ : 0;
    if (last_round_ > 0) pieces_ = std::min<int64_t>((threads_ + last_round_ - 1) / last_round_, rows_of_last_chunks());
  }

  int64_t num_chunks() const { return num_whole() + last_round_ * (pieces_ - 1); }
  int64_t num_pieces() const { return last_round_ * pieces_; }  // the last of the chunks

  LinearChunk operator[](int64_t index) const {
    if (index < num_shared()) return whole(index);
    LinearChunk piece = whole(num_shared() + (index - num_shared()) / pieces_);
    const int64_t i = (index - num_shared()) % pieces_, begin = piece.num_rows * i / pieces_;
    piece.num_rows = static_cast<int>(piece.num_rows * (i + 1) / pieces_ - begin);
    piece.first_row += begin;
    return piece;
  }

  // The chunk, and what its thread reads later: the chunks of a thread's share ask for it in about equal parts. `next`
  // is the product that comes after this one, or null.
  LinearChunk with_ahead(int64_t index, const ReadAhead& ahead, const ChunkPlan* next) const {
    LinearChunk chunk = (*this)[index];
    if (index >= num_shared()) return chunk;  // nobody's: whoever is free first takes it
    const int64_t thread = ThreadPool::share_of(index, num_shared(), threads_);
    const int64_t begin = share_begin(thread), end = share_begin(thread + 1);
    chunk.starts_share = index == begin;
    chunk.ahead = lines_of_thread(ahead, static_cast<int>(thread)).part(index - begin, end - begin);
    if (next != nullptr && row_chunks() == 1) {
      chunk.share_end = data_at(end);
      chunk.next_share = next->data_at(next->share_begin(thread));
    }
    return chunk;
  }

 private:
  int64_t row_chunks() const { return (num_rows_ + rows_per_chunk_ - 1) / rows_per_chunk_; }
  int64_t num_whole() const { return num_tiles_ * row_chunks(); }
  int64_t num_shared() const { return num_whole() - last_round_; }
  int64_t rows_of_last_chunks() const { return num_rows_ - (row_chunks() - 1) * rows_per_chunk_; }
  int64_t share_begin(int64_t thread) const {
    return ThreadPool::share_begin(num_shared(), std::min<int64_t>(thread, threads_), threads_);
  }

  // Where the tile of a chunk lies; behind the last one, where the matrix ends.
  const uint8_t* data_at(int64_t index) const {
    if (index == num_whole()) return weight_->end();
    return weight_->tiles()[static_cast<size_t>(index % num_tiles_)].data;
  }

  // Chunks of the same rows follow each other: their part of x stays in the cache.
  LinearChunk whole(int64_t index) const {
    const int64_t row = index / num_tiles_ * rows_per_chunk_;
    LinearChunk chunk{};
    chunk.tile = weight_->tiles().data() + index % num_tiles_;
    chunk.depth = weight_->in_features();
    chunk.first_row = row;
    chunk.num_rows = static_cast<int>(std::min(rows_per_chunk_, num_rows_ - row));
    return chunk;
  }

  const PackedMatrix* weight_;
  int64_t num_rows_, num_tiles_;
  int threads_;
  int64_t rows_per_chunk_ = kMaxChunkRows;
  int64_t last_round_ = 0, pieces_ = 1;  // chunks that are cut by their rows, and into how many
};

std::optional<ChunkPlan> plan_of_next(const Linear& args, int threads) {
  const PackedMatrix* weight = args.ahead.next_weight;
  if (weight == nullptr) return std::nullopt;
  const Linear next{{nullptr, 0}, {nullptr, 0}, weight, nullptr, args.num_tokens};
  return ChunkPlan(next, num_tiles(*weight) / (args.ahead.next_in_halves ? 2 : 1), threads);
}

// Calls body(chunk, thread) for every chunk.
template <class Body>
void for_each_chunk(const Linear& args, int64_t num_tiles, int threads, const Body& body) {
  const ChunkPlan plan(args, num_tiles, threads);
  const std::optional<ChunkPlan> next = plan_of_next(args, threads);
  const auto compute = [&](int64_t index, int thread) {
    body(plan.with_ahead(index, args.ahead, next ? &*next : nullptr), thread);
  };
  parallel_for(plan.num_chunks(), work_of(args), threads, compute, plan.num_pieces());
}

}  // namespace

int tile_columns(Isa isa) { return TWINFER_DISPATCH(isa, kTileColumns); }

void linear(const Linear& args, Isa isa, int threads) {
  if (args.num_tokens == 0) return;
  const auto multiply = TWINFER_DISPATCH(isa, store_chunk);
  for_each_chunk(args, num_tiles(*args.weight), threads, [&](const LinearChunk& chunk, int) { multiply(args, chunk); });
}

bool has_equal_halves(const PackedMatrix& weight) {
  const std::vector<PackedTile>& tiles = weight.tiles();
  return tiles.size() % 2 == 0 && 2 * tiles[tiles.size() / 2].first_column == weight.out_features();
}

void linear_silu_and_mul(const LinearSiluAndMul& args, Isa isa, int threads) {
  if (args.num_tokens == 0) return;
  const Linear product{args.out, args.x, args.weight, args.bias, args.num_tokens, args.ahead};
  const int64_t half = num_tiles(*args.weight) / 2;
  const auto multiply = TWINFER_DISPATCH(isa, silu_and_mul_chunk);
  for_each_chunk(product, half, threads, [&](const LinearChunk& both, int) {
    LinearChunk gate = both, up = both;
    gate.ahead = both.ahead.part(0, 2);
    up.ahead = both.ahead.part(1, 2);
    up.starts_share = false;
    up.tile += half;
    multiply(product, gate, up);
  });
}

void linear_argmax(const LinearArgmax& args, Isa isa, int threads) {
  if (args.num_tokens == 0) return;
  const Linear product{{nullptr, 0}, args.x, args.weight, nullptr, args.num_tokens};
  const auto argmax = TWINFER_DISPATCH(isa, argmax_chunk);
  const RowMax nothing{-std::numeric_limits<float>::infinity(), -1, false};
  std::vector<RowMax> best(static_cast<size_t>(threads * args.num_tokens), nothing);  // [threads, T]
  for_each_chunk(product, num_tiles(*args.weight), threads, [&](const LinearChunk& chunk, int thread) {
    argmax(product, chunk, best.data() + thread * args.num_tokens);
  });
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    RowMax row = nothing;
    for (int64_t i = t; i < threads * args.num_tokens; i += args.num_tokens) row.take(best[static_cast<size_t>(i)]);
    args.out[t] = row.has_nan ? -1 : row.id;
  }
}

void embedding(const Embedding& args, int threads) {
  parallel_rows(args.num_tokens, 4 * args.weight->in_features(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) args.weight->unpack_row(args.ids[t], args.out[t]);
  });
}

}  // namespace twinfer::cpu
