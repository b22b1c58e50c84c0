// What only C++ can ask of PyTorch's allocator: a tracker of segments and blocks, as NCCL attaches one, and calls in a
// thread that has let go of the GIL while another one keeps it. And it says what is compiled, as torch.compile does. A
// module for Python; see torch_native.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {
using namespace c10::cuda::CUDACachingAllocator;

std::mutex lock;
std::vector<TraceEntry> entries;

PyObject* attach(PyObject*, PyObject*) {
    attachAllocatorTraceTracker([](const TraceEntry& entry) {
        const std::lock_guard<std::mutex> held(lock);
        entries.push_back(entry);
    });
    Py_RETURN_NONE;
}

// What the tracker was told since the last call: (action, address, bytes, stream) of each.
PyObject* told(PyObject*, PyObject*) {
    std::vector<TraceEntry> taken;
    {
        const std::lock_guard<std::mutex> held(lock);
        taken.swap(entries);
    }
    PyObject* list = PyList_New(0);
    for (const auto& it : taken) {
        PyObject* row = Py_BuildValue("iKKK", int(it.action_), static_cast<unsigned long long>(it.addr_),
                                      static_cast<unsigned long long>(it.size_),
                                      static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(it.stream_)));
        PyList_Append(list, row);
        Py_DECREF(row);
    }
    return list;
}

// The bytes of the segments, in the order in which NCCL registers them; none if two have the same number. Before 2.13
// segments have none, and the smallest is the first.
PyObject* registered(PyObject*, PyObject*) {
    auto segments = snapshot().segments;
#if TORCH_VERSION_MINOR >= 13
    std::sort(segments.begin(), segments.end(),
              [](const auto& a, const auto& b) { return a.registration_counter < b.registration_counter; });
    for (size_t i = 1; i < segments.size(); ++i)
        if (segments[i].registration_counter == segments[i - 1].registration_counter) return PyList_New(0);
#else
    std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a.total_size < b.total_size; });
#endif
    PyObject* list = PyList_New(0);
    for (const auto& it : segments) {
        PyObject* nbytes = PyLong_FromSize_t(it.total_size);
        PyList_Append(list, nbytes);
        Py_DECREF(nbytes);
    }
    return list;
}

// What is being compiled from now on; None: no longer that.
PyObject* compiling(PyObject*, PyObject* text) {
    if (text == Py_None) {
        popCompileContext();
        Py_RETURN_NONE;
    }
    const char* word = PyUnicode_AsUTF8(text);
    if (!word) return nullptr;
    std::string what = word;
    pushCompileContext(what);
    Py_RETURN_NONE;
}

// pairs(count, bytes, stream): makes so many allocations and their frees, used on the stream if it is not 0, while
// another thread keeps the GIL. Returns how many were made before that has given up, after ten seconds.
PyObject* pairs(PyObject*, PyObject* arguments) {
    int count;
    unsigned long long nbytes, stream;
    if (!PyArg_ParseTuple(arguments, "iKK", &count, &nbytes, &stream)) return nullptr;
    auto* allocator = get();
    std::atomic<bool> holds{false}, over{false}, gave_up{false};
    int made = 0;
    Py_BEGIN_ALLOW_THREADS
    std::thread keeper([&] {
        const PyGILState_STATE state = PyGILState_Ensure();
        holds = true;
        for (int i = 0; i < 10000 && !over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        gave_up = !over;
        PyGILState_Release(state);
    });
    while (!holds) std::this_thread::yield();
    for (int i = 0; i < count; ++i) {
        c10::DataPtr data = allocator->allocate(nbytes);
        if (stream)
            allocator->recordStream(data, c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(stream), 0));
        data.clear();
        made += !gave_up;
    }
    over = true;
    keeper.join();
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(made);
}

#if TORCH_VERSION_MINOR >= 13
std::vector<c10::DataPtr> placed;

// Allocates so many bytes at an address, and keeps them. Raises what PyTorch raises.
PyObject* place(PyObject*, PyObject* arguments) {
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(arguments, "KK", &address, &nbytes)) return nullptr;
    try {
        placed.push_back(allocateWithAddress(nbytes, reinterpret_cast<void*>(static_cast<uintptr_t>(address))));
    } catch (const c10::Error& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
        return nullptr;
    }
    return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(placed.back().get()));
}

PyObject* let_go(PyObject*, PyObject*) {
    placed.clear();
    Py_RETURN_NONE;
}
#endif

PyMethodDef methods[] = {{"attach", attach, METH_NOARGS, nullptr},
                         {"told", told, METH_NOARGS, nullptr},
                         {"registered", registered, METH_NOARGS, nullptr},
                         {"compiling", compiling, METH_O, nullptr},
                         {"pairs", pairs, METH_VARARGS, nullptr},
#if TORCH_VERSION_MINOR >= 13
                         {"place", place, METH_VARARGS, nullptr},
                         {"let_go", let_go, METH_NOARGS, nullptr},
#endif
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_native_calls", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

PyMODINIT_FUNC PyInit_torch_native_calls() { return PyModule_Create(&module); }
