// Fibers: stacks of execution that one OS thread switches between. One of them is one CUDA thread.
//
// On x86-64 a switch is fourteen instructions; elsewhere, or with TWINFER_SIMT_UCONTEXT, it is swapcontext, which costs
// ten times as much because it saves the signal mask by a system call.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(_WIN32)
#define TWINFER_SIMT_UCONTEXT 1
#endif
#if defined(TWINFER_SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace twinfer::simt {

// A place to come back to: a fiber, or the code that runs fibers. It must not move while suspended.
class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Runs `target` until something switches back here. `finished`: nothing ever will.
  void switch_to(Context& target, bool finished = false);

  bool is_on_stack(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    return byte >= static_cast<const char*>(stack_) && byte < static_cast<const char*>(stack_) + stack_bytes_;
  }

 protected:
  // To be called first on a new stack: tells the sanitizers whose stack it came from.
  static void arrive_from(Context& previous);

#if defined(TWINFER_SIMT_UCONTEXT)
  ucontext_t registers_{};
#else
  void* stack_pointer_ = nullptr;
#endif
  const void* stack_ = nullptr;  // lowest address; of the runner it is known once a fiber has started
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;   // AddressSanitizer's
};

class Fiber : public Context {
 public:
  using Entry = void (*)();

  // Throws std::bad_alloc when no stack can be mapped. Below the stack lies a page that faults: an overflow ends the
  // program there and does not run on into another fiber's stack.
  Fiber();
  ~Fiber();

  // Forgets whatever ran here. The next switch to this fiber calls `entry`, which must call `started` first and must
  // not return.
  void reset(Entry entry);
  void started(Context& runner) { arrive_from(runner); }
};

}  // namespace twinfer::simt
