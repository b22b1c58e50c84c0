// The calls of the CUDA runtime that CuPy makes, by the driver's calls of the same meaning.
//
// CuPy has a runtime library built in, which refuses every driver but NVIDIA's. CuPy's modules find
// these calls in a table of its module `runtime`, as pointers to C functions; `cupy_runtime.py` puts
// the functions below there. All have the types that Cython has given to CuPy's own.
#include <Python.h>
#include <dlfcn.h>

#include <cstdint>

namespace {
using Handle = void*;

// A call of the driver, looked up once. Failures become CuPy's own error.
template <typename... Arguments>
bool call(const char* name, Arguments... arguments) {
    static Handle driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver, name));
    if (!function) {
        PyErr_Format(PyExc_NotImplementedError, "the driver has no %s", name);
        return false;
    }
    const int result = function(arguments...);
    if (!result) return true;
    PyObject* module = PyImport_ImportModule("cupy_backends.cuda.api.runtime");
    PyObject* kind = module ? PyObject_GetAttrString(module, "CUDARuntimeError") : nullptr;
    PyObject* error = kind ? PyObject_CallFunction(kind, "i", result) : nullptr;
    if (error) PyErr_SetObject(kind, error);
    Py_XDECREF(error);
    Py_XDECREF(kind);
    Py_XDECREF(module);
    return false;
}

Handle as_handle(intptr_t number) { return reinterpret_cast<Handle>(number); }

PyObject* none_if(bool done) {
    if (!done) return nullptr;
    Py_RETURN_NONE;
}

// The runtime makes the primary context of a device current, and keeps it for good.
bool use_device(int device) {
    static Handle contexts[16];
    if (device < 0 || device >= 16) return call("cuCtxSetCurrent", Handle(nullptr));
    return (contexts[device] || call("cuDevicePrimaryCtxRetain", &contexts[device], device)) &&
           call("cuCtxSetCurrent", contexts[device]);
}

// It does so for device 0 when a thread first needs one.
bool with_context() {
    Handle context = nullptr;
    if (!call("cuInit", 0u) || !call("cuCtxGetCurrent", &context)) return false;
    return context || use_device(0);
}

template <typename... Arguments>
PyObject* act(const char* name, Arguments... arguments) {
    return none_if(with_context() && call(name, arguments...));
}

template <typename... Arguments>
intptr_t make(const char* name, Arguments... arguments) {
    Handle made = nullptr;
    return with_context() && call(name, &made, arguments...) ? reinterpret_cast<intptr_t>(made) : 0;
}

struct WithMode {
    int given;
    int mode;
};
struct WithFlags {
    int given;
    unsigned flags;
};
}  // namespace

extern "C" {

PyObject* _ensure_context() { return none_if(with_context()); }

int getDevice(int) {
    int device = -1;
    return with_context() && call("cuCtxGetDevice", &device) ? device : -1;
}

PyObject* setDevice(int device, int) { return none_if(call("cuInit", 0u) && use_device(device)); }

int getDeviceCount(int) {
    int count = -1;
    return call("cuInit", 0u) && call("cuDeviceGetCount", &count) ? count : -1;
}

int driverGetVersion(int) {
    int version = -1;
    return call("cuDriverGetVersion", &version) ? version : -1;
}

int runtimeGetVersion(int) { return driverGetVersion(0); }

int deviceGetAttribute(int attribute, int device, int) {
    int value = -1;
    return with_context() && call("cuDeviceGetAttribute", &value, attribute, device) ? value : -1;
}

PyObject* deviceSynchronize(int) { return act("cuCtxSynchronize"); }

intptr_t streamCreate(int) { return make("cuStreamCreate", 0u); }
intptr_t streamCreateWithFlags(unsigned flags, int) { return make("cuStreamCreate", flags); }
intptr_t streamCreateWithPriority(unsigned flags, int priority, int) {
    return make("cuStreamCreateWithPriority", flags, priority);
}
PyObject* streamDestroy(intptr_t stream, int) { return act("cuStreamDestroy_v2", as_handle(stream)); }
PyObject* streamSynchronize(intptr_t stream, int) { return act("cuStreamSynchronize", as_handle(stream)); }

PyObject* streamWaitEvent(intptr_t stream, intptr_t event, int, WithFlags* more) {
    const unsigned flags = more && more->given ? more->flags : 0;
    return act("cuStreamWaitEvent", as_handle(stream), as_handle(event), flags);
}

PyObject* streamBeginCapture(intptr_t stream, int, WithMode* more) {
    const int relaxed = 2;
    return act("cuStreamBeginCapture_v2", as_handle(stream), more && more->given ? more->mode : relaxed);
}

intptr_t streamEndCapture(intptr_t stream, int) {
    Handle graph = nullptr;
    return call("cuStreamEndCapture", as_handle(stream), &graph) ? reinterpret_cast<intptr_t>(graph) : 0;
}

int streamIsCapturing(intptr_t stream, int) {
    int status = -1;
    return with_context() && call("cuStreamIsCapturing", as_handle(stream), &status) ? status : -1;
}

intptr_t eventCreateWithFlags(unsigned flags, int) { return make("cuEventCreate", flags); }
intptr_t eventCreate(int) { return make("cuEventCreate", 0u); }
PyObject* eventDestroy(intptr_t event, int) { return act("cuEventDestroy_v2", as_handle(event)); }
PyObject* eventRecord(intptr_t event, intptr_t stream, int) {
    return act("cuEventRecord", as_handle(event), as_handle(stream));
}
PyObject* eventSynchronize(intptr_t event, int) { return act("cuEventSynchronize", as_handle(event)); }

intptr_t graphInstantiate(intptr_t graph, int) {
    return make("cuGraphInstantiateWithFlags", as_handle(graph), 0ull);
}
PyObject* graphLaunch(intptr_t graph, intptr_t stream, int) {
    return act("cuGraphLaunch", as_handle(graph), as_handle(stream));
}
PyObject* graphUpload(intptr_t graph, intptr_t stream, int) {
    return act("cuGraphUpload", as_handle(graph), as_handle(stream));
}
PyObject* graphDestroy(intptr_t graph, int) { return act("cuGraphDestroy", as_handle(graph)); }
PyObject* graphExecDestroy(intptr_t graph, int) { return act("cuGraphExecDestroy", as_handle(graph)); }

PyObject* memcpyNow(intptr_t to, intptr_t from, size_t nbytes, int, int) {
    return act("cuMemcpy", uint64_t(to), uint64_t(from), nbytes);
}
PyObject* memcpyAsync(intptr_t to, intptr_t from, size_t nbytes, int, intptr_t stream, int) {
    return act("cuMemcpyAsync", uint64_t(to), uint64_t(from), nbytes, as_handle(stream));
}
PyObject* memsetAsync(intptr_t to, int value, size_t nbytes, intptr_t stream, int) {
    return act("cuMemsetD8Async", uint64_t(to), static_cast<unsigned char>(value), nbytes, as_handle(stream));
}
}
