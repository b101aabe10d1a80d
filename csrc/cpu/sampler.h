#pragma once

#include <cstdint>

namespace twinfer::cpu {

// The largest logit of a row, the lowest id among equals, and whether any logit is NaN.
struct RowMax {
  float value;
  int32_t id;                     // below zero: of no logit so far
  bool has_nan;

  // The same over the logits of both; in whichever order it is taken.
  void take(const RowMax& other) {
    if (other.id >= 0 && (id < 0 || other.value > value || (other.value == value && other.id < id))) {
      value = other.value;
      id = other.id;
    }
    has_nan |= other.has_nan;
  }
};

struct Candidate {
  float logit;
  int32_t id;
};

constexpr int kMaximaDepth = 8;   // logits a group of group_maxima

constexpr double kInverseFactorials[] = {
    1.0,           1.0,            1.0 / 2,         1.0 / 6,          1.0 / 24,          1.0 / 120,         1.0 / 720,
    1.0 / 5040,    1.0 / 40320,    1.0 / 362880,    1.0 / 3628800,    1.0 / 39916800,    1.0 / 479001600,
    1.0 / 6227020800};

}  // namespace twinfer::cpu
