// Jobs and scratch memory of paged attention, shared by the copies for every instruction set.
#pragma once

#include <cstdint>

namespace twinfer::cpu {

// Context tokens per pass of the online softmax, and per part of a context. A part is attended to on its own; parts are
// merged in the order of their tokens. Both are anchored at position 0 of the sequence: they depend neither on where a
// query row stands in its chunk, nor on the rest of the batch, nor on the number of threads.
constexpr int kTile = 64;
constexpr int kPart = 256;

// Query rows of one job, counted per head of one KV head. Enough to pay for transposing a K tile; few enough for
// Scratch to stay in the second-level cache.
constexpr int kMaxJobRows = 96;

// Rows that go through a tile together.
constexpr int kMaxBlockRows = 6;

// What a job has summed up for M rows, relative to the largest score so far. Nothing: row_sum = 0.
struct Softmax {
  float* acc;       // [M, width], sum of exp(score - row_max) * V
  float* row_max;   // [M]
  float* row_sum;   // [M], sum of exp(score - row_max)
};

// Query rows [first_row, first_row + num_rows) of sequence `seq`, for the query heads of some KV heads, and some parts
// of their context. The first row has a context of `first_context` tokens, its own included, each following row of one
// more; of its context a row sees the last `sliding_window` tokens.
struct AttentionJob {
  int64_t seq;
  int64_t first_row;
  int num_rows;
  int64_t first_context;
  int first_head;                 // of the KV heads
  int num_heads;
  int64_t first_part, end_part;
  Softmax part;                   // where the result of one part goes; with acc = null the job does all parts

  int64_t longest_context() const { return first_context + num_rows - 1; }
};

// One thread's memory. M = num_heads * num_rows * (H / Hkv) rows, ordered by KV head, token, query head. `width` is D
// rounded up so that whole vectors of any instruction set can be loaded; what stands in the padding is never used.
struct Scratch {
  float* query;     // [M, width], scaled
  float* weights;   // [kMaxBlockRows, kTile], scores, then exp(score - row_max)
  float* keys;      // [D, kTile], the K tile of one head transposed
  float* values;    // [kTile, width], only when D is no multiple of a vector
  Softmax all, part;
  int width;
};

}  // namespace twinfer::cpu
