// Threads that allocate through the table of bfc_allocator.h, and never take the GIL. `bench/threads.py` compiles this.
#include <bfc_allocator.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int kHeld = 16;   // blocks that a thread holds: each step frees the oldest, and allocates one

// Nanoseconds of a pair; -1: a request failed.
double play(const bfc_allocator& table, int device, int64_t pairs, size_t nbytes, const std::atomic<bool>& go) {
    void* held[kHeld] = {};
    char why[256];
    bool failed = false;
    const auto step = [&](int64_t i) {
        void*& slot = held[i % kHeld];
        table.free(table.self, slot);
        if (table.allocate(table.self, device, nbytes, 0, &slot, why, sizeof why) != BFC_OK) failed = true;
    };
    for (int64_t i = 0; i < 1000; ++i) step(i);
    while (!go) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < pairs; ++i) step(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    for (void* ptr : held) table.free(table.self, ptr);
    return failed ? -1 : took.count() / static_cast<double>(pairs);
}

}  // namespace

extern "C" {

// Runs a thread for each device that is named, all at once, and writes the nanoseconds of a pair of each.
void bench_threads(const bfc_allocator* table, const int* devices, int threads, int64_t pairs, size_t nbytes,
                   double* ns) {
    std::atomic<bool> go{false};
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i)
        workers.emplace_back([=, &go] { ns[i] = play(*table, devices[i], pairs, nbytes, go); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    go = true;
    for (auto& worker : workers) worker.join();
}
}
