// The threads of the kernels. One call hands out its items one by one to the caller and to workers that wait for the
// next call: they spin for a moment, since the next layer's call follows within microseconds, then sleep.
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

  // The pool of this process; a forked child gets a new one, since threads do not survive a fork.
  static ThreadPool& instance();

  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  // Calls body(item, thread) once for every item in [0, items), on at most `threads` threads, and returns when all
  // are done. `thread` is in [0, threads), and no two bodies run with the same one at a time. Workers are started when
  // they are first needed. If the pool is busy (another Python thread, or a call from inside a body), or no worker can
  // be started, the caller does it all. Bodies must not throw.
  template <class Body>
  void run(int64_t items, int threads, const Body& body) {
    run({[](const void* context, int64_t item, int thread) {
           (*static_cast<const Body*>(context))(item, thread);
         },
         &body, items},
        threads);
  }

 private:
  struct Job {
    void (*call)(const void* context, int64_t item, int thread);
    const void* context;
    int64_t items;
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
  void take_items(int thread);
  uint64_t wait_for_call(uint64_t seen);
  bool enter(uint64_t gate);
  void leave() { gate_.fetch_sub(1, std::memory_order_release); }

  // Apart from each other: the gate is read by spinning workers, the next item is written for every item.
  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  alignas(64) std::atomic<int64_t> next_item_{0};
  alignas(64) Job job_{};  // written while the gate is closed and nobody is inside, read inside
  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;  // touched by the caller that has set busy_
};

}  // namespace twinfer::cpu
