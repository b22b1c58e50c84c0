// Pages that have several addresses: slots in ranges, and views, which are rows of pages stitched from such slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace bfc {

struct Slot {
    uint32_t set;   // the set of bins whose range it is in
    uint32_t number;
};

struct Run {        // consecutive slots
    uint32_t set;
    uint32_t first;
    uint32_t count;
};

struct PageRecord {
    std::vector<Slot> slots;    // where it is mapped, except in views
    uint32_t active = 0;        // the index of the slot that it is used through, unless a view uses it
    uint32_t primary = 0;       // the index of the slot that views rely on
    uint32_t views = 0;         // the number of views that it is mapped in
    bool is_known = false;

    bool is_mapped() const { return views > 0 || !slots.empty(); }

    bool try_add(Slot slot) noexcept {
        try {
            slots.push_back(slot);
            return true;
        } catch (...) {
            return false;
        }
    }

    void drop(uint32_t i) {
        slots.erase(slots.begin() + i);
        if (active > i) --active;
        if (primary > i)
            --primary;
        else if (primary == i)
            primary = active;
    }

    // The index in `slots` of its slot in the range of a set of bins; kNone: it has none.
    static constexpr uint32_t kNone = ~uint32_t{0};
    uint32_t in_set(uint32_t set) const {
        for (uint32_t i = 0; i < slots.size(); ++i)
            if (slots[i].set == set) return i;
        return kNone;
    }
};

enum ViewState { kUnused, kKept, kLive, kRetired };

struct StitchedView {
    std::vector<Run> runs;      // the primary slots of its pages, in their order
    uint64_t address = 0;
    uint64_t made_at = 0;           // both in units of the count of uses of views
    uint64_t last_used = 0;
    uint32_t pages = 0;
    uint32_t set = 0;           // the set of bins of its chunk
    uint32_t chunk = 0;
    uint32_t state = kUnused;
};

// Views by their number. A number may be reused later.
class StitchedViews {
public:
    uint32_t count() const { return static_cast<uint32_t>(views_.size()); }
    StitchedView& at(uint32_t number) { return views_[number]; }
    uint64_t slots() const { return slots_; }

    // A number for a new view, and room for it in every table; kNone where the host is out of memory.
    static constexpr uint32_t kNone = ~uint32_t{0};
    uint32_t open() noexcept {
        try {
            for (uint32_t number = 0; number < views_.size(); ++number)
                if (views_[number].state == kUnused) {
                    views_[number] = StitchedView();    // after a fork it may hold what another thread had begun
                    return number;
                }
            views_.emplace_back();
            return count() - 1;
        } catch (...) {
            return kNone;
        }
    }

    // False: the host is out of memory, and nothing has changed.
    bool enter(uint32_t number) noexcept {
        StitchedView& view = views_[number];
        try {
            std::vector<uint32_t>& same = by_size_[key_of(view.set, view.pages)];
            same.reserve(same.size() + 1);
            by_chunk_[view.chunk] = number;
            same.push_back(number);
        } catch (...) {
            return false;
        }
        slots_ += view.pages;
        return true;
    }

    // The view of a chunk that is one.
    uint32_t of_chunk(uint32_t chunk) const { return by_chunk_.find(chunk)->second; }

    std::vector<uint32_t>* of_size(uint32_t set, uint32_t pages) {
        const auto found = by_size_.find(key_of(set, pages));
        return found == by_size_.end() ? nullptr : &found->second;
    }

    // From now on no request finds the view.
    void retire(uint32_t number) noexcept {
        StitchedView& view = views_[number];
        std::vector<uint32_t>& same = by_size_[key_of(view.set, view.pages)];
        for (size_t i = 0; i < same.size(); ++i)
            if (same[i] == number) {
                same[i] = same.back();
                same.pop_back();
                break;
            }
        by_chunk_.erase(view.chunk);
        slots_ -= view.pages;
        view.state = kRetired;
    }

    void forget(uint32_t number) noexcept { views_[number] = StitchedView(); }

private:
    static uint64_t key_of(uint32_t set, uint32_t pages) { return uint64_t{set} << 32 | pages; }

    std::vector<StitchedView> views_;
    std::unordered_map<uint64_t, std::vector<uint32_t>> by_size_;   // kept and live views, by set and number of pages
    std::unordered_map<uint32_t, uint32_t> by_chunk_;
    uint64_t slots_ = 0;                                            // of kept and live views
};

}  // namespace bfc
