// What the other parts have in common: the current device and streams of a thread, and questions to Python.
#pragma once

#include <bfc_torch_allocator.hpp>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
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

// A `bfc_torch_opencl.runtime.Runtime`, kept for the life of the process. Borrowed for good.
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

// A daemon thread may still work when Python shuts down. As soon as it asks for the GIL, Python ends it, up to version
// 3.13: it is unwound through frames of C++, PyTorch's among them, which calls std::terminate. Such a thread waits for
// the end of the process instead, as it does in Python 3.14. It is unwound no further than to the first function that
// is noexcept: those below are, so that nothing is destroyed without the GIL.
inline std::terminate_handler terminate_before = nullptr;

inline bool is_main_thread() noexcept { return getpid() == static_cast<pid_t>(syscall(SYS_gettid)); }

inline void let_threads_wait_for_the_end() {
    terminate_before = std::set_terminate([] {
        while (python_is_gone() && !is_main_thread()) pause();
        if (terminate_before != nullptr) terminate_before();
        std::abort();
    });
}

// From the exit handler on, threads but the main one rest before they ask Python, and the handler waits for those that
// are in it. So mostly that is where they are when Python shuts down, and nothing is unwound: pyopencl, too, has frames
// that may not be. They go on if Python does not shut down soon, since another exit handler may wait for them.
inline std::atomic<bool> is_ending{false};
inline std::atomic<int> threads_inside{0};
constexpr int kMostMilliseconds = 2000;

inline void rest_at_the_end() noexcept {
    if (!is_ending || is_main_thread()) return;
    PyThreadState* held = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    for (int passed = 0; passed < kMostMilliseconds && !python_is_gone(); passed++) usleep(1000);
    while (python_is_gone()) pause();
    if (held != nullptr) PyEval_RestoreThread(held);
}

class Gil {
public:
    Gil() noexcept {
        rest_at_the_end();
        threads_inside++;
        before_ = PyGILState_Ensure();
    }
    ~Gil() {
        PyGILState_Release(before_);
        threads_inside--;
    }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

private:
    PyGILState_STATE before_;
};

inline PyObject* call(PyObject* method, PyObject* arguments) noexcept {
    return PyObject_CallObject(method, arguments);
}

// Calls a method of the runtime, with the GIL held. A Python error is passed on as PyTorch passes on its own.
template <class... Arguments>
py::object ask(const char* name, Arguments&&... arguments) {
    refuse_child();
    try {
        const py::object method = py::handle(runtime).attr(name);
        const py::tuple given = py::make_tuple(std::forward<Arguments>(arguments)...);
        PyObject* answer = call(method.ptr(), given.ptr());
        if (answer == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(answer);
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
    const Gil gil;
    ask(name, std::forward<Arguments>(arguments)...);
}

// The same, for an answer of a C++ type.
template <class Answer, class... Arguments>
Answer ask_for(const char* name, Arguments&&... arguments) {
    const Gil gil;
    return ask(name, std::forward<Arguments>(arguments)...).template cast<Answer>();
}

}  // namespace bfc_opencl
