// Compiled without -fsanitize=thread, see sanitizers.h.
#include "simt/machine.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "simt/builtins.h"
#include "simt/fiber.h"
#include "simt/sanitizers.h"

namespace twinfer::simt {

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostStaticShared = 48 * 1024;      // a compile-time limit of nvcc, on every architecture
constexpr size_t kSharedAlignment = 128;
constexpr Architecture kArchitectures[] = {
    {"sm_80", 163 * 1024}, {"sm_86", 99 * 1024}, {"sm_89", 99 * 1024}, {"sm_90", 227 * 1024}};

enum class State { kReady, kAtBarrier, kAtWarpOperation, kExited };

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
};
using CopyGroup = std::vector<AsyncCopy>;

struct Thread {
  Fiber fiber;
  unsigned number = 0;            // in the block, x fastest
  uint3 index{};
  State state = State::kReady;
  Site site;                      // where it waits
  const char* waits_for = "";
  unsigned mask = 0;              // of the warp operation at which it waits
  void* race_thread = nullptr;    // ThreadSanitizer's
  CopyGroup open_copies;
  std::deque<CopyGroup> copy_groups;
};

// Barriers are numbered, and two tags take turns. With one, a thread would leave a barrier ordered after those that
// have already arrived at the next, and a race across the end of a loop would go unseen.
struct BarrierTags {
  unsigned completed = 0;
  char tags[2];
  void* next() { return &tags[completed & 1]; }
};

struct MaskTags {
  unsigned mask;
  std::unique_ptr<BarrierTags> tags;
};

struct Warp {
  unsigned existing = 0;          // lanes, as bits
  unsigned exited = 0;
  unsigned waiting = 0;
  bool uniform = true;            // all that wait do so at one place with one mask, the usual case
  Lane lanes[kWarp];
  std::vector<MaskTags> sync_tags;
};

struct SharedArray {
  const char* declaration;
  void* data;
};

struct Freer {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Freer>;

Memory poisoned(size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  // AddressSanitizer's red zone begins where the array ends, so it must not be rounded up there.
  void* memory = nullptr;
  const size_t size = sanitizers::kAddresses ? std::max<size_t>(bytes, 1) : rounded;
  if (posix_memalign(&memory, kSharedAlignment, size) != 0) throw std::bad_alloc();
  std::memset(memory, 0xFF, size);
  return Memory(memory);
}

std::string text(const uint3& index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}

std::string text(const Site& site) { return std::string(site.file) + ":" + std::to_string(site.line); }

std::string hex(unsigned mask) {
  char digits[11];
  std::snprintf(digits, sizeof digits, "0x%08x", mask);
  return digits;
}

// One per OS thread that runs blocks. Fibers are kept for the next block and the next launch.
class Machine {
 public:
  void begin(const Shape& shape, const std::function<void()>& kernel, const Options& options, uint64_t seed);
  void run_block(uint3 index);
  void end(bool abandoned);

  void* static_shared(const char* declaration, size_t bytes, const char* name, ValueType type, Site site);
  void* dynamic_shared(const char* name, ValueType type) {
    sanitizers::happens_after(&allocation_tag_);
    if (trace_ != nullptr) trace_->shared_array(name, dynamic_, shape_.dynamic_shared, type);
    return dynamic_;
  }
  int sync_threads(bool predicate, Site site);
  void warp_operation(const char* name, unsigned mask, const Lane& lane, Combine combine, Site site);
  void sync_warp(unsigned mask, Site site);
  void check_source_lane(const char* name, unsigned mask, int source, Site site);
  unsigned lane() const { return current_->number % kWarp; }
  Thread& current() { return *current_; }
  Trace* trace() { return trace_; }
  bool is_running() const { return current_ != nullptr; }
  template <class In>
  bool is_parameter(In in) const {
    return in(shape_.parameters, shape_.parameter_bytes) || in(kernel_, sizeof *kernel_);
  }
  [[noreturn]] void fail(const Thread& thread, Site site, const std::string& what) const;

  // While it lives the machine's own allocations belong to the runner: ThreadSanitizer would otherwise see one CUDA
  // thread free what another allocated.
  class AsRunner {
   public:
    explicit AsRunner(Machine& machine) : machine_(machine) { sanitizers::switch_to(machine_.runner_thread_); }
    ~AsRunner() { sanitizers::switch_to(machine_.current_->race_thread); }

   private:
    Machine& machine_;
  };

 private:
  static void fiber_entry();
  void prepare_threads();
  void run_rounds();
  void resume(Thread& thread);
  void wait();
  Warp& warp_of(const Thread& thread) { return warps_[thread.number / kWarp]; }
  void check_own_lane(const char* name, unsigned mask, Site site) const;
  unsigned lanes_waiting_with(const Thread& thread, const char* name, unsigned mask, Site site);
  void check_warp_operation(const Thread& thread, const char* name, unsigned mask, Site site);
  BarrierTags& tags_of(Warp& warp, unsigned mask);
  void check_shared(size_t bytes, Site site) const;
  std::string waiting_text(const Thread& thread) const;
  [[noreturn]] void report_deadlock() const;
  void* take_race_thread();
  void keep_race_threads();
  void drop_race_threads();

  std::vector<std::unique_ptr<Thread>> threads_;     // at least as many as the block has
  std::vector<Thread*> order_;
  std::vector<Warp> warps_;
  Thread* current_ = nullptr;
  Context runner_;
  void* runner_thread_ = nullptr;                    // ThreadSanitizer's
  std::vector<void*> ended_race_threads_;            // of this launch
  std::vector<void*> idle_race_threads_;             // of earlier ones
  std::exception_ptr error_;

  Shape shape_{};
  const std::function<void()>* kernel_ = nullptr;
  Options options_;
  std::mt19937_64 random_;
  Trace* trace_ = nullptr;

  std::vector<Memory> arenas_;                       // shared memory
  std::vector<SharedArray> arrays_;
  void* dynamic_ = nullptr;
  size_t shared_bytes_ = 0;
  char allocation_tag_ = 0;

  BarrierTags barrier_;
  unsigned arrived_ = 0;
  const Thread* first_arrived_ = nullptr;
  unsigned exited_ = 0;
  int predicates_ = 0;
  int barrier_result_ = 0;
};

thread_local Machine* machine = nullptr;
// What the host wrote before a launch is seen by all its threads, and what they wrote by the host after it. Two tags:
// with one, a block would come after those that have ended.
char launch_tag, done_tag, fence_tag;

void Machine::begin(const Shape& shape, const std::function<void()>& kernel, const Options& options, uint64_t seed) {
  shape_ = shape;
  kernel_ = &kernel;
  options_ = options;
  random_.seed(seed);
  error_ = nullptr;
  trace_ = active_trace();
  runner_thread_ = sanitizers::current_thread();
  blockDim = shape.block;
  gridDim = shape.grid;
  const unsigned count = shape.block.x * shape.block.y * shape.block.z;
  while (threads_.size() < count) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->number = static_cast<unsigned>(threads_.size() - 1);
  }
  order_.clear();
  for (unsigned t = 0; t < count; ++t) {
    threads_[t]->index = {t % shape.block.x, t / shape.block.x % shape.block.y, t / (shape.block.x * shape.block.y)};
    order_.push_back(threads_[t].get());
  }
}

void Machine::run_block(uint3 index) {
  blockIdx = index;
  prepare_threads();
  if (trace_ != nullptr) trace_->begin_block(index);
  Memory dynamic = poisoned(shape_.dynamic_shared);
  dynamic_ = dynamic.get();
  shared_bytes_ = shape_.dynamic_shared;
  arenas_.push_back(std::move(dynamic));
  sanitizers::happens_before(&allocation_tag_);
  run_rounds();
  if (trace_ != nullptr) trace_->end_block();
  // Under race detection memory lives until the launch ends: blocks are not ordered, though they run in turn, and must
  // not seem to meet in an address that one got after the other.
  if (!sanitizers::kRaces) arenas_.clear();
  arrays_.clear();
  keep_race_threads();
}

void Machine::end(bool abandoned) {
  arenas_.clear();
  arrays_.clear();
  keep_race_threads();            // of a block that was abandoned
  if (abandoned) return drop_race_threads();
  // Making them takes ThreadSanitizer most of its time. The next launch comes after this one in any case, so it may
  // have them again; one that stopped in the middle of a kernel is of no more use.
  idle_race_threads_.insert(idle_race_threads_.end(), ended_race_threads_.begin(), ended_race_threads_.end());
  ended_race_threads_.clear();
}

void Machine::prepare_threads() {
  const unsigned count = static_cast<unsigned>(order_.size());
  warps_.clear();
  warps_.resize((count + kWarp - 1) / kWarp);
  for (Thread* thread : order_) {
    thread->fiber.reset(&Machine::fiber_entry);
    thread->race_thread = take_race_thread();
    thread->state = State::kReady;
    thread->open_copies.clear();
    thread->copy_groups.clear();
    warp_of(*thread).existing |= 1u << thread->number % kWarp;
  }
  arrived_ = exited_ = 0;
  predicates_ = 0;
}

void Machine::fiber_entry() {
  Machine& self = *machine;
  Thread& thread = *self.current_;
  thread.fiber.started(self.runner_);
  sanitizers::happens_after(&launch_tag);
  try {
    (*self.kernel_)();
  } catch (...) {
    self.error_ = std::current_exception();
  }
  sanitizers::happens_before(&done_tag);
  if (self.trace_ != nullptr) self.trace_->settle(thread.number);
  thread.state = State::kExited;
  ++self.exited_;
  self.warp_of(thread).exited |= 1u << thread.number % kWarp;
  sanitizers::switch_to(self.runner_thread_);
  thread.fiber.switch_to(self.runner_, true);
  std::abort();                   // an exited thread was resumed
}

void Machine::run_rounds() {
  while (exited_ < order_.size()) {
    if (options_.seed != 0) std::shuffle(order_.begin(), order_.end(), random_);
    bool progress = false;
    for (Thread* thread : order_) {
      if (thread->state != State::kReady) continue;
      progress = true;
      resume(*thread);
      if (error_) std::rethrow_exception(error_);
    }
    if (!progress) report_deadlock();
  }
}

void Machine::resume(Thread& thread) {
  current_ = &thread;
  threadIdx = thread.index;
  sanitizers::switch_to(thread.race_thread);
  runner_.switch_to(thread.fiber);
  current_ = nullptr;
}

void Machine::wait() {
  sanitizers::switch_to(runner_thread_);
  current_->fiber.switch_to(runner_);
}

void Machine::fail(const Thread& thread, Site site, const std::string& what) const {
  const std::string message =
      "block " + text(blockIdx) + " thread " + text(thread.index) + " at " + text(site) + ": " + what;
  throw Error(message, blockIdx, thread.index, site);
}

std::string Machine::waiting_text(const Thread& thread) const {
  if (thread.state == State::kExited) return "thread " + text(thread.index) + " has exited";
  return "thread " + text(thread.index) + " waits at " + thread.waits_for + ", " + text(thread.site);
}

// Nobody can go on. A lane that waits for its warp is the better witness: those at a barrier wait for it.
void Machine::report_deadlock() const {
  const Thread* witness = nullptr;
  for (unsigned t = 0; t < order_.size(); ++t) {
    const Thread* thread = threads_[t].get();
    if (thread->state == State::kAtWarpOperation) {
      witness = thread;
      break;
    }
    if (thread->state == State::kAtBarrier && witness == nullptr) witness = thread;
  }
  const bool in_warp = witness->state == State::kAtWarpOperation;
  const auto count = static_cast<unsigned>(order_.size());
  const unsigned first = in_warp ? witness->number / kWarp * kWarp : 0;
  for (unsigned t = first; t < (in_warp ? std::min(first + kWarp, count) : count); ++t) {
    const Thread& other = *threads_[t];
    const bool expected = !in_warp || (witness->mask >> (t - first) & 1) != 0;
    const bool alike = other.state == witness->state && !(other.site != witness->site);
    if (!expected || (alike && (!in_warp || other.mask == witness->mask))) continue;
    fail(*witness, witness->site, std::string("waits at ") + witness->waits_for +
         (in_warp ? " for lanes that do not come; " : " for threads of its block that do not come; ") +
         waiting_text(other) + ".");
  }
  fail(*witness, witness->site, std::string("waits at ") + witness->waits_for + " for ever.");
}

void Machine::check_shared(size_t bytes, Site site) const {
  if (bytes > options_.limits->shared_per_block) {
    fail(*current_, site, "the block uses " + std::to_string(bytes) + " bytes of shared memory, " +
         options_.limits->name + " has " + std::to_string(options_.limits->shared_per_block) + ".");
  }
  if (bytes - shape_.dynamic_shared > kMostStaticShared) {
    fail(*current_, site, "the block's static shared arrays take " + std::to_string(bytes - shape_.dynamic_shared) +
         " bytes, the most is " + std::to_string(kMostStaticShared) + ": use dynamic shared memory.");
  }
}

void* Machine::static_shared(const char* declaration, size_t bytes, const char* name, ValueType type, Site site) {
  void* data = nullptr;
  {
    const AsRunner guard(*this);
    for (const SharedArray& array : arrays_) {
      if (array.declaration == declaration) data = array.data;
    }
    if (data == nullptr) {
      shared_bytes_ += bytes;
      check_shared(shared_bytes_, site);
      arenas_.push_back(poisoned(bytes));
      data = arenas_.back().get();
      arrays_.push_back({declaration, data});
      if (trace_ != nullptr) trace_->shared_array(name, data, bytes, type);
      sanitizers::happens_before(&allocation_tag_);
    }
  }
  sanitizers::happens_after(&allocation_tag_);       // after the poisoning, not after other threads
  return data;
}

int Machine::sync_threads(bool predicate, Site site) {
  Thread& thread = *current_;
  if (trace_ != nullptr) trace_->barrier(thread.number, site);
  if (arrived_ == 0) {
    first_arrived_ = &thread;
  } else if (first_arrived_->site != site) {
    fail(thread, site, "came to another __syncthreads while " + waiting_text(*first_arrived_) + ".");
  }
  void* tag = barrier_.next();
  sanitizers::happens_before(tag);
  thread.state = State::kAtBarrier;
  thread.site = site;
  thread.waits_for = "__syncthreads";
  predicates_ += predicate;
  if (++arrived_ < order_.size()) {
    wait();
  } else {
    ++barrier_.completed;
    barrier_result_ = std::exchange(predicates_, 0);
    arrived_ = 0;
    for (Thread* other : order_) other->state = State::kReady;
  }
  sanitizers::happens_after(tag);
  return barrier_result_;
}

void Machine::check_own_lane(const char* name, unsigned mask, Site site) const {
  if (mask >> lane() & 1) return;
  fail(*current_, site, std::string(name) + " with mask " + hex(mask) + ", which leaves the calling lane " +
       std::to_string(lane()) + " out.");
}

void Machine::check_warp_operation(const Thread& thread, const char* name, unsigned mask, Site site) {
  Warp& warp = warp_of(thread);
  check_own_lane(name, mask, site);
  if ((mask & warp.exited) != 0) {
    fail(thread, site, std::string(name) + " with mask " + hex(mask) + ", whose lanes " + hex(mask & warp.exited) +
         " have exited.");
  }
}

// The lanes of `mask` that wait at the same place with the same mask, as bits. A lane that waits elsewhere may still
// come, unless what it waits for includes the calling lane: then neither ever goes on.
unsigned Machine::lanes_waiting_with(const Thread& thread, const char* name, unsigned mask, Site site) {
  const Warp& warp = warp_of(thread);
  const unsigned first = thread.number / kWarp * kWarp;
  if (warp.waiting == 0) return 0;
  const auto same = [&](const Thread& other) { return other.mask == mask && !(other.site != site); };
  if (warp.uniform && same(*threads_[first + static_cast<unsigned>(__builtin_ctz(warp.waiting))])) return warp.waiting;
  unsigned together = 0;
  for (unsigned l = 0; l < kWarp; ++l) {
    if ((warp.waiting & mask) >> l & 1) {
      const Thread& other = *threads_[first + l];
      if (same(other)) {
        together |= 1u << l;
      } else if (other.mask >> lane() & 1) {
        fail(thread, site, std::string(name) + " with mask " + hex(mask) + " while " + waiting_text(other) +
             ", with mask " + hex(other.mask) + ".");
      }
    }
  }
  return together;
}

void Machine::warp_operation(const char* name, unsigned mask, const Lane& lane_data, Combine combine, Site site) {
  Thread& thread = *current_;
  check_warp_operation(thread, name, mask, site);
  if (trace_ != nullptr) trace_->warp_operation(thread.number, name, lane_data, site);
  Warp& warp = warp_of(thread);
  const unsigned together = lanes_waiting_with(thread, name, mask, site) | 1u << lane();
  warp.uniform = together == (warp.waiting | 1u << lane());
  warp.lanes[lane()] = lane_data;
  warp.waiting |= 1u << lane();
  thread.state = State::kAtWarpOperation;
  thread.site = site;
  thread.waits_for = name;
  thread.mask = mask;
  const unsigned expected = mask & warp.existing;
  if (together != expected) return wait();
  if (combine != nullptr) combine(warp.lanes, expected);
  warp.waiting &= ~mask;
  const unsigned first = thread.number / kWarp * kWarp;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (expected >> l & 1) threads_[first + l]->state = State::kReady;
  }
}

BarrierTags& Machine::tags_of(Warp& warp, unsigned mask) {
  const AsRunner guard(*this);
  for (MaskTags& entry : warp.sync_tags) {
    if (entry.mask == mask) return *entry.tags;
  }
  warp.sync_tags.push_back({mask, std::make_unique<BarrierTags>()});
  return *warp.sync_tags.back().tags;
}

void Machine::sync_warp(unsigned mask, Site site) {
  BarrierTags& tags = tags_of(warp_of(*current_), mask);
  const unsigned before = tags.completed;
  void* tag = tags.next();
  sanitizers::happens_before(tag);
  warp_operation("__syncwarp", mask, {nullptr, nullptr, 0}, nullptr, site);
  if (tags.completed == before) ++tags.completed;    // the first to go on; the others see it counted
  sanitizers::happens_after(tag);
}

void Machine::check_source_lane(const char* name, unsigned mask, int source, Site site) {
  check_own_lane(name, mask, site);
  const unsigned readable = mask & warp_of(*current_).existing;
  if (readable >> source & 1) return;
  fail(*current_, site, std::string(name) + " with mask " + hex(mask) + " reads lane " + std::to_string(source) +
       ", which takes no part.");
}

void* Machine::take_race_thread() {
  if (idle_race_threads_.empty()) return sanitizers::new_thread();
  void* thread = idle_race_threads_.back();
  idle_race_threads_.pop_back();
  return thread;
}

void Machine::keep_race_threads() {
  if (!sanitizers::kRaces) return;
  for (Thread* thread : order_) {
    if (thread->race_thread != nullptr) ended_race_threads_.push_back(std::exchange(thread->race_thread, nullptr));
  }
  // ThreadSanitizer has room for about 8,000. Dropping some orders the blocks that follow after them.
  constexpr size_t kMost = 6000;
  if (ended_race_threads_.size() > kMost) drop_race_threads();
}

void Machine::drop_race_threads() {
  for (void* thread : ended_race_threads_) sanitizers::end_thread(thread);
  ended_race_threads_.clear();
}

// Machines outlive launches because their fibers' stacks are worth keeping.
class Pool {
 public:
  std::unique_ptr<Machine> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Machine>();
    std::unique_ptr<Machine> taken = std::move(idle_.back());
    idle_.pop_back();
    return taken;
  }
  void put_back(std::unique_ptr<Machine> returned) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(returned));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> idle_;
};

Pool& pool() {
  static Pool machines;
  return machines;
}

void check_shape(const Shape& shape, const Architecture& limits) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw Error("launch: " + what + ".", {}, {}, Site("", 0));
  };
  const auto name = [](const dim3& d) { return text(uint3{d.x, d.y, d.z}); };
  const dim3 &grid = shape.grid, &block = shape.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  require(grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7FFFFFFF && grid.y <= 65535 && grid.z <= 65535,
          "expected a grid of at least (1,1,1) and at most (2147483647,65535,65535) blocks, got " + name(grid));
  require(threads >= 1 && threads <= kMostThreads && block.z <= 64,
          "expected a block of 1 to 1024 threads and a depth of at most 64, got " + name(block));
  require(shape.dynamic_shared <= limits.shared_per_block,
          "expected at most " + std::to_string(limits.shared_per_block) + " bytes of shared memory on " + limits.name +
              ", got " + std::to_string(shape.dynamic_shared));
}

// What the OS threads of one launch have in common.
struct Launch {
  const Shape& shape;
  const std::function<void()>& kernel;
  const Options& options;
  uint64_t num_blocks;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};
};

void run_blocks(Launch& launch) {
  std::unique_ptr<Machine> taken = pool().take();
  machine = taken.get();
  const dim3& grid = launch.shape.grid;
  bool begun = false;
  for (uint64_t b; !launch.failed && (b = launch.next++) < launch.num_blocks;) {
    try {
      // Seeded by block and not by OS thread: a run can be repeated whoever takes the block.
      machine->begin(launch.shape, launch.kernel, launch.options, launch.options.seed + b);
      begun = true;
      machine->run_block({static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                          static_cast<unsigned>(b / grid.x / grid.y)});
    } catch (...) {
      if (!launch.failed.exchange(true)) launch.error = std::current_exception();
    }
  }
  // The order matters: the threads' writes to shared memory come before it is freed.
  sanitizers::happens_after(&done_tag);
  if (begun) machine->end(launch.failed);
  machine = nullptr;
  pool().put_back(std::move(taken));
}

}  // namespace

const Architecture& architecture(const std::string& name) {
  std::string known;
  for (const Architecture& each : kArchitectures) {
    if (name == each.name) return each;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw std::invalid_argument("architecture: expected one of " + known + ", got " + name + ".");
}

Options& options() {
  thread_local Options current;
  return current;
}

void run_grid(const Shape& shape, const std::function<void()>& kernel) {
  if (machine != nullptr) throw std::logic_error("a kernel cannot launch a kernel");
  const Options current = options();
  check_shape(shape, *current.limits);
  Launch launch{shape, kernel, current, uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z};
  sanitizers::happens_before(&launch_tag);
  if (active_trace() != nullptr) active_trace()->begin_launch(shape);
  // Race detection wants one: the two tags of a launch are all it knows about OS threads. So does a trace.
  const uint64_t wanted = sanitizers::kRaces || active_trace() != nullptr ? 1 : static_cast<uint64_t>(std::max(1, current.os_threads));
  std::vector<std::thread> helpers;
  while (helpers.size() + 1 < std::min(wanted, launch.num_blocks)) {
    try {
      helpers.emplace_back([&launch] { run_blocks(launch); });
    } catch (const std::system_error&) {
      break;                      // no more threads to be had: fewer do the same work
    }
  }
  run_blocks(launch);
  for (std::thread& helper : helpers) helper.join();
  if (launch.error) std::rethrow_exception(launch.error);
}

void* static_shared(const char* declaration, size_t bytes, const char* name, ValueType type, Site site) {
  return machine->static_shared(declaration, bytes, name, type, site);
}
void* dynamic_shared(const char* name, ValueType type) { return machine->dynamic_shared(name, type); }
int sync_threads(bool predicate, Site site) { return machine->sync_threads(predicate, site); }
void warp_operation(const char* name, unsigned mask, const Lane& lane, Combine combine, Site site) {
  machine->warp_operation(name, mask, lane, combine, site);
}
void sync_warp(unsigned mask, Site site) { machine->sync_warp(mask, site); }
void check_source_lane(const char* name, unsigned mask, int source, Site site) {
  machine->check_source_lane(name, mask, source, site);
}
int lane_index() { return static_cast<int>(machine->lane()); }

void copy_async(void* to, const void* from, size_t bytes, Site site) {
  const auto address = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (address % bytes != 0) {
    machine->fail(machine->current(), site, "cp.async of " + std::to_string(bytes) + " bytes is misaligned.");
  }
  if (Trace* trace = machine->trace()) {
    trace->access(thread_number(), site, "cp.async", from, bytes, Did::kRead);
    trace->access(thread_number(), site, "cp.async", to, bytes, Did::kWrite);
  }
  const Machine::AsRunner guard(*machine);
  machine->current().open_copies.push_back({to, from, bytes});
}

void copy_async_commit() {
  const Machine::AsRunner guard(*machine);
  Thread& thread = machine->current();
  thread.copy_groups.push_back(std::exchange(thread.open_copies, {}));
}

void copy_async_wait(size_t newest_left) {
  std::deque<CopyGroup>& groups = machine->current().copy_groups;
  while (groups.size() > newest_left) {
    // The library's memcpy: the sanitizers see it as this CUDA thread's reads and writes.
    for (const AsyncCopy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    const Machine::AsRunner guard(*machine);
    groups.pop_front();
  }
}

void watch(const char* name, uint64_t bits, ValueType type, Site site) {
  if (Trace* trace = machine->trace()) trace->watch(thread_number(), name, bits, type, site);
}

bool is_kernel_memory(const void* address) {
  if (machine == nullptr || !machine->is_running()) return false;
  const auto in = [address](const void* begin, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin) < bytes;
  };
  if (in(&threadIdx, sizeof threadIdx) || in(&blockIdx, sizeof blockIdx) || in(&blockDim, sizeof blockDim) ||
      in(&gridDim, sizeof gridDim)) {
    return false;
  }
  return !machine->is_parameter(in) && !machine->current().fiber.is_on_stack(address);
}
unsigned thread_number() { return machine->current().number; }

void memory_fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  // ThreadSanitizer knows no fences. Ordering each after all earlier ones hides some races and raises no false alarm.
  sanitizers::happens_after(&fence_tag);
  sanitizers::happens_before(&fence_tag);
}

void trap(Site site) { machine->fail(machine->current(), site, "__trap()."); }

}  // namespace twinfer::simt
