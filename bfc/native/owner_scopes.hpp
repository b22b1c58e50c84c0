// The open scopes of owners and tags, by the Python context in which they were entered. Threads without the GIL need
// this, since they cannot ask Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "lock.hpp"
#include "nothrow.hpp"

namespace bfc {

struct OpenScope {
    const void* context;
    const void* scope;
    const void* only;   // the allocator that it applies to; null: all of them
    uint64_t tag;       // of that allocator; kNoScope: it says nothing about tags
    uint32_t owner;
};

class OpenScopes {
public:
    static constexpr uint64_t kNoScope = ~uint64_t{0};

    // False: the host has no memory for it.
    bool add(const OpenScope& scope) noexcept {
        lock_.wait_and_acquire();
        const bool added = try_push_back(items_, scope);
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

    // The owner of what an allocator allocates in a context: that of the innermost scope that was entered there; 0: none.
    uint32_t owner_in(const void* context, const void* allocator) noexcept {
        return find(context, allocator, [](const OpenScope&) { return true; }).owner;
    }
    // The same for its tag; kNoScope: no scope of a tag of the allocator was entered there.
    uint64_t tag_in(const void* context, const void* allocator) noexcept {
        return find(context, allocator, [](const OpenScope& it) { return it.tag != kNoScope; }).tag;
    }

private:
    template <class Counts>
    OpenScope find(const void* context, const void* allocator, Counts counts) noexcept {
        OpenScope found{nullptr, nullptr, nullptr, kNoScope, 0};
        if (count_.load(std::memory_order_relaxed) == 0) return found;
        lock_.wait_and_acquire();
        for (size_t i = items_.size(); i-- > 0;) {
            const OpenScope& it = items_[i];
            if (it.context != context || (it.only != nullptr && it.only != allocator) || !counts(it)) continue;
            found = it;
            break;
        }
        lock_.release();
        return found;
    }

    Lock lock_;
    std::atomic<size_t> count_{0};
    std::vector<OpenScope> items_;   // a program has few
};

}  // namespace bfc
