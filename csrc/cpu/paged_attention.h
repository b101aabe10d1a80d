// Work items and scratch memory of paged attention, shared by the copies for every instruction set.
#pragma once

#include <cstdint>

namespace twinfer::cpu {

// Context tokens per pass of the online softmax. Tiles are anchored at position 0 of the sequence: they depend
// neither on where a query row stands in its chunk nor on the rest of the batch.
constexpr int kTile = 64;

// Query rows of one work item, counted per head. Large enough to pay for loading and transposing a K tile (the
// rows of a prefill chunk share it), small enough for all of Scratch to stay in the second-level cache.
constexpr int kMaxItemRows = 32;

// Query rows [first_row, first_row + num_rows) of sequence `seq`, for the query heads of one KV head. The first row
// has a context of `first_context` tokens, its own included, each following row of one more; of its context a row sees
// the last `sliding_window` tokens.
struct AttentionItem {
  int64_t seq;
  int64_t first_row;
  int num_rows;
  int64_t first_context;
};

// One thread's memory. M = num_rows * (H / Hkv) rows, ordered by token, then head. `width` is D rounded up so that
// whole vectors of any instruction set can be loaded; the padding is zero.
struct Scratch {
  float* query;     // [M, width], scaled
  float* acc;       // [M, width], sum of weight * V so far, relative to row_max
  float* weights;   // [M, kTile], scores, then exp(score - row_max)
  float* keys;      // [D, kTile], the K tile transposed
  float* values;    // [kTile, width], only when D is no multiple of a vector
  float* row_max;   // [M]
  float* row_sum;   // [M], sum of exp(score - row_max) so far
  int width;
};

}  // namespace twinfer::cpu
