// Plays calls of the table of bfc_allocator.h: in this thread, or in one that Python has never seen while the caller
// may hold the GIL.
#include <bfc_allocator.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

enum What : int64_t { kAllocate, kFree, kRecord };

struct Step {
    int64_t what, slot;
    uint64_t nbytes;
    int64_t stream;
};

// 0, or how the step failed.
int play(const bfc_allocator& table, const Step& step, void** slots) {
    char why[256];
    void*& ptr = slots[step.slot];
    if (step.what == kAllocate) return table.allocate(table.self, 0, step.nbytes, step.stream, &ptr, why, sizeof why);
    if (step.what == kRecord) return table.record_stream(table.self, ptr, step.stream, why, sizeof why);
    return table.free(table.self, ptr);
}

struct Shared {
    std::mutex lock;
    std::condition_variable changed;
    int64_t done = 0;
    bool has_ended = false;
};

}  // namespace

extern "C" {

// How many steps were made before one failed.
int64_t player_play(const bfc_allocator* table, const Step* steps, int64_t count, void** slots) {
    for (int64_t i = 0; i < count; ++i)
        if (play(*table, steps[i], slots) != BFC_OK) return i;
    return count;
}

// The same in another thread. A caller that holds the GIL gets back how many steps need none: the thread is left alone
// if it has not ended within `seconds`. What is passed must then live on.
int64_t player_play_elsewhere(const bfc_allocator* table, const Step* steps, int64_t count, void** slots,
                              double seconds) {
    const auto shared = std::make_shared<Shared>();
    std::thread([=] {
        for (int64_t i = 0; i < count && play(*table, steps[i], slots) == BFC_OK; ++i) {
            const std::lock_guard<std::mutex> held(shared->lock);
            ++shared->done;
        }
        const std::lock_guard<std::mutex> held(shared->lock);
        shared->has_ended = true;
        shared->changed.notify_all();
    }).detach();
    std::unique_lock<std::mutex> held(shared->lock);
    shared->changed.wait_for(held, std::chrono::duration<double>(seconds), [&] { return shared->has_ended; });
    return shared->done;
}

// Threads that allocate, let streams use what they have, and free, at random. How many steps failed, but for those that
// were out of memory.
int64_t player_hammer(const bfc_allocator* table, int threads, int64_t steps, uint64_t seed, const int64_t* streams,
                      int64_t stream_count) {
    std::vector<std::thread> workers;
    std::vector<int64_t> failed(threads);
    for (int thread = 0; thread < threads; ++thread)
        workers.emplace_back([=, &failed] {
            std::mt19937_64 random(seed + thread);
            std::vector<void*> live;
            const auto stream = [&] { return streams[random() % stream_count]; };
            for (int64_t i = 0; i < steps; ++i) {
                const auto draw = random() % 8;
                void* ptr = nullptr;
                if (live.empty() || (draw < 4 && live.size() < 12)) {
                    const int result = play(*table, {kAllocate, 0, 1 + random() % (3 << 20), stream()}, &ptr);
                    if (result == BFC_OK) live.push_back(ptr);
                    failed[thread] += result != BFC_OK && result != BFC_OUT_OF_MEMORY;
                    continue;
                }
                const size_t at = random() % live.size();
                if (draw == 4 || draw == 5) {
                    failed[thread] += play(*table, {kRecord, static_cast<int64_t>(at), 0, stream()}, live.data()) != BFC_OK;
                    continue;
                }
                failed[thread] += play(*table, {kFree, static_cast<int64_t>(at), 0, 0}, live.data()) != BFC_OK;
                live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
            }
            for (void* ptr : live) failed[thread] += table->free(table->self, ptr) != BFC_OK;
        });
    for (auto& worker : workers) worker.join();
    int64_t all = 0;
    for (const int64_t some : failed) all += some;
    return all;
}

}  // extern "C"
