// A program in C++ whose threads allocate from bfc, out of memory that the program itself has. It starts Python once,
// and calls C functions afterwards.
//
//   $ INCLUDE=$(python -c "import bfc; print(bfc.get_include())")
//   $ c++ -std=c++17 -pthread engine.cpp -o engine -I$INCLUDE $(python3-config --includes --embed --ldflags)
//   $ PYTHONPATH=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))") ./engine
//   4 threads, 40000 allocations, 0 failed
//   in use: 0 bytes of 2 MiB
//   no room for 1 GiB
//   still taken: 0 bytes
#include <bfc_embed.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

// What the engine has: 64 MiB of the host's memory. A driver's calls would stand here.
struct Memory {
    static constexpr size_t kTotal = size_t{64} << 20;
    std::atomic<size_t> taken{0};

    static void* alloc(void* self, size_t alignment, size_t nbytes) {
        auto& memory = *static_cast<Memory*>(self);
        if (memory.taken + nbytes > kTotal) return nullptr;
        void* block = std::aligned_alloc(alignment, nbytes);
        if (block) memory.taken += nbytes;
        return block;
    }
    static void free(void* self, void* block, size_t nbytes) {
        static_cast<Memory*>(self)->taken -= nbytes;
        std::free(block);
    }
};

int work(const bfc_allocator* table) {
    int failed = 0;
    char why[256];
    for (int round = 0; round < 10000; ++round) {
        void* ptr = nullptr;
        const size_t nbytes = 1000 + 100 * (round % 50);
        if (table->allocate(table->self, 0, nbytes, 0, &ptr, why, sizeof why) != BFC_OK) {
            ++failed;
            continue;
        }
        std::memset(ptr, round, nbytes);
        table->free(table->self, ptr);
    }
    return failed;
}

int main() try {
    Memory memory;
    const bfc::Source source{&memory, Memory::kTotal, Memory::alloc, Memory::free};
    const bfc_allocator* table = bfc::open("bfc.CachingAllocator(source)", &source);

    // Threads that find no memory at the same moment take a segment each. So it is taken before they begin.
    char why[4096];
    void* ptr = nullptr;
    if (table->allocate(table->self, 0, 1000, 0, &ptr, why, sizeof why) == BFC_OK) table->free(table->self, ptr);

    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { failed += work(table); });
    for (auto& thread : threads) thread.join();
    std::printf("4 threads, 40000 allocations, %d failed\n", failed.load());

    bfc_device_stats stats;
    table->stats(table->self, 0, &stats, why, sizeof why);
    std::printf("in use: %lld bytes of %lld MiB\n", static_cast<long long>(stats.allocated_bytes[0].current),
                static_cast<long long>(stats.reserved_bytes[0].current >> 20));

    if (table->allocate(table->self, 0, size_t{1} << 30, 0, &ptr, why, sizeof why) == BFC_OUT_OF_MEMORY)
        std::printf("no room for 1 GiB\n");  // `why` says why, in some lines

    table->release(table->self);  // closes the allocator: every block comes back
    std::printf("still taken: %zu bytes\n", memory.taken.load());
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
