#include "cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace twinfer::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// How long to spin before sleeping. Longer than the pause between two kernels of a layer; short enough that a worker
// which waits in vain gives its core to the neighbour.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 16;  // between two looks at the clock

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until the time is up; whether done() came true.
template <class Done>
bool spin_until(const Done& done) {
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return done();
}

std::atomic<ThreadPool*> process_pool{nullptr};

// The old pool is left as it is: its threads are gone, and its mutex may have been held when the process forked.
void forget_pool_in_child() { process_pool.store(nullptr); }

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = process_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  static_cast<void>(registered);
  auto* made = new ThreadPool;  // never deleted: workers may still be waiting when the process ends
  if (process_pool.compare_exchange_strong(pool, made)) return *made;
  delete made;
  return *pool;
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(sleep_mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const Job& job, int threads) {
  threads = static_cast<int>(std::min<int64_t>({threads, job.items, kMaxThreads}));
  if (threads <= 1 || job.items > kMaxItems || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < job.items; ++item) job.call(job.context, item, 0);
    return;
  }
  start_workers(threads - 1);

  job_ = job;
  const int64_t shared = job.items - job.rest;
  for (int64_t thread = 0; thread < threads; ++thread) {
    shares_[thread].set(share_begin(shared, thread, threads), share_begin(shared, thread + 1, threads));
  }
  shares_[threads].set(shared, job.items);
  const uint64_t number = (gate_.load(std::memory_order_relaxed) >> kNumberShift) + 1;
  gate_.store(number << kNumberShift | static_cast<uint64_t>(threads) << kThreadsShift);
  if (sleepers_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(sleep_mutex_); }  // whoever is about to sleep is asleep now
    wake_.notify_all();
  }

  take_items(0, threads);
  // Every item has been taken. Nobody enters from here on; whoever is inside is finishing an item, or leaving.
  gate_.fetch_or(kClosed, std::memory_order_relaxed);
  const auto all_left = [this] { return (gate_.load(std::memory_order_acquire) & kInside) == 0; };
  if (!spin_until(all_left)) {
    while (!all_left()) std::this_thread::yield();
  }
  busy_.store(false, std::memory_order_release);
}

void ThreadPool::start_workers(int count) {
  while (static_cast<int>(workers_.size()) < count) {
    const int thread = static_cast<int>(workers_.size()) + 1;  // 0 is the caller
    try {
      workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {
      return;  // the process has as many threads as it may have; those that exist do the work
    }
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    const uint64_t gate = wait_for_call(seen);
    if (stop_.load()) return;
    seen = gate >> kNumberShift;
    const int threads = static_cast<int>(gate >> kThreadsShift & kThreadsMask);
    if (thread >= threads || !enter(gate)) continue;
    take_items(thread, threads);
    leave();
  }
}

// Until a call with another number than `seen` has been made, or the pool ends.
uint64_t ThreadPool::wait_for_call(uint64_t seen) {
  uint64_t gate = 0;
  const auto called = [&] {
    gate = gate_.load();
    return gate >> kNumberShift != seen || stop_.load();
  };
  if (spin_until(called)) return gate;
  // Counted before the last look at the gate, as the caller opens the gate before it looks at the count: one of the
  // two sees the other.
  sleepers_.fetch_add(1);
  {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    wake_.wait(lock, called);
  }
  sleepers_.fetch_sub(1);
  return gate;
}

// Joins the call that `gate` was read from, unless it has been closed since.
bool ThreadPool::enter(uint64_t gate) {
  const uint64_t number = gate >> kNumberShift;
  while (gate >> kNumberShift == number && !(gate & kClosed)) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void ThreadPool::take_items(int thread, int threads) {
  const Job job = job_;
  for (int64_t item; (item = shares_[thread].take()) >= 0;) job.call(job.context, item, thread);
  for (int64_t item; (item = shares_[threads].take()) >= 0;) job.call(job.context, item, thread);
  for (int i = 1; i < threads; ++i) {
    Share& other = shares_[(thread + i) % threads];
    for (int64_t item; (item = other.take()) >= 0;) job.call(job.context, item, thread);
  }
}

}  // namespace twinfer::cpu
