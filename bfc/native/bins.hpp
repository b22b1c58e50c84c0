// The free chunks of one set, by (size, order): exact best fit in O(log n), whatever the sizes are. The order is the
// address, or what the pool says instead.
//
// Sizes fall into fine bins, 32 to a doubling, and two bitmaps find the next bin that is not empty. On real traces nine
// bins of ten are empty, so a bin holds its smallest chunk itself. The others are in a B+ tree behind it, which is
// one flat leaf until there are more than 48. Slots are in *descending* order, so that the smallest is the last of
// its leaf and can be removed without moving the others.
//
// TensorFlow's 21 bins partition sizes too, so a search upwards through either finds the same chunk: the smallest that
// is large enough, the lowest address among equals. docs/design/engine.md says why it is not a std::set (measured).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "debug.h"

#define BFC_HOT __attribute__((always_inline)) inline
#define BFC_COLD __attribute__((noinline))

namespace bfc {

struct FreeChunk {
    uint64_t size;
    uint64_t order;
    uint32_t handle;
};

// The order as one number: many sizes are equal, and comparing size and order apart would take two branches.
inline unsigned __int128 key_of(uint64_t size, uint64_t order) {
    return (static_cast<unsigned __int128>(size) << 64) | order;
}

inline bool precedes(const FreeChunk& chunk, uint64_t size, uint64_t order) {
    return key_of(chunk.size, chunk.order) < key_of(size, order);
}

inline bool follows(const FreeChunk& chunk, uint64_t size, uint64_t order) {
    return key_of(chunk.size, chunk.order) > key_of(size, order);
}

class Bins {
public:
    static constexpr int kGranuleBits = 8;    // chunks start at multiples of 256
    static constexpr int kMantissaBits = 5;   // 32 bins to a doubling of the size
    static constexpr int kBins = (64 - kGranuleBits - kMantissaBits + 1) << kMantissaBits;
    static constexpr int kWords = (kBins + 63) / 64;
    static constexpr int kFanOut = 48;
    static constexpr int kSpareNodes = 16;    // one insertion splits fewer: no machine could hold a tree that high
    static constexpr int kMostSpareNodes = 256;

    Bins() = default;
    Bins(const Bins&) = delete;
    Bins& operator=(const Bins&) = delete;
    ~Bins() {
        for (Bin& bin : bins_)
            if (bin.rest) destroy(bin.rest);
        while (spare_) {
            Node* next = spare_->child[0];
            std::free(spare_);
            spare_ = next;
        }
    }

    // Sets enough nodes aside for the next insertion. False: the host is out of memory, and nothing has changed.
    bool reserve() { return spares_ >= kSpareNodes || refill(); }

    // Needs a reserve() before it.
    BFC_HOT void insert(uint64_t size, uint64_t order, uint32_t handle) {
        const int number = bin_of(size);
        Bin& bin = bins_[number];
        if (bin.count++ > 0) return insert_another(bin, size, order, handle);
        bin.size = size;
        bin.order = order;
        bin.handle = handle;
        words_[number >> 6] |= uint64_t{1} << (number & 63);
        summary_ |= uint64_t{1} << (number >> 6);
    }

    BFC_HOT void erase(uint64_t size, uint64_t order) {
        const int number = bin_of(size);
        Bin& bin = bins_[number];
        BFC_ASSERT(bin.count > 0, "a chunk is taken out of an empty bin");
        if (bin.order == order) return pop_first(number);
        --bin.count;
        erase_from_rest(bin, size, order);
    }

    // Removes the best fit: the first entry of at least this size, the lowest order among equals. False: none.
    BFC_HOT bool pop_best_fit(uint64_t size, FreeChunk& out) {
        int number = bin_of(size);
        const Bin& bin = bins_[number];
        if (bin.count == 0 || bin.size < size) {
            if (bin.count > 1) {
                const FreeChunk* found = lower_bound_in(bin.rest, size, 0);
                if (found) {
                    out = *found;
                    erase_other(out);
                    return true;
                }
            }
            number = next_bin(number + 1);
            if (number < 0) return false;
        }
        out = bins_[number].first();
        pop_first(number);
        return true;
    }

    // The first entry at or after (size, order). False: none.
    bool lower_bound(uint64_t size, uint64_t order, FreeChunk& out) const {
        int number = bin_of(size);
        const Bin& bin = bins_[number];
        if (bin.count > 0) {
            out = bin.first();
            if (!precedes(out, size, order)) return true;
            const FreeChunk* found = bin.count > 1 ? lower_bound_in(bin.rest, size, order) : nullptr;
            if (found) {
                out = *found;
                return true;
            }
        }
        number = next_bin(number + 1);
        if (number < 0) return false;
        out = bins_[number].first();
        return true;
    }

    // The size of the largest entry, or 0.
    uint64_t largest() const {
        if (!summary_) return 0;
        const int word = 63 - __builtin_clzll(summary_);
        const Bin& bin = bins_[(word << 6) + 63 - __builtin_clzll(words_[word])];
        if (bin.count == 1) return bin.size;
        const Node* node = bin.rest;
        while (node->height > 0) node = node->child[0];
        return node->slot[0].size;
    }

    size_t count() const {
        size_t count = 0;
        for (int number = next_bin(0); number >= 0; number = next_bin(number + 1)) count += bins_[number].count;
        return count;
    }
    size_t bytes() const { return sizeof(*this) + nodes_ * sizeof(Node); }

    // Every entry in rising order. False: the host is out of memory for the list.
    bool collect(std::vector<FreeChunk>& out) const noexcept {
        try {
            out.reserve(out.size() + count());
        } catch (...) {
            return false;
        }
        for (int number = next_bin(0); number >= 0; number = next_bin(number + 1)) {
            out.push_back(bins_[number].first());
            if (bins_[number].rest) append(bins_[number].rest, out);
        }
        return true;
    }

    // Takes back the entries that collect() listed, with new orders: each bin is sorted again, in the nodes it has.
    void sort_again(std::vector<FreeChunk>& entries) noexcept {
        FreeChunk* next = entries.data();
        for (int number = next_bin(0); number >= 0; number = next_bin(number + 1)) {
            Bin& bin = bins_[number];
            std::sort(next, next + bin.count, [](const FreeChunk& one, const FreeChunk& other) {
                return precedes(one, other.size, other.order);
            });
            bin.set_first(*next++);
            if (bin.rest) next = fill_again(bin.rest, next);
        }
    }

    // Like collect, but also false if an entry is out of order or in the wrong place. For check().
    bool list(std::vector<FreeChunk>& out) const noexcept {
        try {
            out.reserve(out.size() + count());
        } catch (...) {
            return false;
        }
        for (int number = 0; number < kBins; ++number) {
            const Bin& bin = bins_[number];
            const bool marked = (words_[number >> 6] >> (number & 63)) & 1;
            if (marked != (bin.count > 0)) return false;
            if (!marked) continue;
            const size_t start = out.size();
            out.push_back(bin.first());
            if (bin.rest) append(bin.rest, out);
            if (out.size() - start != bin.count) return false;
            for (size_t i = start; i < out.size(); ++i) {
                if (bin_of(out[i].size) != number) return false;
                if (i > 0 && !precedes(out[i - 1], out[i].size, out[i].order)) return false;
                FreeChunk found;
                if (!lower_bound(out[i].size, out[i].order, found) || found.handle != out[i].handle) return false;
            }
        }
        return true;
    }

private:
    // A leaf's slots are entries. An inner node's slot i is a lower bound of the entries of child i (the slot of the
    // last child is never read), so a key belongs to the first child whose slot does not lie above it.
    struct Node {
        uint32_t count;
        uint32_t height;        // 0: a leaf
        FreeChunk slot[kFanOut];
        Node* child[kFanOut];   // unused in a leaf; in a spare node child[0] is the next spare
    };

    // Most bins hold one chunk or none, so the smallest is in the bin itself and the others in a tree behind it.
    struct alignas(32) Bin {    // half a cache line
        uint64_t size = 0;
        uint64_t order = 0;
        uint32_t handle = 0;
        uint32_t count = 0;
        Node* rest = nullptr;   // when its last entry is removed, the empty leaf is kept: it will be needed again

        FreeChunk first() const { return FreeChunk{size, order, handle}; }
        void set_first(const FreeChunk& chunk) {
            size = chunk.size;
            order = chunk.order;
            handle = chunk.handle;
        }
    };

    Bin bins_[kBins];
    uint64_t words_[kWords] = {};
    uint64_t summary_ = 0;
    size_t nodes_ = 0;
    Node* spare_ = nullptr;
    int spares_ = 0;

    static_assert(kWords <= 64, "one summary word must cover the bitmap");

    // A tiny floating-point number: exact below 32 granules, then five bits below the leading one.
    static int bin_of(uint64_t size) {
        const uint64_t granules = size >> kGranuleBits;
        const int shift = 63 - __builtin_clzll(granules | (uint64_t{1} << kMantissaBits)) - kMantissaBits;
        return (shift << kMantissaBits) + static_cast<int>(granules >> shift);
    }

    int next_bin(int bin) const {
        int word = bin >> 6;
        if (word >= kWords) return -1;
        const uint64_t here = words_[word] & (~uint64_t{0} << (bin & 63));
        if (here) return (word << 6) + __builtin_ctzll(here);
        const uint64_t above = word == 63 ? 0 : summary_ & (~uint64_t{0} << (word + 1));
        if (!above) return -1;
        word = __builtin_ctzll(above);
        return (word << 6) + __builtin_ctzll(words_[word]);
    }

    // Removes a bin's smallest entry.
    BFC_HOT void pop_first(int number) {
        Bin& bin = bins_[number];
        if (--bin.count == 0) {
            words_[number >> 6] &= ~(uint64_t{1} << (number & 63));
            if (!words_[number >> 6]) summary_ &= ~(uint64_t{1} << (number >> 6));
            return;
        }
        Node* leaf = bin.rest;
        if (leaf->height == 0) return bin.set_first(leaf->slot[--leaf->count]);
        bin.set_first(*smallest(leaf));
        erase_from_rest(bin, bin.size, bin.order);
    }

    BFC_COLD void erase_other(const FreeChunk& chunk) { erase(chunk.size, chunk.order); }

    // The bin holds at least one chunk, and its count includes the new one already.
    BFC_COLD void insert_another(Bin& bin, uint64_t size, uint64_t order, uint32_t handle) {
        if (!precedes(bin.first(), size, order)) {
            std::swap(bin.size, size);
            std::swap(bin.order, order);
            std::swap(bin.handle, handle);
        }
        Node* leaf = bin.rest;
        if (!leaf || leaf->height > 0 || leaf->count == kFanOut) return insert_in_tree(bin, size, order, handle);
        insert_in_leaf(leaf, size, order, handle);
    }

    BFC_COLD bool refill() {
        while (spares_ < kSpareNodes) {
            Node* node = static_cast<Node*>(std::malloc(sizeof(Node)));
            if (!node) return false;
            ++nodes_;
            recycle(node);
        }
        return true;
    }

    Node* take_spare(uint32_t height) {
        BFC_ASSERT(spare_, "an insertion without a reserve() before it");
        Node* node = spare_;
        spare_ = node->child[0];
        --spares_;
        node->count = 0;
        node->height = height;
        return node;
    }

    void recycle(Node* node) {
        if (spares_ == kMostSpareNodes) {
            --nodes_;
            return std::free(node);
        }
        node->child[0] = spare_;
        spare_ = node;
        ++spares_;
    }

    static void destroy(Node* node) {
        if (node->height > 0)
            for (uint32_t i = 0; i < node->count; ++i) destroy(node->child[i]);
        std::free(node);
    }

    static void append(const Node* node, std::vector<FreeChunk>& out) {
        for (uint32_t i = node->count; i-- > 0;) {
            if (node->height > 0)
                append(node->child[i], out);
            else
                out.push_back(node->slot[i]);
        }
    }

    // Writes entries in rising order over those of a tree. Returns the first that is left.
    static FreeChunk* fill_again(Node* node, FreeChunk* next) {
        for (uint32_t i = node->count; i-- > 0;) {
            node->slot[i] = *next;
            next = node->height > 0 ? fill_again(node->child[i], next) : next + 1;
        }
        return next;
    }

    static const FreeChunk* smallest(const Node* node) {
        while (node->height > 0) node = node->child[node->count - 1];
        return &node->slot[node->count - 1];
    }

    static uint32_t route(const Node* node, uint64_t size, uint64_t order) {
        uint32_t i = 0;
        while (i + 1 < node->count && follows(node->slot[i], size, order)) ++i;
        return i;
    }

    BFC_COLD static const FreeChunk* lower_bound_in(const Node* node, uint64_t size, uint64_t order) {
        if (node->height == 0) {
            uint32_t i = node->count;
            while (i > 0 && precedes(node->slot[i - 1], size, order)) --i;
            return i > 0 ? &node->slot[i - 1] : nullptr;
        }
        const uint32_t i = route(node, size, order);
        const FreeChunk* found = lower_bound_in(node->child[i], size, order);
        if (found || i == 0) return found;
        return smallest(node->child[i - 1]);
    }

    // Field by field: a wider load of an entry that was just written by fields would stall on store forwarding.
    static void insert_in_leaf(Node* leaf, uint64_t size, uint64_t order, uint32_t handle) {
        FreeChunk* slot = leaf->slot + leaf->count++;
        for (; slot > leaf->slot && precedes(slot[-1], size, order); --slot) *slot = slot[-1];
        slot->size = size;
        slot->order = order;
        slot->handle = handle;
    }

    static void erase_from_leaf(Node* leaf, uint64_t order) {
        uint32_t i = leaf->count - 1;
        while (leaf->slot[i].order != order) {
            BFC_ASSERT(i > 0, "a chunk is taken out of a leaf that does not hold it");
            --i;
        }
        close_gap(leaf, i);
    }

    static void close_gap(Node* leaf, uint32_t i) {
        --leaf->count;
        for (; i < leaf->count; ++i) leaf->slot[i] = leaf->slot[i + 1];
    }

    BFC_COLD void insert_in_tree(Bin& bin, uint64_t size, uint64_t order, uint32_t handle) {
        const FreeChunk entry{size, order, handle};
        if (!bin.rest) {
            bin.rest = take_spare(0);
            return insert_in_leaf(bin.rest, size, order, handle);
        }
        Node* sibling = insert_below(bin.rest, entry);
        if (!sibling) return;
        Node* root = take_spare(bin.rest->height + 1);
        root->count = 2;
        root->slot[0] = bin.rest->slot[bin.rest->count - 1];
        root->child[0] = bin.rest;
        root->child[1] = sibling;
        bin.rest = root;
    }

    // Returns the node that was split off below this one, or null. After a split the last slot of the upper half is
    // the bound between the two: in a leaf its smallest entry, in an inner node the bound of its last child.
    Node* insert_below(Node* node, const FreeChunk& entry) {
        if (node->height == 0) {
            Node* sibling = node->count == kFanOut ? split(node) : nullptr;
            const FreeChunk& bound = node->slot[node->count - 1];
            const bool below = sibling && precedes(entry, bound.size, bound.order);
            insert_in_leaf(below ? sibling : node, entry.size, entry.order, entry.handle);
            return sibling;
        }
        const uint32_t i = route(node, entry.size, entry.order);
        Node* grown = insert_below(node->child[i], entry);
        if (!grown) return nullptr;
        Node* sibling = node->count == kFanOut ? split(node) : nullptr;
        if (sibling && i >= node->count)
            insert_child(sibling, i - node->count, grown);
        else
            insert_child(node, i, grown);
        return sibling;
    }

    Node* split(Node* node) {
        Node* sibling = take_spare(node->height);
        const uint32_t kept = node->count / 2, moved = node->count - kept;
        std::memcpy(sibling->slot, node->slot + kept, moved * sizeof(FreeChunk));
        if (node->height > 0) std::memcpy(sibling->child, node->child + kept, moved * sizeof(Node*));
        sibling->count = moved;
        node->count = kept;
        return sibling;
    }

    // Child i of the parent was split: `grown` holds its lower half.
    static void insert_child(Node* parent, uint32_t i, Node* grown) {
        const uint32_t after = parent->count - i - 1;
        std::memmove(parent->slot + i + 2, parent->slot + i + 1, after * sizeof(FreeChunk));
        std::memmove(parent->child + i + 2, parent->child + i + 1, after * sizeof(Node*));
        parent->slot[i + 1] = parent->slot[i];
        parent->slot[i] = parent->child[i]->slot[parent->child[i]->count - 1];
        parent->child[i + 1] = grown;
        ++parent->count;
    }

    BFC_COLD void erase_from_rest(Bin& bin, uint64_t size, uint64_t order) {
        if (bin.rest->height == 0) return erase_from_leaf(bin.rest, order);
        erase_from_tree(bin, size, order);
    }

    BFC_COLD void erase_from_tree(Bin& bin, uint64_t size, uint64_t order) {
        erase_below(bin.rest, size, order);
        while (bin.rest->height > 0 && bin.rest->count == 1) {
            Node* child = bin.rest->child[0];
            recycle(bin.rest);
            bin.rest = child;
        }
    }

    void erase_below(Node* node, uint64_t size, uint64_t order) {
        if (node->height == 0) return erase_from_leaf(node, order);
        const uint32_t i = route(node, size, order);
        erase_below(node->child[i], size, order);
        const uint32_t left = node->child[i]->count;
        if (left == 0) return remove_child(node, i);
        if (left >= kFanOut / 4) return;
        if (i > 0 && try_to_merge(node, i - 1)) return;
        if (i + 1 < node->count) try_to_merge(node, i);
    }

    void remove_child(Node* parent, uint32_t i) {
        recycle(parent->child[i]);
        const uint32_t after = --parent->count - i;
        std::memmove(parent->slot + i, parent->slot + i + 1, after * sizeof(FreeChunk));
        std::memmove(parent->child + i, parent->child + i + 1, after * sizeof(Node*));
    }

    // Joins child i with the next one if both together fill at most half a node, so that no tree becomes sparse.
    bool try_to_merge(Node* parent, uint32_t i) {
        Node* upper = parent->child[i];
        Node* lower = parent->child[i + 1];
        if (upper->count + lower->count > kFanOut / 2) return false;
        if (upper->height > 0) {
            upper->slot[upper->count - 1] = parent->slot[i];
            std::memcpy(upper->child + upper->count, lower->child, lower->count * sizeof(Node*));
        }
        std::memcpy(upper->slot + upper->count, lower->slot, lower->count * sizeof(FreeChunk));
        upper->count += lower->count;
        parent->slot[i] = parent->slot[i + 1];
        remove_child(parent, i + 1);
        return true;
    }
};

}  // namespace bfc
