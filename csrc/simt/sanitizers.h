// What ThreadSanitizer and AddressSanitizer must be told about fibers. Every call is empty in an ordinary build.
//
// ThreadSanitizer sees each CUDA thread as a thread of its own (its fiber API), and two of them as ordered only where
// the kernel ordered them: `happens_before` and `happens_after` on one tag. fiber.cpp and machine.cpp must be compiled
// without -fsanitize=thread, as their own accesses are no accesses of the kernel; TWINFER_SIMT_TSAN asks for the calls.
#pragma once

#include <cstddef>

#if defined(TWINFER_SIMT_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#endif

#if defined(__SANITIZE_ADDRESS__)
#define TWINFER_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TWINFER_SIMT_ASAN 1
#endif
#endif
#if defined(TWINFER_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace twinfer::simt::sanitizers {

#if defined(TWINFER_SIMT_TSAN)
constexpr bool kRaces = true;
inline void happens_before(void* tag) { __tsan_release(tag); }
inline void happens_after(void* tag) { __tsan_acquire(tag); }
inline void* current_thread() { return __tsan_get_current_fiber(); }
inline void* new_thread() { return __tsan_create_fiber(0); }
inline void end_thread(void* thread) { __tsan_destroy_fiber(thread); }
// The flag says that a switch orders nothing: one CUDA thread does not wait for the other.
inline void switch_to(void* thread) { __tsan_switch_to_fiber(thread, 1); }
#else
constexpr bool kRaces = false;
inline void happens_before(void*) {}
inline void happens_after(void*) {}
inline void* current_thread() { return nullptr; }
inline void* new_thread() { return nullptr; }
inline void end_thread(void*) {}
inline void switch_to(void*) {}
#endif

#if defined(TWINFER_SIMT_ASAN)
constexpr bool kAddresses = true;
inline void leave_stack(void** save, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(save, bottom, size);
}
inline void enter_stack(void* saved, const void** old_bottom, size_t* old_size) {
  __sanitizer_finish_switch_fiber(saved, old_bottom, old_size);
}
inline void forget_stack(void* stack, size_t size) { __asan_unpoison_memory_region(stack, size); }
#else
constexpr bool kAddresses = false;
inline void leave_stack(void**, const void*, size_t) {}
inline void enter_stack(void*, const void**, size_t*) {}
inline void forget_stack(void*, size_t) {}
#endif

}  // namespace twinfer::simt::sanitizers
