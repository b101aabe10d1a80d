// What the lanes of a warp compute together, once the last of them has arrived. Compiled without -fsanitize=thread:
// lanes exchange registers here, and a register is no memory that two threads could race for. For the same reason there
// is no memcpy: ThreadSanitizer would see that one from here too.
#include <algorithm>

#include "simt/device.h"

namespace twinfer::simt {

namespace {

constexpr int kLanes = 32;

template <class T>
T value_of(const Lane& lane) {
  return *static_cast<const T*>(lane.in);
}

template <class F>
void for_each_lane(unsigned mask, F visit) {
  for (int l = 0; l < kLanes; ++l) {
    if (mask >> l & 1) visit(l);
  }
}

unsigned reduced(Reduction kind, unsigned a, unsigned b) {
  switch (kind) {
    case Reduction::kAdd: return a + b;
    case Reduction::kMin: return static_cast<unsigned>(std::min(static_cast<int>(a), static_cast<int>(b)));
    case Reduction::kMax: return static_cast<unsigned>(std::max(static_cast<int>(a), static_cast<int>(b)));
    case Reduction::kMinUnsigned: return std::min(a, b);
    case Reduction::kMaxUnsigned: return std::max(a, b);
    case Reduction::kAnd: return a & b;
    case Reduction::kOr: return a | b;
    case Reduction::kXor: return a ^ b;
  }
  return 0;
}

float half_word(MmaType type, uint32_t word, int which) {
  const auto bits = static_cast<uint16_t>(word >> (16 * which));
  return type == MmaType::kFloat16 ? half_value(bits) : bfloat16_value(bits);
}

// Where the PTX ISA ("Matrix fragments for mma.m16n8k16") puts element (row, k) of A, (k, col) of B and (row, col) of
// C: lane, register, and which half of the register.
struct Matrices {
  float a[16][16], b[8][16];      // B by columns

  Matrices(MmaType type, const Lane* lanes) {
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 16; ++row) {
        const auto& fragment = *static_cast<const MmaFragment*>(lanes[row % 8 * 4 + k % 8 / 2].in);
        a[row][k] = half_word(type, fragment.a[row / 8 + 2 * (k / 8)], k % 2);
      }
      for (int col = 0; col < 8; ++col) {
        const auto& fragment = *static_cast<const MmaFragment*>(lanes[col * 4 + k % 8 / 2].in);
        b[col][k] = half_word(type, fragment.b[k / 8], k % 2);
      }
    }
  }
};

}  // namespace

void shuffle_lanes(Lane* lanes, unsigned mask) {
  for_each_lane(mask, [&](int l) {
    *static_cast<uint64_t*>(lanes[l].out) = value_of<uint64_t>(lanes[lanes[l].source]);
  });
}

void ballot_lanes(Lane* lanes, unsigned mask) {
  unsigned votes = 0;
  for_each_lane(mask, [&](int l) { votes |= value_of<unsigned>(lanes[l]) << l; });
  for_each_lane(mask, [&](int l) { *static_cast<unsigned*>(lanes[l].out) = votes; });
}

void match_any_lanes(Lane* lanes, unsigned mask) {
  for_each_lane(mask, [&](int l) {
    unsigned equal = 0;
    for_each_lane(mask, [&](int m) {
      equal |= unsigned{value_of<uint64_t>(lanes[l]) == value_of<uint64_t>(lanes[m])} << m;
    });
    *static_cast<unsigned*>(lanes[l].out) = equal;
  });
}

void reduce_lanes(Lane* lanes, unsigned mask) {
  const int first = __builtin_ctz(mask);
  const auto kind = static_cast<Reduction>(lanes[first].source);
  unsigned result = value_of<unsigned>(lanes[first]);
  for_each_lane(mask & (mask - 1), [&](int l) { result = reduced(kind, result, value_of<unsigned>(lanes[l])); });
  for_each_lane(mask, [&](int l) { *static_cast<unsigned*>(lanes[l].out) = result; });
}

// D = A B + C with A [16, 16], B [16, 8], C and D [16, 8]. Products are exact in float32 and summed in ascending k; the
// order on a GPU is not documented, so compare by tolerance.
void mma_m16n8k16_lanes(Lane* lanes, unsigned) {
  const Matrices matrices(static_cast<MmaType>(lanes[0].source), lanes);
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 8; ++col) {
      const int lane = row % 8 * 4 + col / 2, index = row / 8 * 2 + col % 2;
      float sum = static_cast<const MmaFragment*>(lanes[lane].in)->c[index];
      for (int k = 0; k < 16; ++k) sum += matrices.a[row][k] * matrices.b[col][k];
      static_cast<float*>(lanes[lane].out)[index] = sum;
    }
  }
}

}  // namespace twinfer::simt
