// What an allocator's mapper keeps of ranges of addresses and of pages: records that need no Python, so that a request
// maps without the GIL (allocators/mapping/_address_ranges.pyx).
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "forward.hpp"
#include "gil_wait.hpp"
#include "lock.hpp"

namespace bfc {

class PageBitmap;

// A page. Who has it in a list may be several: a slot, a run of what sleeps, and a list of what went wrong.
struct DevicePage {
    uint64_t number = 0;    // as `create` returned it
    uint64_t nbytes = 0;
    bool is_made = false;   // it has a number
    bool is_mapped = false;
    std::shared_ptr<DevicePage> next;   // in the list that it is the first page of

    // A list that is dropped is as deep as it is long.
    ~DevicePage() {
        while (next != nullptr && next.use_count() == 1) {
            std::shared_ptr<DevicePage> after = std::move(next->next);
            next = std::move(after);
        }
    }
};
using PageRef = std::shared_ptr<DevicePage>;

// A new record; null where the host has no memory.
inline PageRef new_page(uint64_t nbytes) noexcept {
    try {
        PageRef page = std::make_shared<DevicePage>();
        page->nbytes = nbytes;
        return page;
    } catch (...) {
        return nullptr;
    }
}

// Addresses of a mapping, or a part of it.
struct Place {
    uint64_t ptr = 0;
    uint64_t nbytes = 0;    // 0: none

    Place() = default;
    Place(uint64_t ptr, uint64_t nbytes) : ptr(ptr), nbytes(nbytes) {}
    bool has(uint64_t address) const { return address >= ptr && address - ptr < nbytes; }
};

// Reserved addresses for one stream, one pool, and small or large chunks: slots of one size, each with a page of memory
// or with none.
struct AddressRange {
    static constexpr uint64_t kNowhere = ~uint64_t{0};  // the start while the addresses are being asked for

    uint64_t ptr = kNowhere;
    uint64_t nbytes = 0;
    uint64_t slot = 0;          // bytes of each of its pages
    uint32_t bin_set = 0;
    uint64_t stream = 0;
    uint64_t asked_of = 0;      // the stream that says when earlier work is done
    bool is_known = false;      // whether the pool knows it: until the allocator closes
    bool is_gone = false;       // its addresses are given back, or were never had
    bool has_table = false;     // of the pages in its slots
    bool some_stuck = false;    // memory that could not be unmapped
    bool is_captured = false;   // whether its stream captured a graph when pages were last looked for
    PlanServer* plan = nullptr; // whose region it is; null: of none
    int region = 0;
    bool must_wait = false;     // whether to wait for its stream before what is leaving is unmapped

    // What one of the subclasses of AddressRanges looks up in it.
    std::vector<PageRef> pages;         // by slot; null: none
    PageBitmap* bitmap = nullptr;       // the same, where pages have numbers: that of its set of bins; null: none
    std::vector<uint32_t> holes;        // its unmapped chunks, in address order
    uint32_t tail = ~uint32_t{0};       // the unmapped chunk at its end; NO_CHUNK: there is none
};

// The ranges of an allocator. One that goes stays where it is in memory until the next transaction, since functions
// further up may still look at it.
class AddressRangeList {
public:
    ~AddressRangeList() {
        forget_gone();
        for (AddressRange* range : ranges_) delete range;
    }
    size_t size() const { return ranges_.size(); }
    AddressRange* at(size_t i) const { return ranges_[i]; }
    // A new range at the end; null where the host has no memory.
    AddressRange* open() noexcept {
        try {
            ranges_.reserve(ranges_.size() + 1);
            gone_.reserve(gone_.size() + ranges_.size() + 1);
        } catch (...) {
            return nullptr;
        }
        AddressRange* range = new (std::nothrow) AddressRange();
        if (range != nullptr) ranges_.push_back(range);
        return range;
    }
    void remove(AddressRange* range) noexcept {
        for (size_t i = 0; i < ranges_.size(); ++i) {
            if (ranges_[i] != range) continue;
            ranges_.erase(ranges_.begin() + i);
            gone_.push_back(range);     // `open` has made room
            return;
        }
    }
    void forget_gone() noexcept {
        for (AddressRange* range : gone_) delete range;
        gone_.clear();
    }
    // Moves the last range to where it belongs by address.
    void sort_last() noexcept {
        for (size_t i = ranges_.size() - 1; i > 0 && ranges_[i - 1]->ptr > ranges_[i]->ptr; --i)
            std::swap(ranges_[i - 1], ranges_[i]);
    }

private:
    std::vector<AddressRange*> ranges_;
    std::vector<AddressRange*> gone_;
};

// A view that is to be unmapped once its stream has finished with it.
struct Retired {
    uint64_t ptr = 0;
    uint64_t nbytes = 0;            // 0: addresses of a range, which are not given back
    uint64_t stream = 0;
    std::vector<uint32_t> pages;    // by number
    std::vector<Place> mapped;      // what of it is still mapped
    void* event = nullptr;          // behind what its stream had queued, where the source has native events
    PyObject* fence = nullptr;      // or a fence of the source's; neither: nothing was queued
    bool is_stuck = false;          // the sub-allocator failed to unmap it
};
using RetiredRef = std::shared_ptr<Retired>;

inline RetiredRef new_retired(uint64_t ptr, uint64_t nbytes) noexcept {
    try {
        RetiredRef retired = std::make_shared<Retired>();
        retired->ptr = ptr;
        retired->nbytes = nbytes;
        return retired;
    } catch (...) {
        return nullptr;
    }
}

// What guards the mapper's records: the GIL, or, in a transaction that runs without it, this lock. Like the GIL it is
// let go in each call of the device, and nowhere else, so a fork finds the records as they are in such a call. It is
// made after the allocator's lock. A fork takes the newest lock first, and the mapper takes this one first, too.
class RecordsGuard {
public:
    void begin() noexcept {
        lock_.wait_and_acquire();
        is_native_ = true;
    }
    void end() noexcept {
        is_native_ = false;
        lock_.release();
    }
    // In a forked child, whose mapper may have been in a native transaction.
    void reset() noexcept {
        is_native_ = false;
        paused_ = 0;
    }
    bool is_native() const noexcept { return is_native_; }

    // Around a call that needs no GIL.
    PyThreadState* let_go() noexcept {
        if (!is_native_) return PyEval_SaveThread();
        lock_.release();
        return nullptr;
    }
    void take_back(PyThreadState* state) noexcept {
        if (state != nullptr)
            restore_gil(state);
        else
            lock_.wait_and_acquire();
    }
    // Around what takes the GIL itself, which is the guard then. It may be nested.
    void pause() noexcept {
        if (is_native_) {
            is_native_ = false;
            paused_ = 1;
            lock_.release();
        } else if (paused_) {
            ++paused_;
        }
    }
    void go_on() noexcept {
        if (paused_ == 0 || --paused_ > 0) return;
        lock_.wait_and_acquire();
        is_native_ = true;
    }
    // For a thread with the GIL that reads the records while another one may map. It takes the allocator's lock, too,
    // and keeps the GIL while it waits for that: with this lock held nobody may wait for the GIL.
    void begin_reading(Lock& allocators) noexcept {
        acquire(lock_);
        allocators.wait_and_acquire();
    }
    void end_reading(Lock& allocators) noexcept {
        allocators.release();
        lock_.release();
    }

private:
    Lock lock_;
    bool is_native_ = false;
    int paused_ = 0;
};

// Lets the GIL go for a transaction, if this thread has it.
inline PyThreadState* let_gil_go() noexcept { return holds_gil() ? PyEval_SaveThread() : nullptr; }
inline void take_gil_back(PyThreadState* state) noexcept {
    if (state != nullptr) restore_gil(state);
}

}  // namespace bfc
