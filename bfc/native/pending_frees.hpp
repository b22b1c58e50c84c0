// Frees that were left to a later call, each with the reason.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "nothrow.hpp"
#include "reasons.hpp"

namespace bfc {

enum PendingReason : uint32_t {
    kLockTaken,      // a finaliser, which must not wait, found the lock taken; or the free failed and is to be repeated
    kNotIdle,        // a caller without the GIL could not wait for the device, or could not read who uses the memory
    kNoHostMemory,   // the chunk waits for nothing any more, but the bookkeeping could not grow
    kDeviceFailed,   // the device failed for it: it is tried again only where a user asks for that
};

struct PendingFree {
    uint32_t handle;
    uint32_t reason;
    int64_t allocation_id;  // -1: the chunk has no owner any more, and waits
};

// Who adds an entry holds the GIL, or else the lock of the allocator. A fork takes both, so that no thread is inside of
// these sections when the process is copied. They call nothing, so who waits for one does not wait long.
class PendingFrees {
public:
    // The bit of `reasons` is set as long as any entry is due.
    void attach(Reasons* reasons, uint32_t bit) noexcept {
        reasons_ = reasons;
        bit_ = bit;
    }

    // Makes room for one entry a chunk, so that adding one needs no memory.
    bool reserve(size_t chunks) noexcept {
        Section section(*this);
        return try_reserve(items_, chunks);
    }

    void add(uint32_t handle, int64_t allocation_id, uint32_t reason) noexcept {
        Section section(*this);
        const PendingFree item{handle, reason, allocation_id};
        if (!try_push_back(items_, item)) {
            drop_outdated();
            items_.push_back(item);
        }
        due_ += reason != kDeviceFailed;
        tell();
    }

    // Moves the oldest entries that are due to `out`. Returns how many.
    size_t take(PendingFree* out, size_t room) noexcept {
        Section section(*this);
        size_t taken = 0, kept = 0;
        for (const PendingFree& item : items_)
            if (taken < room && item.reason != kDeviceFailed)
                out[taken++] = item;
            else
                items_[kept++] = item;
        items_.resize(kept);
        due_ -= taken;
        tell();
        return taken;
    }

    size_t due() noexcept {
        Section section(*this);
        return due_;
    }

    // From now on those are due, too, for which the device failed.
    void try_failed_again() noexcept {
        Section section(*this);
        for (PendingFree& item : items_)
            if (item.reason == kDeviceFailed) item.reason = kLockTaken;
        due_ = items_.size();
        tell();
    }

    void clear() noexcept {
        Section section(*this);
        items_.clear();
        due_ = 0;
        tell();
    }

private:
    class Section {
    public:
        explicit Section(PendingFrees& frees) noexcept : frees_(frees) {
            while (frees_.inside_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
        }
        ~Section() { frees_.inside_.store(false, std::memory_order_release); }

    private:
        PendingFrees& frees_;
    };

    void tell() noexcept {
        if (reasons_ != nullptr) reasons_->put(bit_, due_ > 0);
    }

    // There is room for one entry a chunk. So if all of it is used, a chunk has two, and the older one is of an
    // allocation that was freed since, by its address.
    void drop_outdated() noexcept {
        std::stable_sort(items_.begin(), items_.end(),
                         [](const PendingFree& one, const PendingFree& other) { return one.handle < other.handle; });
        size_t kept = 0;
        for (size_t i = 0; i < items_.size(); ++i)
            if (i + 1 == items_.size() || items_[i].handle != items_[i + 1].handle) items_[kept++] = items_[i];
        items_.resize(kept);
        due_ = 0;
        for (const PendingFree& item : items_) due_ += item.reason != kDeviceFailed;
    }

    std::vector<PendingFree> items_;
    size_t due_ = 0;
    Reasons* reasons_ = nullptr;
    uint32_t bit_ = 0;
    std::atomic<bool> inside_{false};
};

}  // namespace bfc
