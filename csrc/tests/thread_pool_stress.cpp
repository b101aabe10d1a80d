// Jobs of random size on one pool, from several callers at once, for a given time; every item must have run exactly
// once, on a thread number nobody else was using. tests/kernels/test_thread_pool.py builds this with and without
// ThreadSanitizer: kernels compare equal for hundreds of millions of calls before a race of the pool shows.
//
// Usage: thread_pool_stress SECONDS THREADS. Exit status 1 and a line for the first failure.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"

namespace {

using twinfer::cpu::ThreadPool;
using Clock = std::chrono::steady_clock;

constexpr int kMostItems = 64;

std::atomic<bool> failed{false};

void fail(const char* what, int64_t job, int64_t item, int64_t value) {
  if (failed.exchange(true)) return;
  std::printf("job %lld, item %lld: %s (%lld)\n", static_cast<long long>(job), static_cast<long long>(item), what,
              static_cast<long long>(value));
}

// The counts are plain integers on purpose: two threads at one item, or a job that returns before its last item is
// done, is a data race that ThreadSanitizer sees, and a lost count that the check below sees.
struct Caller {
  std::mt19937 random;
  std::vector<int64_t> runs = std::vector<int64_t>(kMostItems);
  std::unique_ptr<std::atomic<int>[]> in_use{new std::atomic<int>[ThreadPool::kMaxThreads]()};
  int64_t jobs = 0;

  void run_one(ThreadPool& pool, int threads) {
    const int items = static_cast<int>(random() % kMostItems) + 1;
    const int used = static_cast<int>(random() % static_cast<unsigned>(threads)) + 1;
    const int rest = random() % 4 == 0 ? static_cast<int>(random() % static_cast<unsigned>(items + 1)) : 0;
    const unsigned work = random() % 8 == 0 ? 2000 : random() % 50;  // now and then a job with a slow end
    for (int64_t& count : runs) count = 0;
    pool.run(items, used, [&](int64_t item, int thread) {
      if (thread < 0 || thread >= used) fail("a thread number out of range", jobs, item, thread);
      if (in_use[thread].fetch_add(1) != 0) fail("two bodies with one thread number", jobs, item, thread);
      for (volatile unsigned i = 0; i < work; i = i + 1) {
      }
      runs[static_cast<size_t>(item)] += 1;
      in_use[thread].fetch_sub(1);
    }, rest);
    for (int i = 0; i < kMostItems; ++i) {
      const int64_t expected = i < items ? 1 : 0, count = runs[static_cast<size_t>(i)];
      if (count != expected) fail("a wrong number of runs", jobs, i, count);
    }
    ++jobs;
    if (random() % 512 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));  // let them sleep
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s SECONDS THREADS\n", argv[0]);
    return 2;
  }
  const double seconds = std::atof(argv[1]);
  const int threads = std::atoi(argv[2]);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::atomic<int64_t> jobs{0};
  int pools = 0;
  while (Clock::now() < end && !failed) {  // a pool also ends often, at any moment of its workers
    ThreadPool pool;
    ++pools;
    const auto pool_end = std::min<Clock::time_point>(end, Clock::now() + std::chrono::milliseconds(200));
    std::vector<std::thread> callers;
    for (unsigned c = 0; c < 2; ++c) {
      callers.emplace_back([&, c] {
        Caller caller;
        caller.random.seed(static_cast<unsigned>(pools) * 2 + c);
        while (Clock::now() < pool_end && !failed) caller.run_one(pool, threads);
        jobs += caller.jobs;
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  std::printf("%lld jobs, %d pools\n", static_cast<long long>(jobs.load()), pools);
  return failed ? 1 : 0;
}
