// What PyTorch asks a back end for: generators of random numbers, pinned memory, and storage that grows.
#pragma once

#include "runtime.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <memory>

namespace bfc_opencl {

// Random numbers are drawn on the host: this is a generator of the CPU under another device's name.
struct Generator final : c10::GeneratorImpl {
    Generator(c10::DeviceIndex device, at::Generator host)
        : c10::GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          host_(std::move(host)) {}

    static c10::DeviceType device_type() { return kType; }
    const at::Generator& host() const { return host_; }

    void set_current_seed(uint64_t seed) override { impl().set_current_seed(seed); }
    void set_offset(uint64_t offset) override { impl().set_offset(offset); }
    uint64_t get_offset() const override { return impl().get_offset(); }
    uint64_t current_seed() const override { return impl().current_seed(); }
    uint64_t seed() override { return impl().seed(); }
    void set_state(const c10::TensorImpl& state) override { impl().set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl().get_state(); }

private:
    c10::GeneratorImpl& impl() const { return *host_.unsafeGetGeneratorImpl(); }
    Generator* clone_impl() const override { return new Generator(device().index(), host_.clone()); }

    at::Generator host_;
};

inline at::Generator new_generator(c10::DeviceIndex device) {
    const auto index = device < 0 ? current_device : device;
    return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(c10::DeviceIndex device) {
    static std::array<at::Generator, kMostDevices>* generators = [] {
        auto* made = new std::array<at::Generator, kMostDevices>;   // never destroyed: tensors may outlive it
        for (c10::DeviceIndex index = 0; index < device_count; index++) (*made)[index] = new_generator(index);
        return made;
    }();
    const auto index = device < 0 ? current_device : device;
    TORCH_CHECK(index < device_count, "there is no device ", c10::Device(kType, index));
    return (*generators)[index];
}

// Host memory that a device copies without a detour: a bfc.PinnedAllocator.
struct PinnedMemory final : c10::Allocator {
    at::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) return {nullptr, nullptr, &free_memory, c10::kCPU};
        auto* ptr = reinterpret_cast<void*>(ask_for<uintptr_t>("allocate_pinned", nbytes));
        return {ptr, ptr, &free_memory, c10::kCPU};
    }

    at::DeleterFnPtr raw_deleter() const override { return &free_memory; }

    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

    // An exception may be propagating, such as a Ctrl-C: it is put aside, or Python would lose it. No Python code runs,
    // in which another Ctrl-C could come.
    static void free_memory(void* ptr) noexcept {
        if (ptr == nullptr || python_is_gone() || is_child) return;
        const Gil gil;
        const py::error_scope aside;
        try {
            ask("free_pinned", reinterpret_cast<uintptr_t>(ptr));
        } catch (const python_error& error) {
            if (PyErr_GivenExceptionMatches(error.type, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
            else TORCH_WARN_ONCE("bfc: pinned memory could not be freed: ", error.what());
        } catch (const std::exception& error) {
            TORCH_WARN_ONCE("bfc: pinned memory could not be freed: ", error.what());
        }
    }
};

// Gives a storage another size, and keeps the bytes that both have. Upstream's function copies by memcpy, and these
// addresses are made up.
inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "this storage cannot be resized");
    const c10::DeviceGuard guard(impl->device());
    at::DataPtr fresh = allocator.allocate(nbytes);
    const size_t kept = std::min(nbytes, impl->nbytes());
    if (kept > 0) allocator.copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count > 0 && !is_child; }
    bool hasPrimaryContext(c10::DeviceIndex device) const override { return device >= 0 && device < device_count; }
    c10::DeviceIndex deviceCount() const override { return device_count; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(c10::DeviceIndex device) const override { guard().setDevice({kType, device}); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return guard().exchangeDevice({kType, device}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? current_device : exchangeDevice(device);
    }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

    at::Device getDeviceFromPtr(void* data) const override {
        const int device = bfc::DeviceAllocator<kType>::device_of(data);
        TORCH_CHECK(device >= 0, data, " is not memory of an OpenCL device");
        return {kType, static_cast<c10::DeviceIndex>(device)};
    }

    bool isPinnedPtr(const void* data) const override {
        return runtime != nullptr && ask_for<bool>("is_pinned", reinterpret_cast<uintptr_t>(data));
    }
    at::Allocator* getPinnedMemoryAllocator() const override {
        static auto* memory = new PinnedMemory;
        return memory;
    }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        resize_storage(storage, nbytes);
    }

private:
    static const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(kType); }
};

}  // namespace bfc_opencl
