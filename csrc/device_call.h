// What the bindings of csrc/kernels share, and all in which fast._simt and fast._cuda differ: where tensors live, how a
// launch is told to run, and whether the host can read indices before a kernel follows them.
#pragma once

#include <limits>
#include <string>

#include "arguments.h"
#include "cuda/launchers.h"

namespace twinfer {

constexpr Layout kContiguous = Layout::kContiguous;
constexpr Layout kRows = Layout::kRows;
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

// The dtype that the first tensor of a call sets for the others.
inline DLDataType floating_dtype(const char* name, py::handle object) {
  const TensorView view(name, object);
  for (DLDataType known : {kFloat32, kFloat16, kBFloat16}) {
    if (same(view.dtype(), known)) return known;
  }
  reject(view.name() + ": expected dtype float32, float16 or bfloat16, got " + dtype_text(view.dtype()) + ".");
}

// Kernels count rows and columns in 32 bits.
inline int as_int(const char* name, int64_t value) {
  if (value > std::numeric_limits<int>::max()) {
    reject(std::string(name) + ": expected sizes below 2147483648, got " + std::to_string(value) + ".");
  }
  return static_cast<int>(value);
}

inline int64_t row_stride(const TensorView& view) { return view.stride(0); }

// Memory for one call, from torch: its allocator orders reuse by the current stream, and knows of graph capture.
class Workspace {
 public:
  Workspace(py::handle like, int64_t floats)
      : tensor_(like.attr("new_empty")(floats, py::arg("dtype") = py::module_::import("torch").attr("float32"))),
        floats_(TensorView("workspace", tensor_).data<float>()) {}
  float* floats() const { return floats_; }

 private:
  py::object tensor_;
  float* floats_;
};

#if defined(TWINFER_CUDA)

constexpr DLDeviceType kDevice = kDLCUDA;
// Indices lie in the GPU's memory. Reading them would wait for all that was launched before, so whoever makes them
// answers for them; under the emulator the same calls are checked.
constexpr bool kReadsIndices = false;

// On which stream a launch goes: the handle of one, or kCurrentStream.
struct Launch {
  static constexpr int64_t kCurrentStream = -1;
  int64_t stream = kCurrentStream;
};

// The device of a call is current for this call alone.
class WithDevice {
 public:
  explicit WithDevice(int id) {
    device::check(cudaGetDevice(&before_), "cudaGetDevice");
    if (id != before_) device::check(cudaSetDevice(id), "cudaSetDevice");
  }
  ~WithDevice() { static_cast<void>(cudaSetDevice(before_)); }
  WithDevice(const WithDevice&) = delete;
  WithDevice& operator=(const WithDevice&) = delete;

 private:
  int before_ = 0;
};

inline cudaStream_t stream_of(const Arguments& args, const Launch& launch) {
  const int64_t handle = launch.stream == Launch::kCurrentStream ? args.current_stream() : launch.stream;
  return reinterpret_cast<cudaStream_t>(handle);
}

// Calls `f(stream)` without the GIL, on the device of the tensors.
template <class F>
void run(const Arguments& args, const Launch& launch, F f) {
  cudaStream_t stream = stream_of(args, launch);
  const py::gil_scoped_release released;
  const WithDevice device(args.device_id());
  f(stream);
}

// A kernel reads and writes memory of the host only where it is pinned.
inline void check_reachable(const TensorView& view) {
  if (view.device().device_type != kDLCPU) return;
  cudaPointerAttributes attributes{};
  device::check(cudaPointerGetAttributes(&attributes, view.data<void>()), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeHost) return;
  reject(view.name() + ": expected pinned memory where it is the CPU's; make it with pin_memory=True.");
}

inline void bind_launch(py::module_& m) {
  py::class_<Launch>(m, "Launch", py::module_local())
      .def(py::init([](int64_t stream) { return Launch{stream}; }), py::arg("stream") = Launch::kCurrentStream);
}

#else

constexpr DLDeviceType kDevice = kDLCPU;
constexpr bool kReadsIndices = true;

// There is one instruction stream and no CUDA stream.
struct Launch {
  uint64_t seed;
  int threads;
  std::string architecture;
};

// The options hold for the launches of this call alone.
class WithOptions {
 public:
  explicit WithOptions(const Launch& launch) : before_(simt::options()) {
    check_threads(launch.threads);
    simt::options() = {launch.seed, launch.threads, &simt::architecture(launch.architecture)};
  }
  ~WithOptions() { simt::options() = before_; }
  WithOptions(const WithOptions&) = delete;
  WithOptions& operator=(const WithOptions&) = delete;

 private:
  simt::Options before_;
};

// Calls `f(stream)` on the emulator without the GIL.
template <class F>
void run(const Arguments&, const Launch& launch, F f) {
  const WithOptions options(launch);
  const py::gil_scoped_release released;
  f(cudaStream_t{});
}

inline void check_reachable(const TensorView&) {}

// Local to its module: fast._simt and fast._simt_trace both have it.
inline void bind_launch(py::module_& m) {
  py::class_<Launch>(m, "Launch", py::module_local())
      .def(py::init([](uint64_t seed, int threads, std::string architecture) {
             check_threads(threads);
             simt::architecture(architecture);
             return Launch{seed, threads, std::move(architecture)};
           }),
           py::arg("seed"), py::arg("threads"), py::arg("architecture"));
}

#endif

// Calls `f(T{}, stream)` with the C++ type that the dtype is.
template <class F>
void run(DLDataType dtype, const Arguments& args, const Launch& launch, F f) {
  run(args, launch, [&](cudaStream_t stream) {
    if (same(dtype, kFloat32)) return f(float{}, stream);
    if (same(dtype, kFloat16)) return f(__half{}, stream);
    f(__nv_bfloat16{}, stream);
  });
}

void bind_sampling(py::module_& m);

}  // namespace twinfer
