// Operations on standard containers that return false if the host is out of memory: the engine runs without the GIL,
// where a C++ exception cannot become a Python one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <vector>

namespace bfc {

template <class T>
bool try_push_back(std::vector<T>& items, const typename std::vector<T>::value_type& item) noexcept {
    try {
        items.push_back(item);
        return true;
    } catch (...) {
        return false;
    }
}

template <class T>
bool try_reserve(std::vector<T>& items, size_t count) noexcept {
    try {
        items.reserve(count);
        return true;
    } catch (...) {
        return false;
    }
}

template <class T>
bool try_assign(std::vector<T>& items, const std::vector<T>& others) noexcept {
    try {
        items = others;
        return true;
    } catch (...) {
        return false;
    }
}

template <class Key, class T>
bool try_store(std::map<Key, T>& items, const Key& key, const T& item) noexcept {
    try {
        items[key] = item;
        return true;
    } catch (...) {
        return false;
    }
}

// Makes room for `count` items in all. Grows geometrically, as push_back does, so that calls for one more are cheap.
template <class T>
bool try_make_room(std::vector<T>& items, size_t count) noexcept {
    return count <= items.capacity() || try_reserve(items, std::max(count, 2 * items.capacity()));
}

}  // namespace bfc
