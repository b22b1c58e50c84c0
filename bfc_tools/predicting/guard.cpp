// A device "cuda" of which nothing is used but its name: what PyTorch asks before it lets tensors
// that are only shapes through autograd. It is compiled against the user's PyTorch, so that the
// compiler lays out both tables of virtual functions; no memory of PyTorch's is read by offset.
//
// 1. The guard of the device, in c10's registry. PyTorch's engine asks it for devices and streams.
// 2. The hooks of CUDA. Their object stays; its pointer to virtual functions becomes that of ours,
//    which adds no members and answers how many devices there are.
//
// Both are put back by remove().
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
// Its number, as the program calls it, and how many there are.
c10::DeviceIndex number = 0, count = 1;

c10::Device device() { return c10::Device(CUDA, number); }

// The stream of each thread. PyTorch's engine sets that of the forward pass for the backward pass.
thread_local c10::StreamId current_stream = 0;

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
  // Nothing runs, so that every event is done as soon as it is recorded.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return count; }
  c10::DeviceIndex current_device() const override { return number; }
  c10::DeviceIndex getCurrentDevice() const override { return number; }
  int getNumGPUs() const override { return count; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* hooks_before = nullptr;
bool installed = false;

std::atomic<const c10::impl::DeviceGuardImplInterface*>& guard_of_cuda() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)];
}

// The hooks that PyTorch has, as the address of their pointer to virtual functions.
void** hooks_of_cuda() {
  return reinterpret_cast<void**>(
      const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
}

PyObject* install(PyObject*, PyObject* args) {
  int wanted = 0, of = 1;
  if (!PyArg_ParseTuple(args, "ii", &wanted, &of)) return nullptr;
  number = static_cast<c10::DeviceIndex>(wanted);
  count = static_cast<c10::DeviceIndex>(of);
  if (!installed) {
    static const auto* guard = new Guard();  // the registry owns nothing, and outlives all
    static const auto* hooks = new Hooks();
    guard_before = guard_of_cuda().exchange(guard);
    hooks_before = *hooks_of_cuda();
    *hooks_of_cuda() = *reinterpret_cast<void* const*>(hooks);
    installed = true;
  }
  Py_RETURN_NONE;
}

PyObject* remove(PyObject*, PyObject*) {
  if (installed) {
    guard_of_cuda().store(guard_before);
    *hooks_of_cuda() = hooks_before;
    current_stream = 0;
    installed = false;
  }
  Py_RETURN_NONE;
}

PyObject* stream(PyObject*, PyObject*) { return PyLong_FromLongLong(current_stream); }

PyObject* set_stream(PyObject*, PyObject* id) {
  const long long wanted = PyLong_AsLongLong(id);
  if (wanted == -1 && PyErr_Occurred()) return nullptr;
  current_stream = wanted;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, nullptr},
    {"remove", remove, METH_NOARGS, nullptr},
    {"stream", stream, METH_NOARGS, nullptr},
    {"set_stream", set_stream, METH_O, nullptr},
    {},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_bfc_predict", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__bfc_predict() { return PyModule_Create(&definition); }
