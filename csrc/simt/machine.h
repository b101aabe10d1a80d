// The machine that runs a grid: blocks over OS threads, and in each block one fiber a CUDA thread.
//
// A fiber runs until it waits at a barrier or a warp operation; the last to arrive goes on at once. With a seed the
// order in which fibers run is drawn anew for each round, so that a missing barrier shows in wrong values on some seed.
//
// It is strict where CUDA says "undefined": a barrier that not all threads of the block reach, a warp operation that
// not all lanes of its mask reach, a source lane outside the mask, a launch past the architecture's limits. Each is an
// Error with block, thread, file and line. It has no weak memory order and says nothing about time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "simt/trace.h"
#include "simt/types.h"

namespace twinfer::simt {

// Where a kernel calls a primitive. As the default argument of one, it is the place of the call.
struct Site {
  const char* file;
  int line;
  constexpr Site(const char* caller_file = __builtin_FILE(), int caller_line = __builtin_LINE())
      : file(caller_file), line(caller_line) {}
  bool operator!=(const Site& other) const {
    return line != other.line || (file != other.file && std::strcmp(file, other.file) != 0);
  }
};

// The message says it all; the fields are for programs.
class Error : public std::runtime_error {
 public:
  Error(const std::string& message, uint3 block_index, uint3 thread_index, Site call_site)
      : std::runtime_error(message), block(block_index), thread(thread_index), site(call_site) {}

  uint3 block, thread;
  Site site;
};

// What one launch may ask for: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
struct Architecture {
  const char* name;
  size_t shared_per_block;        // bytes, static and dynamic together
};

// Throws std::invalid_argument for a name other than sm_80, sm_86, sm_89 and sm_90.
const Architecture& architecture(const std::string& name);

struct Options {
  uint64_t seed = 0;              // 0: threads run in ascending order
  int os_threads = 1;             // that blocks are spread over
  const Architecture* limits = &architecture("sm_80");
};

// The options of launches from this OS thread.
Options& options();

struct Shape {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared;          // bytes
  // Where the kernel's parameters lie. On a GPU that is constant memory, so a trace leaves them out.
  const void* parameters = nullptr;
  size_t parameter_bytes = 0;
};

// Runs `kernel` once for each thread of the grid and returns when all have ended. Throws the first Error; the rest of
// the grid is then abandoned, what it wrote stays.
void run_grid(const Shape& shape, const std::function<void()>& kernel);

// ---- what kernels call, through device.h -----------------------------------------------------------------------

// Memory of this block, poisoned with 0xFF bytes (NaN) when the block starts. One address a declaration and block.
// `name` and `type` are for a trace.
void* static_shared(const char* declaration, size_t bytes, const char* name, ValueType type, Site site);
void* dynamic_shared(const char* name, ValueType type);

// Returns how many threads of the block brought a predicate that holds.
int sync_threads(bool predicate, Site site);

// What a lane brings to a warp operation and where its result goes.
struct Lane {
  const void* in;
  void* out;
  int source;
  ValueType type = ValueType::kNone;  // of the value that a shuffle moves, for a trace
};
// Computes the results of all lanes in `mask` when the last has arrived.
using Combine = void (*)(Lane* lanes, unsigned mask);

// Waits until every lane of `mask` has arrived at the same place with the same mask.
void warp_operation(const char* name, unsigned mask, const Lane& lane, Combine combine, Site site);
// The same, and what lanes wrote before it is seen by the others after it. Other warp operations order no memory.
void sync_warp(unsigned mask, Site site);
// Throws Error unless the lane is there to be read.
void check_source_lane(const char* name, unsigned mask, int source, Site site);
int lane_index();

// Copies that happen when they are waited for, and not before: a missing wait reads poison.
void copy_async(void* to, const void* from, size_t bytes, Site site);
void copy_async_commit();
void copy_async_wait(size_t newest_left);

// A register by name, for a trace.
void watch(const char* name, uint64_t bits, ValueType type, Site site);

// ---- what the hooks of a traced kernel ask ---------------------------------------------------------------------

// Whether a CUDA thread is running and the address is neither on its stack nor a parameter of the kernel nor one of the
// builtin variables.
bool is_kernel_memory(const void* address);
unsigned thread_number();       // of the running thread in its block

void memory_fence();
[[noreturn]] void trap(Site site);

}  // namespace twinfer::simt
