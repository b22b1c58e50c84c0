// A lock for sections of well under a microsecond, taken with one atomic exchange. Who waits lets go of the GIL first
// (the caller sees to that) and yields the processor. A replay holds it for many events, and gives way between batches.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace bfc {

class Lock {
public:
    bool try_acquire() noexcept {
        if (held_.exchange(true, std::memory_order_acquire)) return false;
        ++acquisitions_;
        return true;
    }
    void wait_and_acquire() noexcept {
        if (try_acquire()) return;
        waiters_.fetch_add(1);
        for (int tries = 0; !try_acquire(); ++tries) {
            if (tries < 64)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        waiters_.fetch_sub(1);
    }
    void release() noexcept { held_.store(false, std::memory_order_release); }

    bool is_wanted() const noexcept { return waiters_.load() > 0; }

    // Lets others have it, if there are any, and takes it again. Never with the GIL: see _wait.hpp.
    void give_way() noexcept {
        const int waiting = waiters_.load();
        if (waiting == 0) return;
        release();
        for (int tries = 0; tries < 200 && waiters_.load() >= waiting; ++tries)
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        wait_and_acquire();
    }

    // In a forked child: who held it, or waited for it, does not exist there.
    void reset() noexcept {
        waiters_.store(0);
        release();
    }

    // How often it was taken, for whoever holds it: tests count it.
    uint64_t acquisitions() const noexcept { return acquisitions_; }

private:
    std::atomic<bool> held_{false};
    std::atomic<int> waiters_{0};
    uint64_t acquisitions_{0};
};

}  // namespace bfc
