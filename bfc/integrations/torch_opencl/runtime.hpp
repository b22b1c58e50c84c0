// What the other parts have in common: the current device and streams of a thread, and questions to Python.
#pragma once

#include <bfc_torch_allocator.hpp>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <utility>

namespace bfc_opencl {

namespace py = pybind11;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMostDevices = 64;

inline bfc::DeviceAllocator<kType> allocator;
inline std::atomic<c10::DeviceIndex> device_count{0};
inline std::atomic<bool> is_child{false};   // whether this is a forked child of a process that had started OpenCL

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

// A `bfc.integrations.torch_opencl.runtime.Runtime`, kept for the life of the process. Borrowed for good.
inline PyObject* runtime = nullptr;

inline void follow_forks() {
    pthread_atfork(nullptr, nullptr, [] { is_child = true; });
}

inline void refuse_child() {
    TORCH_CHECK(!is_child, "bfc: OpenCL was used before this process was forked, and does not work in the child: "
                           "start processes with multiprocessing's \"spawn\" or \"forkserver\"");
}

inline bool python_is_gone() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsInitialized() || Py_IsFinalizing();
#else
    return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Calls a method of the runtime, with the GIL held. A Python error is passed on as PyTorch passes on its own.
template <class... Arguments>
py::object ask(const char* name, Arguments&&... arguments) {
    refuse_child();
    try {
        return py::handle(runtime).attr(name)(std::forward<Arguments>(arguments)...);
    } catch (py::error_already_set& error) {
        error.restore();
        python_error passed_on;
        passed_on.persist();
        throw passed_on;
    }
}

// The same without an answer, for callers without the GIL.
template <class... Arguments>
void tell(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    ask(name, std::forward<Arguments>(arguments)...);
}

// The same, for an answer of a C++ type.
template <class Answer, class... Arguments>
Answer ask_for(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    return ask(name, std::forward<Arguments>(arguments)...).template cast<Answer>();
}

}  // namespace bfc_opencl
