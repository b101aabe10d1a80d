#pragma once

#include <cstdint>

namespace twinfer::cpu {

// The largest logit of a row, the lowest id among equals, and whether any logit is NaN.
struct RowMax {
  float value;
  int32_t id;
  bool has_nan;
};

}  // namespace twinfer::cpu
