// Tensors of Python as pointer, shape, strides, dtype and device, without linking to torch.
//
// torch.Tensor carries a table of C functions (DLPack 1.3, `__dlpack_c_exchange_api__`) that describes a tensor
// without creating a Python object. Anything older, and NumPy arrays, goes through a `__dlpack__` capsule.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "third_party/dlpack.h"

namespace twinfer {

namespace py = pybind11;

class TensorView {
 public:
  static constexpr int kMaxDims = 8;

  // Throws std::invalid_argument, naming the argument, if `object` is no tensor that DLPack can describe.
  TensorView(const char* name, py::handle object) : name_(name) {
    if (const DLPackExchangeAPI* api = exchange_api(Py_TYPE(object.ptr()))) {
      DLTensor tensor;
      if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) throw unreadable();
      assign(tensor);
      return;
    }
    if (!py::hasattr(object, "__dlpack__")) {
      throw std::invalid_argument(name_ + ": expected a torch.Tensor, got " + Py_TYPE(object.ptr())->tp_name + ".");
    }
    try {
      // Left to choose, an older torch makes the default stream wait for the current one, which ends the recording of
      // a CUDA graph. Nothing has to wait: the launch goes to the current stream.
      const bool on_gpu = py::bool_(py::getattr(object, "is_cuda", py::bool_(false)));
      const py::object export_capsule = object.attr("__dlpack__");
      owner_ = on_gpu ? export_capsule(py::arg("stream") = -1) : export_capsule();
    } catch (py::error_already_set& error) {
      error.restore();
      throw unreadable();
    }
    const auto* managed = static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor"));
    if (managed == nullptr) throw unreadable();
    assign(managed->dl_tensor);
  }

  // Handle of the stream on which torch works now: from its table of C functions, or asked in Python where torch is older.
  static int64_t current_stream(DLDeviceType type, int32_t device_id) {
    static const DLPackExchangeAPI* api =
        exchange_api(reinterpret_cast<PyTypeObject*>(py::module_::import("torch").attr("Tensor").ptr()));
    if (api != nullptr && api->current_work_stream != nullptr) {
      void* stream = nullptr;
      if (api->current_work_stream(type, device_id, &stream) != 0) throw py::error_already_set();
      return reinterpret_cast<int64_t>(stream);
    }
    const py::object stream = py::module_::import("torch.cuda").attr("current_stream")(device_id);
    return stream.attr("cuda_stream").cast<int64_t>();
  }

  const std::string& name() const { return name_; }
  int ndim() const { return ndim_; }
  int64_t size(int dim) const { return shape_[static_cast<size_t>(dim)]; }
  int64_t stride(int dim) const { return strides_[static_cast<size_t>(dim)]; }
  DLDataType dtype() const { return dtype_; }
  DLDevice device() const { return device_; }

  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }

  std::string shape_text() const { return text(shape_); }
  std::string strides_text() const { return text(strides_); }

 private:
  // The table is a static of the library that made the type, so it may be cached for each type; the type itself is
  // kept alive, otherwise another could take its address. The GIL guards the cache.
  static const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
    static std::vector<std::pair<PyTypeObject*, const DLPackExchangeAPI*>> known;
    for (const auto& [known_type, api] : known) {
      if (known_type == type) return api;
    }
    const DLPackExchangeAPI* api = nullptr;
    const py::handle type_object(reinterpret_cast<PyObject*>(type));
    const py::object capsule = py::getattr(type_object, "__dlpack_c_exchange_api__", py::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      const bool usable = api->header.version.major == DLPACK_MAJOR_VERSION && api->dltensor_from_py_object_no_sync;
      if (!usable) api = nullptr;
    }
    Py_INCREF(type);
    known.emplace_back(type, api);
    return api;
  }

  // Takes the pending Python exception (a meta tensor, a layout without strides) as the reason.
  std::invalid_argument unreadable() const {
    const py::error_already_set error;
    const std::string reason = py::str(error.value()).cast<std::string>();
    return std::invalid_argument(name_ + ": expected a tensor in CPU memory, got one without readable data (" +
                                 reason + ").");
  }

  void assign(const DLTensor& tensor) {
    if (tensor.ndim > kMaxDims) {
      throw std::invalid_argument(name_ + ": got " + std::to_string(tensor.ndim) + " dimensions, the most is " +
                                  std::to_string(kMaxDims) + ".");
    }
    data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
    ndim_ = tensor.ndim;
    dtype_ = tensor.dtype;
    device_ = tensor.device;
    int64_t compact = 1;
    for (int i = ndim_ - 1; i >= 0; --i) {
      const auto dim = static_cast<size_t>(i);
      shape_[dim] = tensor.shape[i];
      strides_[dim] = tensor.strides == nullptr ? compact : tensor.strides[i];  // no strides means row-major
      compact *= tensor.shape[i];
    }
  }

  std::string text(const std::array<int64_t, kMaxDims>& numbers) const {
    std::string joined = "[";
    for (int i = 0; i < ndim_; ++i) joined += (i ? ", " : "") + std::to_string(numbers[static_cast<size_t>(i)]);
    return joined + "]";
  }

  std::string name_;
  py::object owner_;  // the capsule, where there is one: it keeps shape and data alive
  void* data_ = nullptr;
  int ndim_ = 0;
  std::array<int64_t, kMaxDims> shape_{};
  std::array<int64_t, kMaxDims> strides_{};
  DLDataType dtype_{};
  DLDevice device_{};
};

}  // namespace twinfer
