// The open scopes of owners, by the Python context in which they were entered. Threads without the GIL need this,
// since they cannot ask Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "lock.hpp"
#include "nothrow.hpp"

namespace bfc {

class OpenScopes {
public:
    // False: the host has no memory for it.
    bool add(const void* context, const void* scope, uint32_t owner) noexcept {
        lock_.wait_and_acquire();
        const bool added = try_push_back(items_, Item{context, scope, owner});
        count_.store(items_.size(), std::memory_order_relaxed);
        lock_.release();
        return added;
    }

    void remove(const void* scope) noexcept {
        lock_.wait_and_acquire();
        for (size_t i = items_.size(); i-- > 0;) {
            if (items_[i].scope != scope) continue;
            items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(i));
            break;
        }
        count_.store(items_.size(), std::memory_order_relaxed);
        lock_.release();
    }

    // The owner of the innermost open scope in a context; 0: none.
    uint32_t owner_in(const void* context) noexcept {
        uint32_t owner = 0;
        if (count_.load(std::memory_order_relaxed) == 0) return 0;
        lock_.wait_and_acquire();
        for (size_t i = items_.size(); i-- > 0 && owner == 0;)
            if (items_[i].context == context) owner = items_[i].owner;
        lock_.release();
        return owner;
    }

private:
    struct Item {
        const void* context;
        const void* scope;
        uint32_t owner;
    };

    Lock lock_;
    std::atomic<size_t> count_{0};
    std::vector<Item> items_;   // a program has few
};

}  // namespace bfc
