// What code built with -fsanitize=thread calls before each load and store: here in place of ThreadSanitizer, which is
// not linked, so that the trace sees the accesses of kernels whose source says nothing of it. Part of _simt_trace alone.
#include <cstddef>

#include "simt/machine.h"
#include "simt/trace.h"

namespace {

using twinfer::simt::Did;

void note(const void* code, const void* address, size_t bytes, Did did) {
  twinfer::simt::Trace* trace = twinfer::simt::active_trace();
  if (trace == nullptr || !twinfer::simt::is_kernel_memory(address)) return;
  // The return address is that of the instruction after the call; the call is what belongs to the source line.
  trace->access(twinfer::simt::thread_number(), static_cast<const char*>(code) - 1, address, bytes, did);
}

}  // namespace

#define HOOK extern "C" __attribute__((visibility("hidden")))
#define CALLER __builtin_return_address(0)

#define TWINFER_ACCESS(bytes)                                                                                    \
  HOOK void __tsan_read##bytes(void* address) { note(CALLER, address, bytes, Did::kRead); }                      \
  HOOK void __tsan_write##bytes(void* address) { note(CALLER, address, bytes, Did::kWrite); }                    \
  HOOK void __tsan_unaligned_read##bytes(void* address) { note(CALLER, address, bytes, Did::kRead); }            \
  HOOK void __tsan_unaligned_write##bytes(void* address) { note(CALLER, address, bytes, Did::kWrite); }
TWINFER_ACCESS(1)
TWINFER_ACCESS(2)
TWINFER_ACCESS(4)
TWINFER_ACCESS(8)
TWINFER_ACCESS(16)
#undef TWINFER_ACCESS

HOOK void __tsan_read_range(void* address, size_t bytes) { note(CALLER, address, bytes, Did::kRead); }
HOOK void __tsan_write_range(void* address, size_t bytes) { note(CALLER, address, bytes, Did::kWrite); }
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}

// Atomics are calls that do the work. The order of memory is the strictest, whatever was asked for.
#define TWINFER_ATOMIC(bits, T)                                                                                  \
  HOOK T __tsan_atomic##bits##_load(const volatile T* p, int) {                                                  \
    note(CALLER, const_cast<const T*>(p), sizeof(T), Did::kRead);                                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                 \
  }                                                                                                              \
  HOOK void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                               \
    note(CALLER, const_cast<const T*>(p), sizeof(T), Did::kWrite);                                               \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                    \
  }                                                                                                              \
  HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {            \
    note(CALLER, const_cast<const T*>(p), sizeof(T), Did::kAtomic);                                              \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
  }                                                                                                              \
  HOOK int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {              \
    note(CALLER, const_cast<const T*>(p), sizeof(T), Did::kAtomic);                                              \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
  }                                                                                                              \
  TWINFER_ATOMIC_UPDATE(bits, T, exchange, __atomic_exchange_n)                                                  \
  TWINFER_ATOMIC_UPDATE(bits, T, fetch_add, __atomic_fetch_add)                                                  \
  TWINFER_ATOMIC_UPDATE(bits, T, fetch_sub, __atomic_fetch_sub)                                                  \
  TWINFER_ATOMIC_UPDATE(bits, T, fetch_and, __atomic_fetch_and)                                                  \
  TWINFER_ATOMIC_UPDATE(bits, T, fetch_or, __atomic_fetch_or)                                                    \
  TWINFER_ATOMIC_UPDATE(bits, T, fetch_xor, __atomic_fetch_xor)
#define TWINFER_ATOMIC_UPDATE(bits, T, name, builtin)                                                            \
  HOOK T __tsan_atomic##bits##_##name(volatile T* p, T v, int) {                                                 \
    note(CALLER, const_cast<const T*>(p), sizeof(T), Did::kAtomic);                                              \
    return builtin(p, v, __ATOMIC_SEQ_CST);                                                                      \
  }
TWINFER_ATOMIC(8, unsigned char)
TWINFER_ATOMIC(16, unsigned short)
TWINFER_ATOMIC(32, unsigned)
TWINFER_ATOMIC(64, unsigned long)
#undef TWINFER_ATOMIC
#undef TWINFER_ATOMIC_UPDATE

HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HOOK void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
