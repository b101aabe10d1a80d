#include "cpu/probe.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/simd.h"
#include "cpu/thread_pool.h"

#define TWINFER_ISA_BODY "cpu/probe.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

constexpr int64_t kChunkFloats = 256 * 1024;  // 1 MiB: long enough for the prefetcher, short enough to share out
constexpr int64_t kRounds = 20'000;           // of kChains multiply-adds each, some 100 us
constexpr int kItemsPerThread = 64;           // so that a core taken by somebody else delays one item, not a half

// Runs pass() over and over for about `seconds`, three times at least, and returns the shortest time of one.
template <class Pass>
double shortest(double seconds, const Pass& pass) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const Clock::time_point start = Clock::now();
  double best = 0;
  for (int number = 0; number < 3 || since(start) < seconds; ++number) {
    const Clock::time_point begin = Clock::now();
    pass();
    const double taken = since(begin);
    best = number == 0 ? taken : std::min(best, taken);
  }
  return best;
}

// The compiler cannot know that nobody looks.
void use(const std::vector<float>& sums) {
  volatile float sink = 0;
  for (const float sum : sums) sink = sum;
  static_cast<void>(sink);
}

}  // namespace

double read_bandwidth(int64_t num_bytes, double seconds, Isa isa, int threads) {
  const auto sum_of = TWINFER_DISPATCH(isa, sum_of);
  const int64_t chunks = std::max<int64_t>(threads, num_bytes / int64_t{sizeof(float)} / kChunkFloats);
  std::vector<float> buffer(chunks * kChunkFloats, 1.0f);
  std::vector<float> sums(chunks);
  const double taken = shortest(seconds, [&] {
    ThreadPool::instance().run(chunks, threads, [&](int64_t chunk, int) {
      sums[chunk] = sum_of(buffer.data() + chunk * kChunkFloats, kChunkFloats);
    });
  });
  use(sums);
  return static_cast<double>(buffer.size() * sizeof(float)) / taken;
}

double multiply_add_peak(double seconds, Isa isa, int threads) {
  const auto multiply_add = TWINFER_DISPATCH(isa, multiply_add);
  const int64_t operations = 2 * kRounds * TWINFER_DISPATCH(isa, kChains) * TWINFER_DISPATCH(isa, kWidth);
  const int64_t items = int64_t{kItemsPerThread} * threads;
  std::vector<float> sums(items);
  const double taken = shortest(seconds, [&] {
    ThreadPool::instance().run(items, threads, [&](int64_t item, int) {
      sums[item] = multiply_add(static_cast<float>(item), kRounds);
    });
  });
  use(sums);
  return static_cast<double>(operations * items) / taken;
}

}  // namespace twinfer::cpu
