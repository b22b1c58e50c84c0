// The slots of a range whose pages may have further addresses: which slots lie entirely in a free chunk, and in which
// one. It is brought up to date when somebody looks, as when pages are stitched: see Pages.note_changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "debug.h"

namespace bfc {

constexpr uint32_t kNoPage = ~uint32_t{0};

class PageBitmap {
public:
    PageBitmap(uint64_t start, int page_shift) : start_(start), shift_(page_shift) {}

    uint64_t page_size() const { return uint64_t{1} << shift_; }
    uint64_t address_of(size_t slot) const { return start_ + (uint64_t{slot} << shift_); }
    size_t slot_at(uint64_t address) const { return (address - start_) >> shift_; }
    size_t slots() const { return page_at_.size(); }

    // Makes room for the slots up to an address. False: the host is out of memory, and nothing has changed.
    bool make_room(uint64_t end) noexcept {
        const size_t slots = slot_at(end);
        if (slots <= page_at_.size()) return true;
        try {
            free_.resize((slots + 63) / 64);
            chunk_at_.resize(slots, kNoPage);
            page_at_.resize(slots, kNoPage);
        } catch (const std::bad_alloc&) {
            return false;
        }
        return true;
    }

    uint32_t page_at(size_t slot) const { return slot < page_at_.size() ? page_at_[slot] : kNoPage; }
    void set_page(size_t slot, uint32_t page) { page_at_[slot] = page; }

    // -- free chunks ---------------------------------------------------------------------------------------------------

    // A chunk is in use.
    void take(uint64_t address, uint64_t size) { clear(slot_at(address), slot_at(address + size - 1) + 1); }

    // A chunk is free.
    void add(uint64_t address, uint64_t size, uint32_t chunk) {
        const size_t first = slot_above(address), end = slot_at(address + size);
        if (first >= end) return;
        chunk_at_[first] = chunk;
        fill<true>(first, end);
    }

    void remove(uint64_t address, uint64_t size) {
        const size_t first = slot_above(address), end = slot_at(address + size);
        if (first < end) clear(first, end);
    }

    // No slot lies in a free chunk.
    void clear() { std::fill(free_.begin(), free_.end(), 0); }

    bool is_free(size_t slot) const { return slot < page_at_.size() && (free_[slot / 64] >> (slot % 64) & 1); }

    bool are_free(size_t slot, size_t count) const {
        for (size_t end = slot + count; slot < end; ++slot) {
            if (slot % 64 == 0 && slot + 64 <= end) {
                if (slot + 64 > page_at_.size() || ~free_[slot / 64]) return false;
                slot += 63;
            } else if (!is_free(slot)) {
                return false;
            }
        }
        return true;
    }

    // How many slots lie entirely in free chunks.
    size_t count_free() const {
        size_t count = 0;
        for (const uint64_t word : free_) count += __builtin_popcountll(word);
        return count;
    }

    // The free chunk that a free slot lies in. No two free chunks touch, so the row's first free slot has its note.
    uint32_t chunk_around(size_t slot) const {
        BFC_ASSERT(is_free(slot), "a slot that is not free is looked up");
        size_t word = slot / 64;
        uint64_t below = ~free_[word] & ~(~uint64_t{0} << (slot % 64));     // what is not free below the slot
        while (below == 0 && word > 0) below = ~free_[--word];
        slot = below ? 64 * word + 64 - __builtin_clzll(below) : 0;
        return chunk_at_[slot];
    }

    // The chunk that begins at a slot, where one was noted.
    uint32_t chunk_at(size_t slot) const { return chunk_at_[slot]; }
    void note_chunk(size_t slot, uint32_t chunk) { chunk_at_[slot] = chunk; }

    size_t bytes() const { return sizeof(PageBitmap) + free_.capacity() * 8 + (chunk_at_.capacity() + page_at_.capacity()) * 4; }

private:
    // The first slot that begins at or after an address.
    size_t slot_above(uint64_t address) const { return slot_at(address + page_size() - 1); }

    template <bool kValue>
    void fill(size_t first, size_t end) {
        const size_t low = first / 64, high = (end - 1) / 64;
        const uint64_t from = ~uint64_t{0} << (first % 64), to = ~uint64_t{0} >> (63 - (end - 1) % 64);
        if (low == high) return write<kValue>(low, from & to);
        write<kValue>(low, from);
        for (size_t word = low + 1; word < high; ++word) write<kValue>(word, ~uint64_t{0});
        write<kValue>(high, to);
    }

    template <bool kValue>
    void write(size_t word, uint64_t mask) {
        if (kValue)
            free_[word] |= mask;
        else
            free_[word] &= ~mask;
    }

    void clear(size_t first, size_t end) { fill<false>(first, end); }

    uint64_t start_;
    int shift_;
    std::vector<uint64_t> free_;        // a bit for each slot
    std::vector<uint32_t> chunk_at_;    // by slot: the FREE or MAPPED_ELSEWHERE chunk of which it is the first whole slot
    std::vector<uint32_t> page_at_;     // the page in each slot
};

}  // namespace bfc
