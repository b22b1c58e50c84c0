// The free chunks of one set, in order of (size, address): exact best fit in O(log n), whatever the sizes are.
//
// Sizes fall into fine bins, 32 to a doubling, and two bitmaps find the next bin that is not empty. A bin is a small
// B+ tree that is one flat leaf until 24 chunks of nearly the same size are free at once. Entries stand in *descending*
// order, so that the best fit of a bin is the last entry of a leaf and an allocation takes it without moving another.
//
// TensorFlow's 21 bins partition sizes too, so a search upwards through either finds the same chunk: the smallest that
// is large enough, the lowest address among equals. docs/design.md tells why it is not std::set (measured).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace bfc {

struct FreeChunk {
    uint64_t size;
    uint64_t address;
    uint32_t handle;
};

inline bool precedes(const FreeChunk& chunk, uint64_t size, uint64_t address) {
    return chunk.size < size || (chunk.size == size && chunk.address < address);
}

inline bool follows(const FreeChunk& chunk, uint64_t size, uint64_t address) {
    return chunk.size > size || (chunk.size == size && chunk.address > address);
}

class Bins {
public:
    static constexpr int kGranuleBits = 8;    // chunks start at multiples of 256
    static constexpr int kMantissaBits = 5;   // 32 bins to a doubling of the size
    static constexpr int kBins = (64 - kGranuleBits - kMantissaBits + 1) << kMantissaBits;
    static constexpr int kWords = (kBins + 63) / 64;
    static constexpr int kFanOut = 24;
    static constexpr int kSpareNodes = 16;    // more than one insertion can split: a tree that high fits no machine
    static constexpr int kMostSpareNodes = 256;

    Bins() = default;
    Bins(const Bins&) = delete;
    Bins& operator=(const Bins&) = delete;
    ~Bins() {
        for (Tree& tree : trees_)
            if (tree.root) destroy(tree.root, tree.height);
        while (spare_) {
            Node* next = spare_->child[0];
            std::free(spare_);
            spare_ = next;
        }
    }

    // Sets enough nodes aside for the next insertion. False: the host is out of memory, and nothing has changed.
    bool reserve() {
        while (spares_ < kSpareNodes) {
            Node* node = static_cast<Node*>(std::malloc(sizeof(Node)));
            if (!node) return false;
            recycle(node);
        }
        return true;
    }

    // Needs a reserve() before it.
    void insert(uint64_t size, uint64_t address, uint32_t handle) {
        const int bin = bin_of(size);
        Tree& tree = trees_[bin];
        const FreeChunk entry{size, address, handle};
        ++count_;
        if (!tree.root) {
            tree.root = take_spare();
            tree.root->count = 1;
            tree.root->slot[0] = entry;
            words_[bin >> 6] |= uint64_t{1} << (bin & 63);
            summary_ |= uint64_t{1} << (bin >> 6);
            return;
        }
        if (tree.height == 0 && tree.root->count < kFanOut) return insert_in_leaf(tree.root, entry);
        insert_in_tree(tree, entry);
    }

    void erase(uint64_t size, uint64_t address) {
        const int bin = bin_of(size);
        Tree& tree = trees_[bin];
        if (tree.height == 0)
            erase_from_leaf(tree.root, address);
        else
            erase_from_tree(tree, size, address);
        shrunk(bin);
    }

    // The first entry at or after (size, address), or null.
    const FreeChunk* lower_bound(uint64_t size, uint64_t address) const {
        const int bin = bin_of(size);
        const Tree& tree = trees_[bin];
        if (tree.root) {
            const FreeChunk* found = lower_bound_in(tree.root, tree.height, size, address);
            if (found) return found;
        }
        const int next = next_bin(bin + 1);
        return next < 0 ? nullptr : smallest(trees_[next].root, trees_[next].height);
    }

    // Removes the best fit: the first entry of at least this size, the lowest address among equals. False: none.
    bool pop_best_fit(uint64_t size, FreeChunk& out) {
        int bin = bin_of(size);
        if (trees_[bin].root && trees_[bin].height == 0) {
            Node* leaf = trees_[bin].root;
            uint32_t i = leaf->count;
            while (i > 0 && leaf->slot[i - 1].size < size) --i;
            if (i > 0) {
                out = leaf->slot[i - 1];
                close_gap(leaf, i - 1);
                shrunk(bin);
                return true;
            }
        } else if (trees_[bin].root) {
            const FreeChunk* found = lower_bound_in(trees_[bin].root, trees_[bin].height, size, 0);
            if (found) {
                out = *found;
                erase(out.size, out.address);
                return true;
            }
        }
        bin = next_bin(bin + 1);
        if (bin < 0) return false;
        Tree& tree = trees_[bin];
        out = *smallest(tree.root, tree.height);
        if (tree.height > 0) {
            erase(out.size, out.address);
        } else {
            --tree.root->count;
            shrunk(bin);
        }
        return true;
    }

    const FreeChunk* largest() const {
        if (!summary_) return nullptr;
        const int word = 63 - __builtin_clzll(summary_);
        const int bin = (word << 6) + 63 - __builtin_clzll(words_[word]);
        const Node* node = trees_[bin].root;
        for (int height = trees_[bin].height; height > 0; --height) node = node->child[0];
        return &node->slot[0];
    }

    size_t count() const { return count_; }

    // Every entry in rising order; false where an entry is out of order or in the wrong place. For check().
    bool list(std::vector<FreeChunk>& out) const noexcept {
        bool sound = true;
        for (int bin = 0; bin < kBins; ++bin) {
            const bool marked = (words_[bin >> 6] >> (bin & 63)) & 1;
            if (marked != (trees_[bin].root != nullptr)) return false;
            if (!marked) continue;
            const size_t first = out.size();
            append(trees_[bin].root, trees_[bin].height, out);
            for (size_t i = first; i < out.size(); ++i) {
                sound &= bin_of(out[i].size) == bin;
                sound &= i == 0 || precedes(out[i - 1], out[i].size, out[i].address);
                sound &= lower_bound(out[i].size, out[i].address)->handle == out[i].handle;
            }
        }
        return sound && out.size() == count_;
    }

private:
    // A leaf's slots are entries. An inner node's slot i is a lower bound of what child i holds (the last one's is
    // the least key there is), so a key belongs to the first child whose slot does not lie above it.
    struct Node {
        uint32_t count;
        FreeChunk slot[kFanOut];
        Node* child[kFanOut];   // in a leaf never touched; in a spare node child[0] is the next spare
    };

    struct Tree {
        Node* root = nullptr;
        int height = 0;
    };

    Tree trees_[kBins];
    uint64_t words_[kWords] = {};
    uint64_t summary_ = 0;
    size_t count_ = 0;
    Node* spare_ = nullptr;
    int spares_ = 0;

    static_assert(kWords <= 64, "one summary word must cover the bitmap");

    // A tiny floating-point number: exact below 32 granules, then five bits below the leading one.
    static int bin_of(uint64_t size) {
        const uint64_t granules = size >> kGranuleBits;
        const int shift = 63 - __builtin_clzll(granules | (uint64_t{1} << kMantissaBits)) - kMantissaBits;
        return (shift << kMantissaBits) + static_cast<int>(granules >> shift);
    }

    // A bin has lost an entry.
    void shrunk(int bin) {
        --count_;
        Tree& tree = trees_[bin];
        if (tree.root->count > 0) return;
        recycle(tree.root);
        tree.root = nullptr;
        words_[bin >> 6] &= ~(uint64_t{1} << (bin & 63));
        if (!words_[bin >> 6]) summary_ &= ~(uint64_t{1} << (bin >> 6));
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

    Node* take_spare() {
        Node* node = spare_;
        spare_ = node->child[0];
        --spares_;
        return node;
    }

    void recycle(Node* node) {
        if (spares_ == kMostSpareNodes) return std::free(node);
        node->child[0] = spare_;
        spare_ = node;
        ++spares_;
    }

    static void destroy(Node* node, int height) {
        if (height > 0)
            for (uint32_t i = 0; i < node->count; ++i) destroy(node->child[i], height - 1);
        std::free(node);
    }

    static void append(const Node* node, int height, std::vector<FreeChunk>& out) {
        for (uint32_t i = node->count; i-- > 0;) {
            if (height > 0)
                append(node->child[i], height - 1, out);
            else
                out.push_back(node->slot[i]);
        }
    }

    static const FreeChunk* smallest(const Node* node, int height) {
        for (; height > 0; --height) node = node->child[node->count - 1];
        return &node->slot[node->count - 1];
    }

    static uint32_t route(const Node* node, uint64_t size, uint64_t address) {
        uint32_t i = 0;
        while (i + 1 < node->count && follows(node->slot[i], size, address)) ++i;
        return i;
    }

    static const FreeChunk* lower_bound_in(const Node* node, int height, uint64_t size, uint64_t address) {
        if (height == 0) {
            uint32_t i = node->count;
            while (i > 0 && precedes(node->slot[i - 1], size, address)) --i;
            return i > 0 ? &node->slot[i - 1] : nullptr;
        }
        const uint32_t i = route(node, size, address);
        const FreeChunk* found = lower_bound_in(node->child[i], height - 1, size, address);
        if (found || i == 0) return found;
        return smallest(node->child[i - 1], height - 1);
    }

    static void insert_in_leaf(Node* leaf, const FreeChunk& entry) {
        uint32_t i = leaf->count++;
        for (; i > 0 && precedes(leaf->slot[i - 1], entry.size, entry.address); --i) leaf->slot[i] = leaf->slot[i - 1];
        leaf->slot[i] = entry;
    }

    static void erase_from_leaf(Node* leaf, uint64_t address) {
        uint32_t i = leaf->count - 1;
        while (leaf->slot[i].address != address) --i;
        close_gap(leaf, i);
    }

    static void close_gap(Node* leaf, uint32_t i) {
        --leaf->count;
        for (; i < leaf->count; ++i) leaf->slot[i] = leaf->slot[i + 1];
    }

    void insert_in_tree(Tree& tree, const FreeChunk& entry) {
        Node* sibling = insert_below(tree.root, tree.height, entry);
        if (!sibling) return;
        Node* root = take_spare();
        root->count = 2;
        root->slot[0] = tree.root->slot[tree.root->count - 1];
        root->child[0] = tree.root;
        root->child[1] = sibling;
        tree.root = root;
        ++tree.height;
    }

    // Returns the node that was split off below this one, or null. After a split the last slot of the upper half is
    // the bound between the two: in a leaf its smallest entry, in an inner node the bound of its last child.
    Node* insert_below(Node* node, int height, const FreeChunk& entry) {
        if (height == 0) {
            Node* sibling = node->count == kFanOut ? split(node, 0) : nullptr;
            const FreeChunk& bound = node->slot[node->count - 1];
            const bool below = sibling && precedes(entry, bound.size, bound.address);
            insert_in_leaf(below ? sibling : node, entry);
            return sibling;
        }
        const uint32_t i = route(node, entry.size, entry.address);
        Node* grown = insert_below(node->child[i], height - 1, entry);
        if (!grown) return nullptr;
        Node* sibling = node->count == kFanOut ? split(node, height) : nullptr;
        if (sibling && i >= node->count)
            insert_child(sibling, i - node->count, grown);
        else
            insert_child(node, i, grown);
        return sibling;
    }

    Node* split(Node* node, int height) {
        Node* sibling = take_spare();
        const uint32_t kept = node->count / 2, moved = node->count - kept;
        std::memcpy(sibling->slot, node->slot + kept, moved * sizeof(FreeChunk));
        if (height > 0) std::memcpy(sibling->child, node->child + kept, moved * sizeof(Node*));
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

    void erase_from_tree(Tree& tree, uint64_t size, uint64_t address) {
        erase_below(tree.root, tree.height, size, address);
        while (tree.height > 0 && tree.root->count == 1) {
            Node* child = tree.root->child[0];
            recycle(tree.root);
            tree.root = child;
            --tree.height;
        }
    }

    void erase_below(Node* node, int height, uint64_t size, uint64_t address) {
        if (height == 0) return erase_from_leaf(node, address);
        const uint32_t i = route(node, size, address);
        erase_below(node->child[i], height - 1, size, address);
        if (node->child[i]->count >= kFanOut / 4) return;
        if (i > 0) try_to_merge(node, i - 1, height - 1);
        if (i + 1 < node->count) try_to_merge(node, i, height - 1);
    }

    // Joins child i with the one after it where both together half fill a node; so no node but a root stays empty.
    void try_to_merge(Node* parent, uint32_t i, int child_height) {
        Node* upper = parent->child[i];
        Node* lower = parent->child[i + 1];
        if (upper->count && lower->count && upper->count + lower->count > kFanOut / 2) return;
        if (child_height > 0) {
            if (upper->count) upper->slot[upper->count - 1] = parent->slot[i];
            std::memcpy(upper->child + upper->count, lower->child, lower->count * sizeof(Node*));
        }
        std::memcpy(upper->slot + upper->count, lower->slot, lower->count * sizeof(FreeChunk));
        upper->count += lower->count;
        recycle(lower);
        const uint32_t after = parent->count - i - 2;
        parent->slot[i] = parent->slot[i + 1];
        std::memmove(parent->slot + i + 1, parent->slot + i + 2, after * sizeof(FreeChunk));
        std::memmove(parent->child + i + 1, parent->child + i + 2, after * sizeof(Node*));
        --parent->count;
    }
};

}  // namespace bfc
