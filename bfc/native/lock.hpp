// A lock for sections of well under a microsecond, taken with one atomic exchange. A thread that waits yields the
// processor, and has released the GIL (its caller does that). A replay holds the lock for many events, and gives way in
// between.
//
// The holder never waits for the GIL, nor for another lock. So a fork, which holds the GIL and takes every lock, gets
// them all; and a thread that the interpreter stops for good at its shutdown holds none.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace bfc {

class Lock {
public:
    Lock() { Forks::all().add(this); }
    ~Lock() { Forks::all().remove(this); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    bool try_acquire() noexcept {
        if (held_.exchange(true, std::memory_order_acquire)) return false;
        ++acquisitions_;
        return true;
    }
    void wait_and_acquire() noexcept {
        if (try_acquire()) return;
        start_waiting();
        let_turns_be_long();
        for (int tries = 0; !try_acquire(); ++tries) pause(tries);
        stop_waiting();
    }
    void wait_until_free() const noexcept {
        for (int tries = 0; held_.load(std::memory_order_relaxed); ++tries) pause(tries);
    }
    void release() noexcept { held_.store(false, std::memory_order_release); }

    // Threads that wait announce it with these, so that the holder can give way to them.
    void start_waiting() noexcept { waiters_.fetch_add(1); }
    void stop_waiting() noexcept { waiters_.fetch_sub(1); }
    bool is_wanted() const noexcept { return waiters_.load() > 0; }

    // For a thread that waits, before it tries again.
    void let_turns_be_long() noexcept {
        if (is_crowded()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

    // Releases the lock if others wait for it, and takes it again. Never with the GIL held: see gil_wait.hpp.
    void give_way() noexcept {
        if (!is_wanted()) return;
        release();
        wait_for_others();
        wait_and_acquire();
    }
    void wait_for_others() const noexcept {
        const int waiting = waiters_.load();
        for (int tries = 0; tries < 200 && waiting > 0 && waiters_.load() >= waiting; ++tries)
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

    // In a forked child, where only the thread that forked exists, `forget(whose)` is called before anything else runs.
    void on_fork(void (*forget)(void*), void* whose) noexcept {
        forget_ = forget;
        whose_ = whose;
    }

    // How often the lock was taken. To be called with the lock held; for tests.
    uint64_t acquisitions() const noexcept { return acquisitions_; }

private:
    // All locks. A fork takes this list first and then each lock, so two threads that fork cannot deadlock. The hooks
    // are the C library's: it calls them after Python's own before-fork hooks, so none of those runs in between.
    class Forks {
    public:
        static Forks& all() {
            static Forks* forks = new Forks;    // never destroyed: threads may outlive the process's statics
            return *forks;
        }
        void add(Lock* lock) {
            std::lock_guard<std::mutex> guard(mutex_);
            lock->next_ = first_;
            if (first_ != nullptr) first_->previous_ = lock;
            first_ = lock;
        }
        void remove(Lock* lock) {
            std::lock_guard<std::mutex> guard(mutex_);
            (lock->previous_ != nullptr ? lock->previous_->next_ : first_) = lock->next_;
            if (lock->next_ != nullptr) lock->next_->previous_ = lock->previous_;
        }

    private:
        Forks() { pthread_atfork(take_all, release_all, reset_all); }

        static void take_all() {
            all().mutex_.lock();
            for (Lock* lock = all().first_; lock != nullptr; lock = lock->next_) lock->wait_and_acquire();
        }
        static void release_all() {
            for (Lock* lock = all().first_; lock != nullptr; lock = lock->next_) lock->release();
            all().mutex_.unlock();
        }
        static void reset_all() {
            for (Lock* lock = all().first_; lock != nullptr; lock = lock->next_) {
                lock->waiters_.store(0);
                if (lock->forget_ != nullptr) lock->forget_(lock->whose_);
            }
            release_all();
        }

        std::mutex mutex_;
        Lock* first_ = nullptr;
    };

    // Whether a thread waited a moment ago, too: then threads take turns at the lock without a break. Each turn moves
    // all that it protects to another processor, which takes longer than an allocation. So turns are to be long.
    bool is_crowded() noexcept {
        const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
        return now - last_wait_.exchange(now, std::memory_order_relaxed) < 200'000;
    }

    static void pause(int tries) noexcept {
        if (tries < 64)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

    std::atomic<bool> held_{false};
    std::atomic<int> waiters_{0};
    std::atomic<int64_t> last_wait_{0};     // nanoseconds of the steady clock
    uint64_t acquisitions_{0};
    void (*forget_)(void*) = nullptr;
    void* whose_ = nullptr;
    Lock* previous_ = nullptr;
    Lock* next_ = nullptr;
};

// A number that is changed with a lock held, and can be read without it.
template <class T>
class Shown {
public:
    T get() const noexcept { return value_.load(std::memory_order_relaxed); }
    void set(T value) noexcept { value_.store(value, std::memory_order_relaxed); }
    void add(T more) noexcept { set(get() + more); }

private:
    std::atomic<T> value_{};
};

}  // namespace bfc
