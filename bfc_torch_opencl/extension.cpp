// PyTorch's device "opencl": memory from pools of bfc, copies by bfc.copy, and most operators on the host.
//
// `bfc.integrations.torch_opencl.enable` compiles this file against the PyTorch that is installed: an allocator is not
// part of PyTorch's stable interface.
#include "guard.hpp"
#include "hooks.hpp"
#include "operators.hpp"
#include "recurrent.hpp"

namespace bfc_opencl {

REGISTER_ALLOCATOR(kType, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Called once per process: PyTorch keeps an allocator for good.
void start(py::object given_runtime, py::object capsule, int devices) {
    TORCH_CHECK(runtime == nullptr, "an allocator serves PyTorch's device opencl in this process already");
    TORCH_CHECK(devices > 0 && devices <= kMostDevices, "1 to ", static_cast<int>(kMostDevices), " devices can be served");
    allocator.serve(capsule.ptr());
    runtime = given_runtime.release().ptr();
    device_count = static_cast<c10::DeviceIndex>(devices);
    follow_forks();
    let_threads_wait_for_the_end();
    at::RegisterPrivateUse1HooksInterface(new Hooks);
}

std::map<std::string, int64_t> counted_fallbacks() {
    const std::lock_guard<std::mutex> held(fallbacks().lock);
    return fallbacks().calls;
}

uintptr_t allocate_raw(size_t nbytes, int device, int64_t stream) {
    const py::gil_scoped_release no_gil;
    return nbytes == 0 ? 0 : reinterpret_cast<uintptr_t>(allocator.allocate_on(static_cast<c10::DeviceIndex>(device), nbytes, stream));
}

void free_raw(uintptr_t address) {
    const py::gil_scoped_release no_gil;
    allocator.raw_deleter()(reinterpret_cast<void*>(address));
}

}  // namespace bfc_opencl

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace bfc_opencl;
    m.def("start", &start);
    m.def("is_child", [] { return is_child.load(); });
    m.def("current_device", [] { return static_cast<int>(current_device); });
    m.def("current_stream", [](int device) { return current_streams.at(static_cast<size_t>(device)); });
    m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
    m.def("fallbacks", &counted_fallbacks);
    m.def("end", [] { is_ending = true; });
    m.def("threads_inside", [] { return threads_inside.load(); });
    m.def("allocate", &allocate_raw);
    m.def("free", &free_raw);
}
