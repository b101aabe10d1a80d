// What csrc/cpu/linear.cpp and its bodies share.
#pragma once

#include <cstdint>

#include "cpu/packed_matrix.h"
#include "cpu/read_ahead.h"

namespace twinfer::cpu {

constexpr int kTileVecs = 4;           // vectors across a tile
constexpr int kMaxChunkRows = 192;     // rows of x a chunk: with its sums they stay in the second-level cache
constexpr int kSumDepth = 32;          // inputs that are summed in one chain
constexpr int kPanelDepth = 64;        // inputs decoded at a time, a multiple of kSumDepth: they stay in the first-level cache

// A part of the product: one tile for some rows of x.
struct LinearChunk {
  const PackedTile* tile;
  int64_t depth;                  // C
  int64_t first_row;
  int num_rows;                   // at most kMaxChunkRows
  bool starts_share = false;      // its thread has not read x yet
  LinesAhead ahead{};
  const uint8_t* share_end = nullptr;   // where the weights of its thread's share end, and those of its next one begin
  const uint8_t* next_share = nullptr;
};

}  // namespace twinfer::cpu
