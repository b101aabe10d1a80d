#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#include "simt/sanitizers.h"

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

#if !defined(TWINFER_SIMT_UCONTEXT)
// Saves the registers that a call preserves on this stack, exchanges the stack pointers and restores them from the
// other. The floating-point control words are left alone: no kernel changes them.
extern "C" void twinfer_simt_switch(void** save, void* load);
#if defined(__APPLE__)
#define SYMBOL "_twinfer_simt_switch"
#else
#define SYMBOL "twinfer_simt_switch"
#endif
asm(".text\n"
    ".globl " SYMBOL "\n"
    SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#endif

namespace twinfer::simt {

namespace {

constexpr bool kSanitized = sanitizers::kRaces || sanitizers::kAddresses;
// Kernels keep little on the stack; sanitized frames are several times as large.
constexpr size_t kStackBytes = (kSanitized ? 256 : 64) * 1024;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map(void* address, size_t bytes, int flags) {
  flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(address, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

}  // namespace

void Context::switch_to(Context& target, bool finished) {
  sanitizers::leave_stack(finished ? nullptr : &fake_stack_, target.stack_, target.stack_bytes_);
#if defined(TWINFER_SIMT_UCONTEXT)
  swapcontext(&registers_, &target.registers_);
#else
  twinfer_simt_switch(&stack_pointer_, target.stack_pointer_);
#endif
  sanitizers::enter_stack(fake_stack_, nullptr, nullptr);
}

void Context::arrive_from(Context& previous) {
  sanitizers::enter_stack(nullptr, &previous.stack_, &previous.stack_bytes_);
}

Fiber::Fiber() {
  char* memory = static_cast<char*>(map(nullptr, page_bytes() + kStackBytes, 0));
  mprotect(memory, page_bytes(), PROT_NONE);
  stack_ = memory + page_bytes();
  stack_bytes_ = kStackBytes;
}

Fiber::~Fiber() {
  char* lowest = static_cast<char*>(const_cast<void*>(stack_)) - page_bytes();
  munmap(lowest, page_bytes() + stack_bytes_);
}

void Fiber::reset(Entry entry) {
  void* stack = const_cast<void*>(stack_);
  // The stack last belonged to another CUDA thread. A fresh mapping makes ThreadSanitizer forget its accesses; frames
  // that never unwound leave AddressSanitizer's red zones behind.
  if (sanitizers::kRaces) map(stack, stack_bytes_, MAP_FIXED);
  sanitizers::forget_stack(stack, stack_bytes_);
#if defined(TWINFER_SIMT_UCONTEXT)
  getcontext(&registers_);
  registers_.uc_stack.ss_sp = stack;
  registers_.uc_stack.ss_size = stack_bytes_;
  registers_.uc_link = nullptr;
  makecontext(&registers_, entry, 0);
#else
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + stack_bytes_);
  *--top = nullptr;                                   // the return address of `entry`: backtraces end here, and
                                                      // the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(entry);            // where the switch returns to
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

}  // namespace twinfer::simt
