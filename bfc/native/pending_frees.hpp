// What `PendingFrees` does: frees that were left to a later call. parts.hpp declares it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "nothrow.hpp"
#include "parts.hpp"

namespace bfc {

class PendingFrees::Section {
public:
    explicit Section(PendingFrees& frees) noexcept : frees_(frees) {
        while (frees_.inside_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Section() { frees_.inside_.store(false, std::memory_order_release); }

private:
    PendingFrees& frees_;
};

inline void PendingFrees::tell() noexcept {
    if (reasons_ != nullptr) reasons_->put(bit_, due_ > 0);
}

// There is room for one entry a chunk. So if all of it is used, a chunk has two, and the older one is of an allocation
// that was freed since, by its address.
inline void PendingFrees::drop_outdated() noexcept {
    std::stable_sort(items_.begin(), items_.end(),
                     [](const PendingFree& one, const PendingFree& other) { return one.handle < other.handle; });
    size_t kept = 0;
    for (size_t i = 0; i < items_.size(); ++i)
        if (i + 1 == items_.size() || items_[i].handle != items_[i + 1].handle) items_[kept++] = items_[i];
    items_.resize(kept);
    due_ = 0;
    for (const PendingFree& item : items_) due_ += item.reason != kDeviceFailed;
}

inline void PendingFrees::attach(Reasons* reasons, uint32_t bit) noexcept {
    reasons_ = reasons;
    bit_ = bit;
}

inline bool PendingFrees::reserve(size_t chunks) noexcept {
    Section section(*this);
    return try_reserve(items_, chunks);
}

inline void PendingFrees::add(uint32_t handle, int64_t allocation_id, uint32_t reason) noexcept {
    Section section(*this);
    const PendingFree item{handle, reason, allocation_id};
    if (!try_push_back(items_, item)) {
        drop_outdated();
        items_.push_back(item);
    }
    due_ += reason != kDeviceFailed;
    tell();
}

inline size_t PendingFrees::take(PendingFree* out, size_t room) noexcept {
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

inline size_t PendingFrees::due() noexcept {
    Section section(*this);
    return due_;
}

inline void PendingFrees::try_failed_again() noexcept {
    Section section(*this);
    for (PendingFree& item : items_)
        if (item.reason == kDeviceFailed) item.reason = kLockTaken;
    due_ = items_.size();
    tell();
}

inline void PendingFrees::clear() noexcept {
    Section section(*this);
    items_.clear();
    due_ = 0;
    tell();
}

}  // namespace bfc
