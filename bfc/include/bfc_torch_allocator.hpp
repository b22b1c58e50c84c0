// A caching c10::DeviceAllocator for any back end of PyTorch, over an allocator of bfc.
//
// A back end for PrivateUse1 registers one, and gives it the capsule that
// `bfc.integrations.torch_backend.capsule(pools)` returns:
//
//     #include <bfc_torch_allocator.hpp>
//     bfc::DeviceAllocator<c10::DeviceType::PrivateUse1> allocator;
//     REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);
//     ...
//     allocator.serve(capsule);   // once, with the GIL held
//
// The current device and its current stream are those of the back end's device guard. The header needs PyTorch's
// headers of version 2.11 or later and Python's; neither Cython nor a library to link with.
#pragma once

#include "bfc_allocator.h"

#include <Python.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <string>
#include <utility>

namespace bfc {

inline void fill_stat(c10::CachingAllocator::Stat& to, const bfc_stat& from) {
    to.current = from.current;
    to.peak = from.peak;
    to.allocated = from.allocated;
    to.freed = from.freed;
}

inline void fill_stat(c10::CachingAllocator::StatArray& to, const bfc_stat (&from)[3]) {
    for (size_t kind = 0; kind < 3; kind++) fill_stat(to[kind], from[kind]);
}

// PyTorch's statistics of a device, from those of the table.
inline c10::CachingDeviceAllocator::DeviceStats stats_of(const bfc_device_stats& from) {
    c10::CachingDeviceAllocator::DeviceStats to;
    fill_stat(to.allocation, from.allocation);
    fill_stat(to.segment, from.segment);
    fill_stat(to.active, from.active);
    fill_stat(to.inactive_split, from.inactive_split);
    fill_stat(to.allocated_bytes, from.allocated_bytes);
    fill_stat(to.reserved_bytes, from.reserved_bytes);
    fill_stat(to.active_bytes, from.active_bytes);
    fill_stat(to.inactive_split_bytes, from.inactive_split_bytes);
    fill_stat(to.requested_bytes, from.requested_bytes);
    fill_stat(to.oversize_allocations, from.oversize_allocations);
    fill_stat(to.oversize_segments, from.oversize_segments);
    to.num_alloc_retries = from.num_alloc_retries;
    to.num_ooms = from.num_ooms;
    to.num_sync_all_streams = from.num_sync_all_streams;
    to.num_device_alloc = from.num_device_alloc;
    to.num_device_free = from.num_device_free;
    to.max_split_size = from.max_split_size;
    return to;
}

template <c10::DeviceType Type>
class DeviceAllocator final : public c10::DeviceAllocator {
public:
    // Lets the allocator of a capsule serve this device type until the process ends. PyTorch may keep tensors until
    // then, so the allocator is never removed.
    void serve(PyObject* capsule) {
        auto* given = static_cast<const bfc_allocator*>(PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE));
        if (given == nullptr) {
            PyErr_Clear();
            TORCH_CHECK(false, "bfc: serve() takes the capsule of bfc.integrations.torch_backend.capsule(pools)");
        }
        TORCH_CHECK(given->version <= BFC_ALLOCATOR_VERSION, "bfc: this back end was compiled for version ",
                    BFC_ALLOCATOR_VERSION, " of bfc_allocator.h, and the bfc that is installed has version ", given->version,
                    ": compile the back end again");
        // A version grows by new fields at the end, too.
        TORCH_CHECK(given->version == BFC_ALLOCATOR_VERSION && given->size >= sizeof(bfc_allocator),
                    "bfc: the compiled modules of bfc are older than the bfc_allocator.h of this back end (version ",
                    given->version, " with ", given->size, " bytes, where it has version ", BFC_ALLOCATOR_VERSION, " with ",
                    sizeof(bfc_allocator), "): build bfc again, with `pip install .`, or in a checkout to work in with "
                    "`python setup.py build_ext --inplace`");
        const bfc_allocator* none = nullptr;
        TORCH_CHECK(table_.compare_exchange_strong(none, given) || none == given,
                    "bfc: another allocator serves ", Type, " in this process already");
        given->retain(given->self);
    }

    bool initialized() override { return table_.load() != nullptr; }

    at::DataPtr allocate(size_t nbytes) override {
        const auto* guard = c10::impl::getDeviceGuardImpl(Type);
        const c10::Device device = guard->getDevice();
        if (nbytes == 0) return {nullptr, nullptr, &free_memory, device};
        void* ptr = allocate_on(device.index(), nbytes, guard->getStream(device).id());
        return {ptr, ptr, &free_memory, device};
    }

    void* allocate_on(c10::DeviceIndex device, size_t nbytes, c10::StreamId stream) {
        void* ptr = nullptr;
        Why why;
        const bfc_allocator& bfc = served();
        why.check(bfc.allocate(bfc.self, device, nbytes, stream, &ptr, why.text, sizeof why.text));
        return ptr;
    }

    at::DeleterFnPtr raw_deleter() const override { return &free_memory; }

    // Runs in destructors, so it lets no exception out. The table counts an address that was not live, and warns.
    static void free_memory(void* ptr) noexcept {
        const bfc_allocator* bfc = table_.load();
        if (ptr != nullptr && bfc != nullptr) bfc->free(bfc->self, ptr);
    }

    void copy_data(void* to, const void* from, size_t nbytes) const override {
        const auto* guard = c10::impl::getDeviceGuardImpl(Type);
        const bfc_allocator& bfc = served();
        const int index = bfc.device_of(bfc.self, to);
        const c10::Device device = index < 0 ? guard->getDevice() : c10::Device(Type, static_cast<c10::DeviceIndex>(index));
        Why why;
        why.check(bfc.copy(bfc.self, to, from, nbytes, guard->getStream(device).id(), why.text, sizeof why.text));
    }

    void emptyCache(c10::MempoolId_t = {0, 0}) override {
        Why why;
        why.check(served().empty(served().self, why.text, sizeof why.text));
    }

    void recordStream(const at::DataPtr& data, c10::Stream stream) override {
        if (data.get() == nullptr) return;
        Why why;
        const bfc_allocator& bfc = served();
        why.check(bfc.record_stream(bfc.self, data.get(), stream.id(), why.text, sizeof why.text));
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        bfc_device_stats from;
        read_stats(device, from);
        return stats_of(from);
    }

    void read_stats(c10::DeviceIndex device, bfc_device_stats& stats) const {
        Why why;
        why.check(served().stats(served().self, device, &stats, why.text, sizeof why.text));
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override {
        Why why;
        why.check(served().reset_accumulated_stats(served().self, device, why.text, sizeof why.text));
    }

    void resetPeakStats(c10::DeviceIndex device) override {
        Why why;
        why.check(served().reset_peak_stats(served().self, device, why.text, sizeof why.text));
    }

    // Overrides PyTorch's function in those versions that have it.
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        std::pair<size_t, size_t> info;
        Why why;
        const bfc_allocator& bfc = served();
        why.check(bfc.memory_info(bfc.self, device, &info.first, &info.second, why.text, sizeof why.text));
        return info;
    }

    // The device whose pool an address lies in; -1 for other memory.
    static int device_of(const void* ptr) {
        const bfc_allocator& bfc = served();
        return bfc.device_of(bfc.self, ptr);
    }

private:
    struct Why {
        char text[4096];

        void check(bfc_result result) const {
            if (result == BFC_OK) return;
            TORCH_CHECK_WITH(OutOfMemoryError, result != BFC_OUT_OF_MEMORY, text);
            TORCH_CHECK(false, text);
        }
    };

    static const bfc_allocator& served() {
        const bfc_allocator* table = table_.load();
        TORCH_CHECK(table != nullptr, "bfc: no allocator serves ", Type, " yet: give its back end a capsule first");
        return *table;
    }

    inline static std::atomic<const bfc_allocator*> table_{nullptr};
};

}  // namespace bfc
