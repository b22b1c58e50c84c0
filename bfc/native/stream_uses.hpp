// The streams that use an allocation, noted by callers without the GIL. It has no lock of its own, but for `empty`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace bfc {

class StreamUses {
public:
    // False: the host is out of memory, and nothing has changed.
    bool add(int64_t allocation_id, uint64_t stream) noexcept {
        try {
            std::vector<uint64_t>& streams = by_allocation_[allocation_id];
            count_.store(by_allocation_.size(), std::memory_order_relaxed);
            for (uint64_t known : streams)
                if (known == stream) return true;
            streams.push_back(stream);
            return true;
        } catch (...) {
            return false;
        }
    }

    // The streams of an allocation, if any. False: the host is out of memory.
    bool copy(int64_t allocation_id, std::vector<uint64_t>& out) const noexcept {
        const auto found = by_allocation_.find(allocation_id);
        if (found == by_allocation_.end()) return true;
        try {
            out = found->second;
            return true;
        } catch (...) {
            return false;
        }
    }

    bool has(int64_t allocation_id) const noexcept { return by_allocation_.count(allocation_id) > 0; }
    void drop(int64_t allocation_id) noexcept {
        by_allocation_.erase(allocation_id);
        count_.store(by_allocation_.size(), std::memory_order_relaxed);
    }
    void clear() noexcept {
        by_allocation_.clear();
        count_.store(0, std::memory_order_relaxed);
    }
    // Needs no lock.
    bool empty() const noexcept { return count_.load(std::memory_order_relaxed) == 0; }

private:
    std::map<int64_t, std::vector<uint64_t>> by_allocation_;
    std::atomic<size_t> count_{0};
};

}  // namespace bfc
