// A record of what the threads of a grid did: every access to global and shared memory, every barrier and every warp
// operation, put together into accesses of whole warps. From it come bank conflicts, 32-byte sectors and bytes moved.
//
// The accesses come from the compiler: kernels built with -fsanitize=thread call a function before each load and store,
// and access_hooks.cpp has those functions in place of ThreadSanitizer's. Barriers and the like come from machine.cpp.
//
// Each CUDA thread is a fiber and runs alone until its next barrier or warp operation, so lanes must be brought together
// afterwards: the n-th time that a lane executed an instruction since its last barrier or warp operation goes with the
// n-th time of the others. That is how a warp runs when its lanes leave a loop one by one; in a loop inside another, if
// lanes go round the inner one unequally often, hardware may bring them together differently.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "simt/types.h"

namespace twinfer::simt {

struct Shape;
struct Site;
struct Lane;

// How the bits of a value are to be read; of a struct, as its members are in all kernels here: float32.
enum class ValueType : uint8_t { kNone, kFloat32, kFloat16, kBFloat16, kInt32, kInt64 };

template <class T>
constexpr ValueType value_type() {
  using E = std::remove_cv_t<std::remove_all_extents_t<std::remove_reference_t<T>>>;
  if (std::is_same_v<E, __half>) return ValueType::kFloat16;
  if (std::is_same_v<E, __nv_bfloat16>) return ValueType::kBFloat16;
  if (std::is_integral_v<E>) return sizeof(E) == 8 ? ValueType::kInt64 : ValueType::kInt32;
  return ValueType::kFloat32;
}

enum class Did : uint8_t { kRead, kWrite, kAtomic, kBarrier, kWarpOperation, kWatch };
enum class Space : uint8_t { kNone, kGlobal, kShared };

// Memory with a name: an argument of the kernel, or a shared array.
struct Named {
  std::string name;
  uintptr_t begin;
  size_t bytes;
  ValueType type;
};

// Where in the source: an address in the traced code, or a file and line, or the name of what was watched.
struct TraceSite {
  const void* address;
  const char* file;
  int line;
  std::string name;               // of the primitive or the watched value, empty for loads and stores
};

// All accesses of one kind at one place to one array, over the whole grid. "Instructions" are those of warps.
struct AccessCounts {
  uint64_t instructions = 0, lanes = 0, bytes = 0;
  uint64_t sectors = 0;           // of 32 bytes, global memory: what must be fetched or written
  uint64_t fewest_sectors = 0;    // that would hold as many distinct bytes
  uint64_t wavefronts = 0;        // shared memory: passes over the 32 banks
  uint64_t fewest_wavefronts = 0; // without conflicts
};

struct AccessKey {
  int launch;
  uint32_t site;
  Did did;
  Space space;
  int array;                      // index into buffers() or shared_arrays()
  uint32_t width;                 // bytes a lane
  bool operator<(const AccessKey& o) const {
    return std::tie(launch, site, did, space, array, width) < std::tie(o.launch, o.site, o.did, o.space, o.array, o.width);
  }
};

struct TracedLaunch {
  uint3 grid, block;
  size_t dynamic_shared;
  size_t shared_bytes = 0;        // static and dynamic, the most of any block
  uint64_t barriers = 0;          // __syncthreads, summed over blocks
  uint64_t warp_operations = 0;   // summed over warps
  uint64_t unnamed = 0;           // accesses to global memory that no buffer covers
  std::map<std::string, uint64_t> operations;         // warp operations by name
};

// What one warp did at one place.
struct WarpEvent {
  int launch, phase, warp;        // phase: barriers of the block before it
  Did did;
  uint32_t site, width;
  Space space;
  uint32_t mask;                  // lanes
  uint32_t sectors, wavefronts;
  struct Lane {
    int array;
    uint64_t offset;              // bytes into the array
    std::vector<uint8_t> value;   // of shared memory, of what a warp operation was given, or what was watched
  };
  std::vector<Lane> lanes;        // of the mask, ascending
  ValueType type;
};

class Trace {
 public:
  // Events are kept of one block of each launch, counts of all.
  Trace(std::vector<Named> buffers, uint3 block);

  // Memory that only the launcher knows, such as what one kernel leaves for the next.
  void name_memory(const char* name, const void* data, size_t bytes, ValueType type);

  // ---- what machine.cpp and the hooks call, in the order of the launch
  void begin_launch(const Shape& shape);
  void begin_block(uint3 index);
  void end_block();               // of one that ran to its end
  void shared_array(const char* name, void* data, size_t bytes, ValueType type);
  void access(unsigned thread, const void* code, const void* address, size_t bytes, Did did);
  void access(unsigned thread, const Site& site, const char* name, const void* address, size_t bytes, Did did);
  void barrier(unsigned thread, const Site& site);
  void warp_operation(unsigned thread, const char* name, const Lane& lane, const Site& site);
  void watch(unsigned thread, const char* name, uint64_t bits, ValueType type, const Site& site);
  // What the thread wrote last has arrived: the hook comes before the store.
  void settle(unsigned thread);

  // ---- the result
  const std::vector<Named>& buffers() const { return buffers_; }
  const std::vector<Named>& shared_arrays() const { return shared_arrays_; }
  const std::vector<TraceSite>& sites() const { return sites_; }
  const std::vector<TracedLaunch>& launches() const { return launches_; }
  const std::map<AccessKey, AccessCounts>& counts() const { return counts_; }
  const std::vector<WarpEvent>& events() const { return events_; }

 private:
  struct Entry {
    uint32_t site;
    Did did;
    uint8_t width;
    ValueType type;
    uint64_t address;
    uint64_t bits[2];             // the value, up to 16 bytes
  };
  struct Row {                    // the same entry of several lanes
    uint32_t site;
    uint32_t next;
    uint32_t mask = 0;
    const Entry* lanes[32];
  };
  struct Log {
    std::vector<Entry> entries;
    bool pending = false;         // the last entry is a write to shared memory
  };

  uint32_t site_of(const void* code);
  uint32_t site_of(const Site& site, const char* name);
  void add(unsigned thread, Entry entry);
  bool find(uint64_t address, Space& space, int& array) const;
  void end_warp(unsigned warp);
  void put_together(const std::vector<std::pair<const Entry*, const Entry*>>& epoch);
  void finish(const Row& row, unsigned warp, int phase);
  void count_access(const Row& row, WarpEvent& event);
  void count_array(const Row& row, unsigned lanes, Space space, int array, WarpEvent& event);
  void keep(const Row& row, WarpEvent& event);

  std::vector<Named> buffers_, shared_arrays_;
  std::vector<size_t> live_shared_;                   // of this block, indices into shared_arrays_
  uint3 kept_block_;
  bool keeping_ = false;
  std::vector<TraceSite> sites_;
  std::unordered_map<const void*, uint32_t> site_of_code_;
  std::map<std::tuple<std::string, int, std::string>, uint32_t> site_of_line_;
  std::vector<Log> logs_;                             // of the block's threads
  std::vector<Row> rows_;
  std::unordered_map<uint64_t, uint32_t> row_of_;
  std::vector<TracedLaunch> launches_;
  std::map<AccessKey, AccessCounts> counts_;
  std::vector<WarpEvent> events_;
};

// The trace that launches from this OS thread write to; null for none.
Trace*& active_trace();

}  // namespace twinfer::simt
