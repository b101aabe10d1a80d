// The threads of the kernels: the caller, and workers that wait for its next call. They spin for a moment, since the
// next layer's call follows within microseconds, then sleep.
//
// Each thread has a share of a call's items and takes them in ascending order, so that it reads its part of a matrix as
// one stream, which the processor and the kernels' own requests run ahead of. Whoever has done with his share goes on
// with another's, in the same order: it may be all of it, where a core is taken. One row through all layers of the
// embedded model, two Zen 5 cores: 2.2 ms where items are handed out in turn, 1.7 like this.
//
// OpenMP is not used: its team meets at a barrier that waits for every member, so a neighbour on one core stalls each
// call for a time slice (16 ms were measured). Here a call waits only for workers that have taken an item of it; one
// that is asleep, or has lost its core, is not missed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace twinfer::cpu {

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;
  static constexpr int64_t kMaxItems = 0xffffffff;

  // The pool of this process; a forked child gets a new one, since threads do not survive a fork.
  static ThreadPool& instance();

  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  // Where the share of a thread begins, and that of the thread before it ends.
  static int64_t share_begin(int64_t items, int64_t thread, int64_t threads) { return items * thread / threads; }
  // Whose share an item belongs to.
  static int64_t share_of(int64_t item, int64_t items, int64_t threads) { return ((item + 1) * threads - 1) / items; }

  // Calls body(item, thread) once for every item in [0, items), on at most `threads` threads, and returns when all
  // are done. `thread` is in [0, threads), and no two bodies run with the same one at a time. Workers are started when
  // they are first needed. If the pool is busy (another Python thread, or a call from inside a body), or no worker can
  // be started, the caller does it all, as it does with more items than kMaxItems. Bodies must not throw.
  // The last `rest` items belong to no share: whoever has done with his own takes them, before others' items.
  template <class Body>
  void run(int64_t items, int threads, const Body& body, int64_t rest = 0) {
    run({[](const void* context, int64_t item, int thread) {
           (*static_cast<const Body*>(context))(item, thread);
         },
         &body, items, rest},
        threads);
  }

 private:
  struct Job {
    void (*call)(const void* context, int64_t item, int thread);
    const void* context;
    int64_t items, rest;
  };

  // The gate is one number, so that a worker learns in one step which call it enters, and that it is still open:
  // bits 0..15 workers inside, 16..30 threads that may take part, 31 closed, 32..63 the call's number.
  static constexpr uint64_t kInside = 0xffff;
  static constexpr int kThreadsShift = 16;
  static constexpr uint64_t kThreadsMask = 0x7fff;
  static constexpr uint64_t kClosed = uint64_t{1} << 31;
  static constexpr int kNumberShift = 32;

  void run(const Job& job, int threads);
  void start_workers(int count);
  void work(int thread);
  void take_items(int thread, int threads);
  uint64_t wait_for_call(uint64_t seen);
  bool enter(uint64_t gate);
  void leave() { gate_.fetch_sub(1, std::memory_order_release); }

  // The items of a share that nobody has taken: bits 0..31 the first, 32..63 the one behind the last.
  struct alignas(64) Share {
    std::atomic<uint64_t> range{0};

    void set(int64_t begin, int64_t end) {
      range.store(static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(begin), std::memory_order_relaxed);
    }
    // Below zero: nothing is left.
    int64_t take() {
      uint64_t now = range.load(std::memory_order_relaxed);
      while (true) {
        const uint64_t begin = now & 0xffffffff, end = now >> 32;
        if (begin >= end) return -1;
        if (range.compare_exchange_weak(now, now + 1, std::memory_order_relaxed)) return static_cast<int64_t>(begin);
      }
    }
  };

  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  alignas(64) Job job_{};  // this and the shares: written while the gate is closed and nobody is inside
  Share shares_[kMaxThreads + 1];  // of the threads, and behind the last of them the rest
  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;  // touched by the caller that has set busy_
};

}  // namespace twinfer::cpu
