// What the bindings of the CPU and of the other devices check alike before logits are changed or sampled from.
#pragma once

#include <cmath>
#include <string>

#include "arguments.h"

namespace twinfer {

constexpr int64_t kMaxVocab = int64_t{1} << 31;

inline void check_vocabulary(const TensorView& logits, int64_t vocab_size) {
  if (vocab_size >= 1 && vocab_size < kMaxVocab) return;
  reject("logits: expected a vocabulary V between 1 and 2^31 - 1, got shape " + logits.shape_text() + ".");
}

// What a list of ids must be for the kernel: `starts` ascends from 0 to their number, and each is in the vocabulary.
template <class IdLists>
void check_id_lists(const char* starts_name, const char* ids_name, const IdLists& lists, int64_t num_lists,
                    int64_t num_ids, int64_t vocab_size) {
  bool fits = lists.starts[0] == 0 && lists.starts[num_lists] == num_ids;
  for (int64_t p = 0; p < num_lists; ++p) fits = fits && lists.starts[p] <= lists.starts[p + 1];
  if (!fits) {
    reject(std::string(starts_name) + ": expected ascending offsets from 0 to " + std::to_string(num_ids) + ".");
  }
  check_range(ids_name, lists.ids, num_ids, 0, vocab_size, "(the vocabulary)");
}

// Each row once, so that no two threads write to it.
inline void check_ascending_rows(const int64_t* rows, int64_t count, int64_t num_rows) {
  check_range("rows", rows, count, 0, num_rows, "(rows of logits)");
  for (int64_t p = 1; p < count; ++p) {
    if (rows[p] > rows[p - 1]) continue;
    reject("rows: expected ascending rows, got " + std::to_string(rows[p]) + " at index " + std::to_string(p) + ".");
  }
}

template <class Sample>
void check_sampling(const Sample& call) {
  for (int64_t r = 0; r < call.num_rows; ++r) {
    const std::string which = " in row " + std::to_string(r) + ".";
    if (!(call.temperature[r] >= 0.0) || std::isinf(call.temperature[r])) {
      reject("temperature: expected a finite number of at least 0, got " + std::to_string(call.temperature[r]) + which);
    }
    if (call.top_k[r] < -1) {
      reject("top_k: expected -1 or 0 (off) or a positive number, got " + std::to_string(call.top_k[r]) + which);
    }
    if (!(call.top_p[r] > 0.0 && call.top_p[r] <= 1.0)) {
      reject("top_p: expected a number in (0, 1], got " + std::to_string(call.top_p[r]) + which);
    }
    if (!(call.min_p[r] >= 0.0 && call.min_p[r] <= 1.0)) {
      reject("min_p: expected a number in [0, 1], got " + std::to_string(call.min_p[r]) + which);
    }
  }
  check_range("output_positions", call.output_positions, call.num_rows, 0, int64_t{1} << 32,
              "(a 32-bit Philox counter)");
}

template <class ProcessLogits>
void check_processing(const ProcessLogits& call, int64_t num_rows) {
  check_ascending_rows(call.rows, call.num_processed, num_rows);
  for (int64_t p = 0; p < call.num_processed; ++p) {
    const std::string which = " at index " + std::to_string(p) + ".";
    for (int64_t i = call.allowed.starts[p] + 1; i < call.allowed.starts[p + 1]; ++i) {
      if (call.allowed.ids[i] > call.allowed.ids[i - 1]) continue;
      reject("allowed_ids: expected ascending ids, got " + std::to_string(call.allowed.ids[i]) + " in the list" + which);
    }
    if (!(call.repetition_penalty[p] > 0.0) || std::isinf(call.repetition_penalty[p])) {
      reject("repetition_penalty: expected a finite number above 0, got " +
             std::to_string(call.repetition_penalty[p]) + which);
    }
  }
}

}  // namespace twinfer
