// A weight matrix [F, C] (F outputs, C inputs) in the type its file stores, repacked once, at load, into the order in
// which the kernel of csrc/cpu/linear.inc reads it.
//
// Tile: the weights of `tile_columns` consecutive outputs (the columns of the product), for all C inputs. A vector of
// the kernel then holds one input's weights for neighbouring outputs, and no sum ever crosses lanes.
// Quantised types keep their blocks of 32 inputs and their 16-bit scales, so a tile takes the bytes that its rows took:
//   words   [32 / k][tile_columns] uint32, the next k quants of one output, the first input in the lowest bits
//           (Q4: k = 8 numbers of 4 bits; Q8: k = 4 of 8 bits, stored as q + 128)
//   scales  [tile_columns] float16 d, and for Q4_1 [tile_columns] float16 m behind them
// F32, F16 and BF16 are [C][tile_columns] numbers. Columns past the last output are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace twinfer::cpu {

enum class WeightType { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1 };

// Weights come in blocks of so many inputs that share a scale; types without scales have blocks of one.
struct WeightFormat {
  const char* name;
  int block_depth;
  int block_bytes;
};

// In the order of WeightType.
constexpr WeightFormat kWeightFormats[] = {{"F32", 1, 4},    {"F16", 1, 2},    {"BF16", 1, 2},
                                           {"Q8_0", 32, 34}, {"Q4_0", 32, 18}, {"Q4_1", 32, 20}};

inline const WeightFormat& format_of(WeightType type) { return kWeightFormats[static_cast<size_t>(type)]; }

struct PackedTile {
  const uint8_t* data;
  WeightType type;
  int columns;                    // outputs in it: fewer than tile_columns in the last one of a part
  int64_t first_column;
};

class PackedMatrix {
 public:
  // Rows as they are stored: [num_rows, row_bytes] with any stride.
  struct Part {
    WeightType type;
    const uint8_t* rows;
    int64_t row_stride;           // bytes
    int64_t num_rows;
  };

  // Stacks the parts along F; each begins a tile of its own. C must be a multiple of every part's block_depth.
  PackedMatrix(const std::vector<Part>& parts, int64_t in_features, int tile_columns, int threads);

  int64_t in_features() const { return in_features_; }    // C
  int64_t out_features() const { return out_features_; }  // F
  size_t num_bytes() const { return num_bytes_; }
  const std::vector<PackedTile>& tiles() const { return tiles_; }
  const uint8_t* end() const { return memory_.get() + num_bytes_; }

  // Writes the C weights of one output, as float32: the numbers that the kernel multiplies by.
  void unpack_row(int64_t row, float* out) const;

 private:
  int64_t in_features_;
  int64_t out_features_ = 0;
  int tile_columns_;
  size_t num_bytes_ = 0;
  std::vector<PackedTile> tiles_;
  std::shared_ptr<uint8_t> memory_;
};

}  // namespace twinfer::cpu
