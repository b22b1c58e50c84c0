// A lock for sections of well under a microsecond, taken with one atomic exchange. Who waits lets go of the GIL first
// (the caller sees to that) and yields the processor: a replay may hold it for long.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace bfc {

class Lock {
public:
    bool try_acquire() noexcept {
        return !held_.exchange(true, std::memory_order_acquire);
    }
    void wait_and_acquire() noexcept {
        for (int tries = 0; !try_acquire(); ++tries) {
            if (tries < 64)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    void release() noexcept { held_.store(false, std::memory_order_release); }

private:
    std::atomic<bool> held_{false};
};

}  // namespace bfc
