// Splitting work over threads. The thread count is always an argument: torch's own setting is per thread, so a new
// Python thread would not inherit it. Bodies must not throw.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/thread_pool.h"

namespace twinfer::cpu {

// Below this many elementary operations one thread is done before another would have woken up (a few microseconds).
constexpr int64_t kMinParallelWork = int64_t{1} << 17;

inline bool worth_a_team(int64_t items, int64_t work, int threads) {
  return threads > 1 && items > 1 && work >= kMinParallelWork;
}

// Calls body(item, thread) for every item in [0, items). `work` is the total, in elementary operations. Items are
// taken one by one: a core taken by another process then delays one item and not a fixed share of them. The last `rest`
// items go to whoever is free first (thread_pool.h).
template <class Body>
void parallel_for(int64_t items, int64_t work, int threads, const Body& body, int64_t rest = 0) {
  if (!worth_a_team(items, work, threads)) {
    for (int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  ThreadPool::instance().run(items, threads, body, rest);
}

// Calls body(begin, end) on ranges that cover [0, rows), each of a few thousand elementary operations or more.
template <class Body>
void parallel_rows(int64_t rows, int64_t work_per_row, int threads, const Body& body) {
  const int64_t chunk = std::max<int64_t>(1, kMinParallelWork / 8 / std::max<int64_t>(1, work_per_row));
  const int64_t chunks = (rows + chunk - 1) / chunk;
  parallel_for(chunks, rows * work_per_row, threads, [&](int64_t index, int) {
    body(index * chunk, std::min(rows, (index + 1) * chunk));
  });
}

}  // namespace twinfer::cpu
