#include "cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/weight_memory.h"

namespace twinfer::cpu {
namespace {

constexpr int kBlockDepth = 32;  // of all quantised types

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;  // the two exponents' biases differ by 112; exact, also where the half is subnormal
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (magnitude >= 0x0f800000) bits |= 0x7f800000;  // infinity and NaN
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half_to_float(half);
}

// Quants of a stored block as numbers of 4 or 8 bits, offset so that none is negative.
struct Quants {
  const uint8_t* bytes;
  bool eight_bits;

  uint32_t operator[](int k) const {
    if (eight_bits) return bytes[k] ^ 0x80u;  // int8 q -> q + 128
    return k < kBlockDepth / 2 ? bytes[k] & 15u : bytes[k - kBlockDepth / 2] >> 4;
  }
};

// How a quantised type lies in the file: its scales, then its quants.
struct QuantLayout {
  int num_scales;
  int bits;

  explicit QuantLayout(WeightType type)
      : num_scales(type == WeightType::kQ4_1 ? 2 : 1), bits(type == WeightType::kQ8_0 ? 8 : 4) {}
  int word_depth() const { return 32 / bits; }
  int num_words() const { return kBlockDepth / word_depth(); }
  Quants quants(const uint8_t* block) const { return {block + 2 * num_scales, bits == 8}; }
};

void pack_quantised(const QuantLayout& layout, const uint8_t* block, uint8_t* packed, int column, int tile_columns) {
  const Quants quants = layout.quants(block);
  for (int word = 0; word < layout.num_words(); ++word) {
    uint32_t bits = 0;
    for (int i = 0; i < layout.word_depth(); ++i) {
      bits |= quants[word * layout.word_depth() + i] << (i * layout.bits);
    }
    std::memcpy(packed + (int64_t{word} * tile_columns + column) * 4, &bits, 4);
  }
  uint8_t* scales = packed + int64_t{layout.num_words()} * tile_columns * 4;
  for (int s = 0; s < layout.num_scales; ++s) {
    std::memcpy(scales + (int64_t{s} * tile_columns + column) * 2, block + 2 * s, 2);
  }
}

void unpack_quantised(const QuantLayout& layout, bool has_minimum, const uint8_t* packed, int column,
                      int tile_columns, float* out) {
  const uint8_t* scales = packed + int64_t{layout.num_words()} * tile_columns * 4;
  const float d = half_at(scales + int64_t{column} * 2);
  const float offset = layout.bits == 8 ? -128.0f : -8.0f;
  const float m = has_minimum ? half_at(scales + (int64_t{tile_columns} + column) * 2) : offset * d;
  for (int k = 0; k < kBlockDepth; ++k) {
    uint32_t word;
    std::memcpy(&word, packed + (int64_t{k / layout.word_depth()} * tile_columns + column) * 4, 4);
    const uint32_t quant = word >> (k % layout.word_depth() * layout.bits) & ((1u << layout.bits) - 1);
    out[k] = static_cast<float>(quant) * d + m;  // the product is exact: 8 bits times 11
  }
}

void pack_tile(const PackedMatrix::Part& part, int64_t first_row, const PackedTile& tile, int64_t in_features,
               int tile_columns, uint8_t* packed) {
  const WeightFormat& format = format_of(part.type);
  const int64_t num_blocks = in_features / format.block_depth;
  const QuantLayout layout(part.type);
  for (int column = 0; column < tile.columns; ++column) {
    const uint8_t* block = part.rows + (first_row + column) * part.row_stride;
    uint8_t* to = packed;
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (format.block_depth == 1) {
        std::memcpy(to + int64_t{column} * format.block_bytes, block, static_cast<size_t>(format.block_bytes));
      } else {
        pack_quantised(layout, block, to, column, tile_columns);
      }
      block += format.block_bytes;
      to += int64_t{format.block_bytes} * tile_columns;
    }
  }
}

}  // namespace

PackedMatrix::PackedMatrix(const std::vector<Part>& parts, int64_t in_features, int tile_columns, int threads)
    : in_features_(in_features), tile_columns_(tile_columns) {
  struct Source {
    const Part* part;
    int64_t first_row;
    size_t bytes, offset;
  };
  std::vector<Source> sources;  // one for each tile
  for (const Part& part : parts) {
    const WeightFormat& format = format_of(part.type);
    const int64_t tile_bytes = in_features / format.block_depth * format.block_bytes * tile_columns;
    for (int64_t row = 0; row < part.num_rows; row += tile_columns) {
      const auto columns = static_cast<int>(std::min<int64_t>(tile_columns, part.num_rows - row));
      sources.push_back({&part, row, (static_cast<size_t>(tile_bytes) + 63) / 64 * 64, 0});
      tiles_.push_back({nullptr, part.type, columns, out_features_ + row});
    }
    out_features_ += part.num_rows;
  }
  // Two equal parts are a gate and what it gates: tiles that are multiplied together stand side by side.
  const size_t half = parts.size() == 2 && parts[0].num_rows == parts[1].num_rows ? sources.size() / 2 : sources.size();
  for (size_t i = 0; i < half; ++i) {
    for (size_t tile = i; tile < sources.size(); tile += half) {
      sources[tile].offset = num_bytes_;
      num_bytes_ += sources[tile].bytes;
    }
  }
  memory_ = allocate_weights(num_bytes_);
  const auto work = static_cast<int64_t>(num_bytes_);
  parallel_for(static_cast<int64_t>(tiles_.size()), work, threads, [&](int64_t index, int) {
    const Source& source = sources[static_cast<size_t>(index)];
    PackedTile& tile = tiles_[static_cast<size_t>(index)];
    uint8_t* packed = memory_.get() + source.offset;
    if (tile.columns < tile_columns) std::memset(packed, 0, source.bytes);
    pack_tile(*source.part, source.first_row, tile, in_features, tile_columns, packed);
    tile.data = packed;
  });
}

void PackedMatrix::unpack_row(int64_t row, float* out) const {
  const auto behind = std::upper_bound(tiles_.begin(), tiles_.end(), row, [](int64_t r, const PackedTile& tile) {
    return r < tile.first_column;
  });
  const PackedTile& tile = *(behind - 1);
  const auto column = static_cast<int>(row - tile.first_column);
  const WeightFormat& format = format_of(tile.type);
  const uint8_t* packed = tile.data;
  for (int64_t k = 0; k < in_features_; k += format.block_depth) {
    const uint8_t* number = packed + int64_t{column} * format.block_bytes;  // where the type has no blocks
    switch (tile.type) {
      case WeightType::kF32: std::memcpy(out + k, number, 4); break;
      case WeightType::kF16: out[k] = half_at(number); break;
      case WeightType::kBF16: {
        const uint8_t upper_half[4] = {0, 0, number[0], number[1]};
        std::memcpy(out + k, upper_half, 4);
        break;
      }
      default:
        unpack_quantised(QuantLayout(tile.type), tile.type == WeightType::kQ4_1, packed, column, tile_columns_,
                         out + k);
    }
    packed += int64_t{format.block_bytes} * tile_columns_;
  }
}

}  // namespace twinfer::cpu
