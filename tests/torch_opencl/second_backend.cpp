// A back end of PyTorch as somebody else would write one, over the header of a pool: two devices whose memory is the
// host's, with streams that are numbers. It computes on the CPU.
#include <bfc_torch_allocator.hpp>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace {

namespace py = pybind11;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bfc::DeviceAllocator<kType> allocator;
REGISTER_ALLOCATOR(kType, &allocator);

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::atomic<c10::StreamId> newest_stream{0};

// The allocator asks the guard for the current device and its current stream. All work is done when its call returns,
// so that there is nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    c10::Device getDevice() const override { return {kType, current_device}; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return {kType, std::exchange(current_device, device.index())};
    }
    void setDevice(c10::Device device) const override { current_device = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }

    c10::Stream getStream(c10::Device device) const override { return stream(device, current_streams.at(index_of(device))); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++newest_stream); }
    c10::Stream exchangeStream(c10::Stream next) const override {
        return stream(next.device(), std::exchange(current_streams.at(next.device_index()), next.id()));
    }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeDevice(const c10::DeviceIndex) const override {}
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        allocator.recordStream(data, stream);
    }
    static c10::Stream stream(c10::Device device, c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, {kType, index_of(device)}, id);
    }
    static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        const c10::DeviceGuard guard(storage.device());
        c10::DataPtr fresh = allocator.allocate(nbytes);
        const size_t kept = std::min(nbytes, storage.nbytes());
        if (kept > 0) std::memcpy(fresh.get(), storage.data(), kept);
        storage.set_data_ptr_noswap(std::move(fresh));
        storage.set_nbytes(nbytes);
    }
};

template <class T> using Maybe = std::optional<T>;

at::Tensor empty(c10::IntArrayRef size, Maybe<at::ScalarType> type, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>,
                 Maybe<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Maybe<at::ScalarType> type, Maybe<at::Layout>,
                         Maybe<at::Device> device, Maybe<bool>) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(type));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, Maybe<at::MemoryFormat>) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    const size_t nbytes = (self.storage_offset() + self.numel()) * self.itemsize();
    if (nbytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
    return self;
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
    on_host(to).copy_(on_host(self));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    return copy_from(self, to.resize_(self.sizes()), false);
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", [](const at::Tensor& self) { return on_host(self).item(); });
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

void serve(py::object capsule) { allocator.serve(capsule.ptr()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    m.def("serve", &serve);
    m.def("free", [](uintptr_t address) { allocator.raw_deleter()(reinterpret_cast<void*>(address)); });
    m.def("device_of", [](uintptr_t address) { return allocator.device_of(reinterpret_cast<void*>(address)); });
    m.def("copy_data", [](uintptr_t to, uintptr_t from, size_t nbytes) {
        allocator.copy_data(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), nbytes);
    });
}
