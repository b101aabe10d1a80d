// How launchers choose a rung and count blocks of threads.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cuda/launchers.h"

namespace twinfer::device {

constexpr int kMostGridRows = 65535;                  // the second dimension of a grid holds no more

inline dim3 blocks_for(int64_t items, int threads) {
  return dim3(static_cast<unsigned>((items + threads - 1) / threads));
}

struct VectorRow {
  const void* data;
  int64_t stride;                 // elements
};

// Whether 128-bit loads fit: rows start at multiples of 16 bytes and hold a whole number of vectors.
template <class T>
bool vectors_fit(int64_t row_size, std::initializer_list<VectorRow> rows) {
  constexpr int64_t kVectorElements = 16 / sizeof(T);
  if (row_size % kVectorElements != 0) return false;
  for (const VectorRow& row : rows) {
    if (reinterpret_cast<uintptr_t>(row.data) % 16 != 0 || row.stride % kVectorElements != 0) return false;
  }
  return true;
}

// `highest` is a rung that needs vectors and the one before does not.
inline int choose_rung(int rung, int highest, bool fits) {
  if (rung == kBestRung) return fits ? highest : highest - 1;
  if (rung == highest && !fits) {
    throw std::invalid_argument(
        "rung: expected rows of a multiple of 16 bytes that start at multiples of 16 bytes, as 128-bit loads need; "
        "use a lower rung.");
  }
  return rung;
}

// `highest` is a rung on the tensor cores and the one before takes every call.
template <class T>
int choose_tensor_cores(int rung, int highest, int head_dim, bool fits) {
  const bool takes = sizeof(T) == 2 && fits && (head_dim == 64 || head_dim == 128);
  if (rung == kBestRung) return takes ? highest : highest - 1;
  if (rung == highest && !takes) {
    throw std::invalid_argument(
        "rung: the tensor cores take float16 and bfloat16 with a head dim D of 64 or 128 whose rows start at multiples "
        "of 16 bytes; use a lower rung.");
  }
  return rung;
}

#define TWINFER_FOR_EACH_TYPE(macro) macro(float) macro(__half) macro(__nv_bfloat16)

}  // namespace twinfer::device
