// Compiled without -fsanitize=thread, or the record would record itself.
#include "watch.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "simt/builtins.h"

namespace watch {
namespace {

struct Region {
  const char* name;
  uintptr_t begin, end;
};

struct Access {
  const char* region;
  unsigned block, thread;
  char kind;
  size_t offset, bytes;
};

std::vector<Region> regions;
std::vector<Access> accesses;

void note(const void* address, size_t bytes, char kind) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Region& each : regions) {
    if (at < each.begin || at >= each.end) continue;
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    accesses.push_back({each.name, block, threadIdx.x, kind, at - each.begin, bytes});
    return;
  }
}

}  // namespace

void region(const char* name, const void* begin, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  for (Region& each : regions) {
    if (std::strcmp(each.name, name) != 0) continue;
    each = {name, at, at + bytes};
    return;
  }
  regions.push_back({name, at, at + bytes});
}

void print() {
  for (const Access& a : accesses) {
    std::printf("access %s %u %u %c %zu %zu\n", a.region, a.block, a.thread, a.kind, a.offset, a.bytes);
  }
}

}  // namespace watch

#define WATCH(size)                                                                       \
  extern "C" void __tsan_read##size(void* p) { watch::note(p, size, 'r'); }               \
  extern "C" void __tsan_write##size(void* p) { watch::note(p, size, 'w'); }              \
  extern "C" void __tsan_unaligned_read##size(void* p) { watch::note(p, size, 'r'); }     \
  extern "C" void __tsan_unaligned_write##size(void* p) { watch::note(p, size, 'w'); }    \
  extern "C" void __tsan_volatile_read##size(void* p) { watch::note(p, size, 'r'); }      \
  extern "C" void __tsan_volatile_write##size(void* p) { watch::note(p, size, 'w'); }
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
#undef WATCH
extern "C" void __tsan_read_range(void* p, size_t bytes) { watch::note(p, bytes, 'r'); }
extern "C" void __tsan_write_range(void* p, size_t bytes) { watch::note(p, bytes, 'w'); }
// What atomicAdd of a float is made of: a load, and exchanges until one succeeds. The load counts.
extern "C" unsigned __tsan_atomic32_load(const volatile unsigned* p, int) {
  watch::note(const_cast<const unsigned*>(p), 4, 'a');
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
extern "C" int __tsan_atomic32_compare_exchange_strong(volatile unsigned* p, unsigned* expected, unsigned value, int,
                                                       int) {
  return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
