// Ids of private pools, in maps and lists; and numbers for threads, which scopes of such pools belong to.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bfc {

// A number that no other thread has or will have. (The system's thread ids are reused.)
inline uint64_t thread_number() noexcept {
    static std::atomic<uint64_t> last{0};
    static thread_local const uint64_t mine = ++last;
    return mine;
}

// Ids of private pools: a struct of two numbers, `first` and `second`.
template <class Id>
inline bool is_same_pool(const Id& one, const Id& other) noexcept {
    return one.first == other.first && one.second == other.second;
}

template <class Id>
inline bool precedes(const Id& one, const Id& other) noexcept {
    return one.first < other.first || (one.first == other.first && one.second < other.second);
}

struct ByPool {
    template <class Id>
    bool operator()(const Id& one, const Id& other) const noexcept {
        return precedes(one, other);
    }
};

// Adds what is of a pool to a map of them. False: the host has no memory for it.
template <class Pools, class Id, class T>
inline bool try_add(Pools& pools, const Id& id, const T& added) noexcept {
    try {
        pools.emplace(id, added);
        return true;
    } catch (...) {
        return false;
    }
}

template <class Lane, class Id>
inline void put_in_pool(Lane* lane, const Id& id) noexcept {
    lane->pool[0] = id.first;
    lane->pool[1] = id.second;
}

// Whether it is on a list in order.
template <class Id, class Ids>
inline bool is_among(const Id& id, const Ids& ids) noexcept {
    return std::binary_search(ids.begin(), ids.end(), id, precedes<Id>);
}

// Inserts an id at its sorted place, or removes it. False: the host has no memory for it, and nothing has changed.
template <class Id, class Ids>
inline bool set_among(Ids& ids, const Id& id, bool wanted) noexcept {
    const auto place = std::lower_bound(ids.begin(), ids.end(), id, precedes<Id>);
    const bool found = place != ids.end() && is_same_pool(*place, id);
    if (found == wanted) return true;
    try {
        if (wanted) ids.insert(place, id);
        else ids.erase(place);
    } catch (...) {
        return false;
    }
    return true;
}

}  // namespace bfc
