// A ring buffer of the newest events of a pool, with the actions of PyTorch's memory history.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bfc {

enum HistoryAction {
    kAlloc,
    kFreeRequested,
    kFreeCompleted,
    kSegmentAlloc,
    kSegmentFree,
    kSnapshot,
    kOom,
    kSegmentMap,
    kSegmentUnmap,
    kAnnotate,
};

struct HistoryRecord {
    uint64_t addr;
    uint64_t size;
    uint64_t stream;
    uint64_t pool[2];
    int64_t time_us;
    int64_t allocation_id;  // the allocation that it is about; 0: none
    uint32_t action;
    uint32_t owner;         // its number; 0: none
};

class History {
public:
    History(size_t capacity, uint32_t skipped_actions) : capacity_(capacity), skipped_(skipped_actions) {}

    // If the host has no memory for another entry, the oldest is dropped.
    // Out of line and cold: the loops that call it are short, and mostly nothing is recorded.
    __attribute__((noinline, cold)) void add(HistoryRecord record) noexcept {
        if (skipped_ >> record.action & 1) return;
        record.time_us = now_us();
        if (records_.size() < capacity_) {
            try {
                records_.push_back(record);
                return;
            } catch (...) {
                capacity_ = records_.size();
            }
        }
        if (records_.empty()) return;
        records_[oldest_] = record;
        oldest_ = (oldest_ + 1) % records_.size();
    }

    // Sets the newest entry's owner if it is about this allocation: the owner is known only after the entry is added.
    void set_owner(int64_t allocation_id, uint32_t owner) noexcept {
        if (records_.empty()) return;
        HistoryRecord& newest = records_[(oldest_ + records_.size() - 1) % records_.size()];
        if (newest.action == kAlloc && newest.allocation_id == allocation_id) newest.owner = owner;
    }

    size_t size() const { return records_.size(); }
    const HistoryRecord& at(size_t i) const { return records_[(oldest_ + i) % records_.size()]; }

    bool copy(std::vector<HistoryRecord>& out) const noexcept {
        const auto oldest = records_.begin() + static_cast<std::ptrdiff_t>(oldest_);
        try {
            out.reserve(size());
            out.assign(oldest, records_.end());
            out.insert(out.end(), records_.begin(), oldest);
        } catch (...) {
            return false;
        }
        return true;
    }

private:
    size_t capacity_;
    uint32_t skipped_;  // one bit for each action
    size_t oldest_ = 0;
    std::vector<HistoryRecord> records_;

    static int64_t now_us() {
        using namespace std::chrono;
        return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
    }
};

}  // namespace bfc
