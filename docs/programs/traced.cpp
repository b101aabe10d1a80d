// A file of its own, compiled without -fsanitize=thread: a trace that traced itself would be of no use.
#include "traced.h"

#include <cstdio>
#include <vector>

#include "simt/trace.h"

namespace traced {
namespace {

using twinfer::simt::Did;
using twinfer::simt::Space;

const char* text(Did did) { return did == Did::kRead ? "read" : did == Did::kWrite ? "write" : "atomic"; }
const char* text(Space space) { return space == Space::kShared ? "shared" : "global"; }

void print(const twinfer::simt::Trace& trace) {
  const auto name_of = [&](Space space, int array) {
    return (space == Space::kShared ? trace.shared_arrays() : trace.buffers())[static_cast<size_t>(array)].name.c_str();
  };
  for (const auto& [key, c] : trace.counts()) {
    std::printf("count %s %s %s %u %d %d %d %d\n", text(key.did), text(key.space), name_of(key.space, key.array), key.width,
                static_cast<int>(c.instructions), static_cast<int>(c.lanes), static_cast<int>(c.sectors),
                static_cast<int>(c.wavefronts));
  }
  for (const twinfer::simt::WarpEvent& event : trace.events()) {
    if (event.did > Did::kAtomic) continue;  // no access
    std::printf("event %s %s %s %u %u %u", text(event.did), text(event.space),
                name_of(event.space, event.lanes[0].array), event.width, event.sectors, event.wavefronts);
    size_t next = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (event.mask >> lane & 1) std::printf(" %d:%d", lane, static_cast<int>(event.lanes[next++].offset));
    }
    std::printf("\n");
  }
  const twinfer::simt::TracedLaunch& launch = trace.launches().back();
  std::printf("barriers %d\n", static_cast<int>(launch.barriers));
  for (const auto& [name, count] : launch.operations) {
    std::printf("operation %s %d\n", name.c_str(), static_cast<int>(count));
  }
}

}  // namespace

void run(std::initializer_list<Buffer> buffers, const std::function<void()>& part) {
  std::vector<twinfer::simt::Named> named;
  for (const Buffer& each : buffers) {
    named.push_back({each.name, reinterpret_cast<uintptr_t>(each.begin), each.bytes, twinfer::simt::ValueType::kFloat32});
  }
  twinfer::simt::Trace trace(std::move(named), {0, 0, 0});
  twinfer::simt::active_trace() = &trace;
  part();
  twinfer::simt::active_trace() = nullptr;
  print(trace);
}

}  // namespace traced
