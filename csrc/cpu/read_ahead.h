// What a later call reads, asked for while this one computes. The attention of a decode does little with each number of
// K and V and waits for memory, which the products before it leave idle. A plan (plan.h) knows both: its products ask for
// the contexts of the next attention, and find them in the caches' place of the weights that were just used.
//
// Each thread asks for what it will attend to itself. Where cores share no cache, what lies in another core's cache is
// further away than memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/packed_matrix.h"

namespace twinfer::cpu {

// Products of fewer rows compute so little with each weight that they wait for memory themselves.
constexpr int kMinRowsAhead = 3;

constexpr int64_t kLineBytes = 64;
constexpr int64_t kLineFloats = 16;

// The lines of K and V that each thread will read in a step. They lie alike in the caches of every layer.
class ContextLines {
 public:
  struct Piece {
    int64_t before;   // lines of K and V of the thread's pieces before this one
    int64_t offset;   // of the first number, from the beginning of a cache
    int64_t lines;    // of K, and as many of V
  };

  ContextLines() = default;  // nothing
  explicit ContextLines(int threads) : pieces_(static_cast<size_t>(threads)) {}

  void add(int thread, int64_t offset, int64_t lines) {
    pieces_[static_cast<size_t>(thread)].push_back({num_lines(thread), offset, lines});
  }
  const std::vector<Piece>& pieces(int thread) const { return pieces_[static_cast<size_t>(thread)]; }
  int64_t num_lines(int thread) const {
    if (thread >= static_cast<int>(pieces_.size()) || pieces(thread).empty()) return 0;
    return pieces(thread).back().before + 2 * pieces(thread).back().lines;
  }

 private:
  std::vector<std::vector<Piece>> pieces_;
};

// What a product asks for: of each thread's lines in the caches of one layer those between two fractions, and where its
// own weights end, those of the next product.
struct ReadAhead {
  const ContextLines* contexts = nullptr;  // null: nothing
  const float* k_cache = nullptr;
  const float* v_cache = nullptr;
  double begin = 0, end = 0;
  const PackedMatrix* next_weight = nullptr;  // null: unknown
  bool next_in_halves = false;             // it is multiplied two tiles at a time
};

// What a part of the call asks for: some lines of one thread.
struct LinesAhead {
  const ReadAhead* source = nullptr;
  int thread = 0;
  int64_t begin = 0, end = 0;

  // The i-th of `parts` about equal ones.
  LinesAhead part(int64_t i, int64_t parts) const {
    const int64_t lines = end - begin;
    return {source, thread, begin + lines * i / parts, begin + lines * (i + 1) / parts};
  }
};

inline LinesAhead lines_of_thread(const ReadAhead& ahead, int thread) {
  if (ahead.contexts == nullptr) return {};
  const auto lines = static_cast<double>(ahead.contexts->num_lines(thread));
  return {&ahead, thread, static_cast<int64_t>(ahead.begin * lines), static_cast<int64_t>(ahead.end * lines)};
}

// Cuts lines into runs: kRequests requests, `step` bytes apart. Between them the caller computes; a core can wait for
// some 25 lines at a time and stops when it asks for more.
struct Run {
  const uint8_t* at;
  int64_t step;
};

class Runs {
 public:
  static constexpr int kRequests = 32;

  // `count`: how many runs the caller has a use for. What does not fit them is not asked for.
  Runs(const LinesAhead& lines, int64_t count) : left_(lines.end - lines.begin) {
    if (left_ <= 0) return;
    source_ = lines.source;
    lines_per_run_ = std::min<int64_t>((left_ + count - 1) / count, kRequests);
    const std::vector<ContextLines::Piece>& pieces = source_->contexts->pieces(lines.thread);
    piece_ = std::upper_bound(pieces.data(), pieces.data() + pieces.size(), lines.begin,
                              [](int64_t line, const ContextLines::Piece& piece) { return line < piece.before; }) - 1;
    const int64_t skipped = lines.begin - piece_->before;
    is_value_ = skipped >= piece_->lines;
    open();
    at_ += skipped % piece_->lines * kLineBytes;
    here_ -= skipped % piece_->lines;
  }

  // Without any lines left, a run that stays where it is: at `near`.
  Run next(const void* near) {
    if (left_ <= 0) return {static_cast<const uint8_t*>(near), 0};
    const int64_t lines = std::min({lines_per_run_, here_, left_});
    const Run run{at_, lines * kLineBytes / kRequests};
    at_ += lines * kLineBytes;
    here_ -= lines;
    left_ -= lines;
    if (here_ == 0 && left_ > 0) {
      if (is_value_) ++piece_;
      is_value_ = !is_value_;
      open();
    }
    return run;
  }
  bool is_empty() const { return left_ <= 0; }

 private:
  void open() {
    at_ = reinterpret_cast<const uint8_t*>((is_value_ ? source_->v_cache : source_->k_cache) + piece_->offset);
    here_ = piece_->lines;
  }

  const ReadAhead* source_ = nullptr;
  const ContextLines::Piece* piece_ = nullptr;
  bool is_value_ = false;
  const uint8_t* at_ = nullptr;
  int64_t here_ = 0, left_ = 0, lines_per_run_ = 0;
};

}  // namespace twinfer::cpu
