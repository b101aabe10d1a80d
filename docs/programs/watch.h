// Records what a kernel reads and writes, without a change to the kernel: it is compiled with -fsanitize=thread, which
// makes g++ call a function before each load and store, and watch.cpp has these functions in place of ThreadSanitizer's.
#pragma once

#include <cstddef>

namespace watch {

#if defined(WATCH_NOTHING)  // a build that somebody else watches: ThreadSanitizer, or nobody
inline void region(const char*, const void*, size_t) {}
inline void print() {}
#else
// From now on accesses to these bytes are recorded. Calling it again with the same name moves the region.
void region(const char* name, const void* begin, size_t bytes);

// A line an access, in the order in which they happened: region, block, thread, r, w or a (atomic), offset, bytes.
void print();
#endif

}  // namespace watch
