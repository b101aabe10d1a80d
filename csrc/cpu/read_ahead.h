// What a later call reads, asked for while this one computes. The attention of a decode does little with each number
// of K and V and waits for memory, which the products before it leave idle. A plan (plan.h) knows both: its products
// ask for the contexts that the next attention will read, which then come from a cache. At the end of its share of the
// weights a thread asks for those of its share in the next product, which lie elsewhere.
//
// Each thread asks for what it will read itself: where cores share no cache, another core's is further than memory.
// 28 decodes of 250 tokens, two Zen 5 cores: 25.5 ms a step without, 23.4 like this; 8 of them 8.0 and 7.2.
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
    int64_t offset;   // of its first number in a cache
    int64_t lines;    // of K, and as many of V
  };

  ContextLines() = default;  // nothing
  explicit ContextLines(int threads) : pieces_(static_cast<size_t>(threads)) {}

  void add(int thread, int64_t offset, int64_t lines) {
    pieces_[static_cast<size_t>(thread)].push_back({num_lines(thread), offset, lines});
  }
  const std::vector<Piece>& pieces(int thread) const { return pieces_[static_cast<size_t>(thread)]; }
  int64_t num_lines(int thread) const {
    if (static_cast<size_t>(thread) >= pieces_.size() || pieces(thread).empty()) return 0;
    const Piece& last = pieces(thread).back();
    return last.before + 2 * last.lines;
  }

 private:
  std::vector<std::vector<Piece>> pieces_;
};

// What a product asks for: of each thread's lines in the caches of one layer those between two fractions; and where a
// share of its weights ends, those of the next product.
struct ReadAhead {
  const ContextLines* contexts = nullptr;     // null: nothing
  const float* k_cache = nullptr;             // [N, B, Hkv, D]
  const float* v_cache = nullptr;             // [N, B, Hkv, D]
  double begin = 0, end = 0;
  const PackedMatrix* next_weight = nullptr;  // null: unknown
  bool next_in_halves = false;                // whether it is multiplied two tiles at a time
};

// Some lines of one thread.
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

// kRequests requests, `step` bytes apart. Between them the caller computes: a core can wait for some 25 lines at a
// time, and stops when it asks for more.
struct Run {
  static constexpr int kRequests = 32;

  const uint8_t* at;
  int64_t step;
};

// Lines cut into runs, each inside one piece of K or V.
class Runs {
 public:
  // `count`: for how many runs the caller has a use. Lines that do not fit are not asked for.
  Runs(const LinesAhead& lines, int64_t count) : left_(lines.end - lines.begin) {
    if (left_ <= 0) return;
    source_ = lines.source;
    lines_per_run_ = std::min<int64_t>((left_ + count - 1) / count, Run::kRequests);
    const std::vector<ContextLines::Piece>& pieces = source_->contexts->pieces(lines.thread);
    const auto behind = std::upper_bound(
        pieces.begin(), pieces.end(), lines.begin,
        [](int64_t line, const ContextLines::Piece& piece) { return line < piece.before; });
    piece_ = &*(behind - 1);
    const int64_t line = lines.begin - piece_->before;
    is_value_ = line >= piece_->lines;
    open();
    at_ += line % piece_->lines * kLineBytes;
    here_ -= line % piece_->lines;
  }

  // With no lines left, a run that stays at `near`.
  Run next(const void* near) {
    if (left_ <= 0) return {static_cast<const uint8_t*>(near), 0};
    const int64_t lines = std::min({lines_per_run_, here_, left_});
    const Run run{at_, lines * kLineBytes / Run::kRequests};
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

 private:
  void open() {
    at_ = reinterpret_cast<const uint8_t*>((is_value_ ? source_->v_cache : source_->k_cache) + piece_->offset);
    here_ = piece_->lines;
  }

  const ReadAhead* source_ = nullptr;
  const ContextLines::Piece* piece_ = nullptr;
  bool is_value_ = false;
  const uint8_t* at_ = nullptr;
  int64_t here_ = 0;                // lines left in the piece's K or V
  int64_t left_ = 0, lines_per_run_ = 0;
};

}  // namespace twinfer::cpu
