// Checks on the arguments of one kernel call. Every message names the argument, what was expected and what came.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "tensor_view.h"

namespace twinfer {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat64{kDLFloat, 64, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kUint8{kDLUInt, 8, 1};

inline std::string dtype_text(DLDataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case kDLFloat: return "float" + bits;
    case kDLInt: return "int" + bits;
    case kDLUInt: return "uint" + bits;
    case kDLBfloat: return "bfloat" + bits;
    case kDLComplex: return "complex" + bits;
    case kDLBool: return "bool";
    default: return "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
}

[[noreturn]] inline void reject(const std::string& message) { throw std::invalid_argument(message); }

// kRows lets the outermost dimension have any stride: a slice of a fused projection, or of a larger table.
enum class Layout { kContiguous, kRows };

// Dimensions have names; the first tensor that has one fixes its size and all later ones must agree.
class Arguments {
 public:
  explicit Arguments(DLDeviceType device = kDLCPU) : device_type_(device) {}

  TensorView tensor(const char* name, py::handle object, DLDataType dtype, Layout layout,
                    std::initializer_list<const char*> dims) {
    TensorView view(name, object);
    check_device(view);
    if (dtype.code != view.dtype().code || dtype.bits != view.dtype().bits || dtype.lanes != view.dtype().lanes) {
      reject(view.name() + ": expected dtype " + dtype_text(dtype) + ", got " + dtype_text(view.dtype()) + ".");
    }
    if (view.ndim() != static_cast<int>(dims.size())) {
      reject(view.name() + ": expected " + std::to_string(dims.size()) + " dimensions " + expected_text(dims) +
             ", got shape " + view.shape_text() + ".");
    }
    int index = 0;
    for (const char* dim : dims) agree(view, dims, dim, view.size(index++));
    check_layout(view, layout);
    return view;
  }

  // From now on a tensor in the CPU's memory is accepted beside those of the device.
  void allow_host_memory() { host_allowed_ = true; }

  // Of all tensors so far.
  int device_id() const { return device_id_; }
  // Handle of the stream on which the tensors' library works now on their device.
  int64_t current_stream() const { return TensorView::current_stream(device_type_, device_id_); }

  // Fixes the size of a dimension that follows from others, such as 2F.
  void define(const char* dim, int64_t size) { sizes_.emplace_back(dim, size); }

  int64_t operator[](const char* dim) const {
    const int64_t* size = find(dim);
    if (size == nullptr) throw std::logic_error(std::string("no tensor has dimension ") + dim);
    return *size;
  }

 private:
  void check_device(const TensorView& view) {
    const DLDevice device = view.device();
    if (host_allowed_ && device.device_type == kDLCPU) return;
    if (device.device_type != device_type_) {
      reject(view.name() + ": expected a tensor on " + (device_type_ == kDLCPU ? "the CPU" : "a CUDA device") +
             ", got one on another device (DLPack device type " + std::to_string(device.device_type) + ").");
    }
    if (device_id_ == kNoDevice) device_id_ = device.device_id;
    if (device.device_id != device_id_) {
      reject(view.name() + ": expected a tensor on device " + std::to_string(device_id_) +
             ", as those before it, got one on device " + std::to_string(device.device_id) + ".");
    }
  }

  const int64_t* find(const std::string& dim) const {
    for (const auto& [name, size] : sizes_) {
      if (name == dim) return &size;
    }
    return nullptr;
  }

  void agree(const TensorView& view, std::initializer_list<const char*> dims, const char* dim, int64_t size) {
    const int64_t* known = find(dim);
    if (known == nullptr) {
      define(dim, size);
    } else if (*known != size) {
      reject(view.name() + ": expected shape " + expected_text(dims) + ", got " + view.shape_text() + ".");
    }
  }

  // Such as [T=5, Hkv=2, D]: sizes are shown where they are known.
  std::string expected_text(std::initializer_list<const char*> dims) const {
    std::string joined;
    for (const char* dim : dims) {
      const int64_t* size = find(dim);
      joined += (joined.empty() ? "[" : ", ") + std::string(dim);
      if (size != nullptr) joined += "=" + std::to_string(*size);
    }
    return joined + "]";
  }

  static void check_layout(const TensorView& view, Layout layout) {
    int64_t compact = 1;
    for (int i = view.ndim() - 1; i >= 0; --i) {
      const bool free_stride = layout == Layout::kRows && i == 0;
      const bool fits = free_stride ? view.stride(i) >= compact : view.stride(i) == compact;
      if (view.size(i) > 1 && !fits) {
        const char* expected = layout == Layout::kContiguous ? ": expected a contiguous tensor"
                                                             : ": expected rows that are contiguous and do not overlap";
        reject(view.name() + expected + ", got shape " + view.shape_text() + " with strides " +
               view.strides_text() + ".");
      }
      compact *= view.size(i);
      if (compact == 0) return;
    }
  }

  static constexpr int kNoDevice = -1;
  DLDeviceType device_type_;
  int device_id_ = kNoDevice;
  bool host_allowed_ = false;
  std::vector<std::pair<std::string, int64_t>> sizes_;
};

template <class T>
cpu::Rows<T> rows_of(const TensorView& view) {
  return {view.data<T>(), view.ndim() > 0 ? view.stride(0) : 0};
}

// Rejects the first of `count` values outside [low, high). `hint` ends the sentence.
template <class T>
void check_range(const char* name, const T* values, int64_t count, int64_t low, int64_t high, const char* hint) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= low && values[i] < high) continue;
    reject(std::string(name) + ": expected values in [" + std::to_string(low) + ", " + std::to_string(high) +
           ") " + hint + ", got " + std::to_string(values[i]) + " at index " + std::to_string(i) + ".");
  }
}

inline void check_threads(int threads) {
  if (threads < 1) reject("threads: expected at least 1, got " + std::to_string(threads) + ".");
}

}  // namespace twinfer
