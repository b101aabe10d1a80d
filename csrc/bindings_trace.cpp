// The module fast._simt_trace: the same kernels and bindings as fast._simt, compiled so that a trace sees each access.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <dlfcn.h>

#include "simt/machine.h"
#include "simt/trace.h"

namespace py = pybind11;

namespace twinfer {

void bind_kernels(py::module_& m);

namespace {

using simt::Did;
using simt::Space;
using simt::ValueType;

const char* text(ValueType type) {
  switch (type) {
    case ValueType::kFloat32: return "float32";
    case ValueType::kFloat16: return "float16";
    case ValueType::kBFloat16: return "bfloat16";
    case ValueType::kInt32: return "int32";
    case ValueType::kInt64: return "int64";
    case ValueType::kNone: break;
  }
  return "";
}

const char* text(Did did) {
  switch (did) {
    case Did::kRead: return "read";
    case Did::kWrite: return "write";
    case Did::kAtomic: return "atomic";
    case Did::kBarrier: return "barrier";
    case Did::kWarpOperation: return "warp";
    case Did::kWatch: return "watch";
  }
  return "";
}

const char* text(Space space) { return space == Space::kGlobal ? "global" : space == Space::kShared ? "shared" : ""; }

py::tuple text(uint3 index) { return py::make_tuple(index.x, index.y, index.z); }

// Launches from this OS thread are recorded between begin and end.
class Recording {
 public:
  using Buffer = std::tuple<std::string, uintptr_t, size_t>;

  Recording(const std::vector<Buffer>& buffers, std::tuple<unsigned, unsigned, unsigned> block)
      : trace_(named(buffers), {std::get<0>(block), std::get<1>(block), std::get<2>(block)}) {}
  ~Recording() { end(); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void begin() { simt::active_trace() = &trace_; }
  void end() {
    if (simt::active_trace() == &trace_) simt::active_trace() = nullptr;
  }

  py::list buffers() const { return arrays(trace_.buffers()); }
  py::list shared_arrays() const { return arrays(trace_.shared_arrays()); }
  py::list launches() const;
  py::list sites() const;
  py::list counts() const;
  py::list events() const;

 private:
  static std::vector<simt::Named> named(const std::vector<Buffer>& buffers) {
    std::vector<simt::Named> all;
    for (const auto& [name, begin, bytes] : buffers) all.push_back({name, begin, bytes, ValueType::kNone});
    return all;
  }
  static py::list arrays(const std::vector<simt::Named>& all) {
    py::list list;
    for (const simt::Named& each : all) list.append(py::make_tuple(each.name, each.bytes, text(each.type)));
    return list;
  }

  simt::Trace trace_;
};

py::list Recording::launches() const {
  py::list list;
  for (const simt::TracedLaunch& launch : trace_.launches()) {
    list.append(py::make_tuple(text(launch.grid), text(launch.block), launch.shared_bytes, launch.barriers,
                               launch.operations, launch.unnamed));
  }
  return list;
}

// (offset in this module's file or -1, file, line, name); addr2line knows what lies at the offset.
py::list Recording::sites() const {
  py::list list;
  for (const simt::TraceSite& site : trace_.sites()) {
    Dl_info module{};
    ptrdiff_t offset = -1;
    if (site.address != nullptr && dladdr(site.address, &module) != 0) {
      offset = static_cast<const char*>(site.address) - static_cast<const char*>(module.dli_fbase);
    }
    list.append(py::make_tuple(offset, site.file, site.line, site.name));
  }
  return list;
}

py::list Recording::counts() const {
  py::list list;
  for (const auto& [key, counts] : trace_.counts()) {
    list.append(py::make_tuple(key.launch, key.site, text(key.did), text(key.space), key.array, key.width,
                               counts.instructions, counts.lanes, counts.bytes, counts.sectors, counts.fewest_sectors,
                               counts.wavefronts, counts.fewest_wavefronts));
  }
  return list;
}

// A lane is (lane, array, offset, bytes of the value).
py::list Recording::events() const {
  py::list list;
  for (const simt::WarpEvent& event : trace_.events()) {
    py::list lanes;
    uint32_t mask = event.mask;
    for (const simt::WarpEvent::Lane& lane : event.lanes) {
      lanes.append(py::make_tuple(__builtin_ctz(mask), lane.array, lane.offset,
                                  py::bytes(reinterpret_cast<const char*>(lane.value.data()), lane.value.size())));
      mask &= mask - 1;
    }
    list.append(py::make_tuple(event.launch, event.phase, event.warp, text(event.did), text(event.space), event.site,
                               event.width, event.sectors, event.wavefronts, text(event.type), lanes));
  }
  return list;
}

}  // namespace
}  // namespace twinfer

PYBIND11_MODULE(_simt_trace, m) {
  using pybind11::arg;
  using twinfer::Recording;
  m.doc() = "The CUDA kernels under the emulator, traced; fast/kernel_trace.py documents it.";
  twinfer::bind_kernels(m);
  pybind11::class_<Recording>(m, "Recording")
      .def(pybind11::init<const std::vector<Recording::Buffer>&, std::tuple<unsigned, unsigned, unsigned>>(),
           arg("buffers"), arg("block"))
      .def("begin", &Recording::begin)
      .def("end", &Recording::end)
      .def("buffers", &Recording::buffers)
      .def("shared_arrays", &Recording::shared_arrays)
      .def("launches", &Recording::launches)
      .def("sites", &Recording::sites)
      .def("counts", &Recording::counts)
      .def("events", &Recording::events);
}
