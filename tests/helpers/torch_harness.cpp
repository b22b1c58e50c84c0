// Calls the functions that PyTorch calls, as PyTorch does: from C++, with a mutex of its own held, the GIL held or not.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

typedef void* (*alloc_t)(size_t, int, void*);
typedef void (*free_t)(void*, size_t, int, void*);

struct CUstream_st;
using pool_id = std::pair<unsigned long long, unsigned long long>;
using filter = std::function<bool(CUstream_st*)>;

static std::mutex mutex;  // as that of PyTorch's caching allocator

namespace {
struct Block {
    uint64_t* ptr;
    uint64_t mark;
};

// One thread's part: takes and gives back at random, with at most eight blocks live, and marks each with a number of
// its own. How many of its marks were gone when it gave the block back.
int work(alloc_t alloc, free_t free, void* stream, int rounds, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Block> live;
    int overwritten = 0;
    auto give_back = [&](size_t i) {
        overwritten += *live[i].ptr != live[i].mark;
        free(live[i].ptr, 0, 0, stream);
        live[i] = live.back();
        live.pop_back();
    };
    for (int round = 0; round < rounds; ++round) {
        if (live.size() == 8 || (!live.empty() && random() % 2)) {
            give_back(random() % live.size());
            continue;
        }
        try {
            const size_t size = 8 + random() % (1u << (3 + random() % 18));
            Block block{static_cast<uint64_t*>(alloc(size, 0, stream)), random()};
            *block.ptr = block.mark;
            live.push_back(block);
        } catch (const std::bad_alloc&) {  // the others have it all
        }
    }
    while (!live.empty()) give_back(0);
    return overwritten;
}

// The number of the capture that a stream is part of, or 0.
unsigned long long capture_of(CUstream_st* stream) {
    using info = int (*)(CUstream_st*, int*, unsigned long long*, void*, void*, void*);
    static const auto ask =
        reinterpret_cast<info>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamGetCaptureInfo_v2"));
    int status = 0;
    unsigned long long id = 0;
    ask(stream, &status, &id, nullptr, nullptr, nullptr);
    return status == 1 ? id : 0;
}

int told(char* text, size_t room, const std::function<void()>& action) {
    try {
        action();
        return 0;
    } catch (const std::exception& error) {
        std::strncpy(text, error.what(), room - 1);
        return 1;
    }
}
}  // namespace

extern "C" {

// 0, or what() of the exception that was thrown.
int harness_alloc(void* function, size_t size, int device, void* stream, void** ptr, char* text, size_t room) {
    try {
        std::lock_guard<std::mutex> held(mutex);
        *ptr = reinterpret_cast<alloc_t>(function)(size, device, stream);
        return 0;
    } catch (const std::bad_alloc& error) {
        std::strncpy(text, error.what(), room - 1);
        return 1;
    }
}

void harness_free(void* function, void* ptr, size_t size, int device, void* stream) {
    std::lock_guard<std::mutex> held(mutex);
    reinterpret_cast<free_t>(function)(ptr, size, device, stream);
}

// Many threads at once, with no lock between them. How many marks were overwritten.
int harness_hammer(void* alloc, void* free, void** streams, int threads, int rounds, uint64_t seed) {
    std::atomic<int> overwritten{0};
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i)
        workers.emplace_back([=, &overwritten] {
            overwritten += work(reinterpret_cast<alloc_t>(alloc), reinterpret_cast<free_t>(free), streams[i], rounds, seed + i);
        });
    for (auto& worker : workers) worker.join();
    return overwritten;
}

// What torch.cuda.CUDAGraph calls. Each returns 0, or writes what() of the exception.
int harness_begin_pool(void* function, int device, unsigned long long first, unsigned long long second,
                       CUstream_st* captured, char* text, size_t room) {
    return told(text, room, [&] {
        reinterpret_cast<void (*)(int, pool_id, filter)>(function)(device, {first, second}, [captured](CUstream_st* one) {
            const unsigned long long mine = capture_of(captured);
            return mine && capture_of(one) == mine;
        });
    });
}

int harness_end_pool(void* function, int device, unsigned long long first, unsigned long long second, char* text,
                     size_t room) {
    return told(text, room, [&] { reinterpret_cast<void (*)(int, pool_id)>(function)(device, {first, second}); });
}

int harness_release_pool(void* function, int device, unsigned long long first, unsigned long long second, char* text,
                         size_t room) {
    return harness_end_pool(function, device, first, second, text, room);
}

int harness_empty_cache(void* function, char* text, size_t room) {
    return told(text, room, [&] { reinterpret_cast<void (*)()>(function)(); });
}

void harness_lock() { mutex.lock(); }
void harness_unlock() { mutex.unlock(); }

}
