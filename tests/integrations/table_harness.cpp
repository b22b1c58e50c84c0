// Calls the table of bfc_allocator.h as a back end does: from threads that Python has never seen.
#include <Python.h>
#include <bfc_allocator.h>

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace {

struct Block {
    uint64_t* ptr;
    uint64_t mark;
};

std::atomic<int64_t> rounds_done{0};

// As a destructor of a tensor does: nothing may unwind the stack through it.
void give_back(const bfc_allocator& table, void* ptr) noexcept { table.free(table.self, ptr); }

// Takes and gives back at random, with at most eight blocks live, and marks each with a number of its own. How many
// marks were gone when their block went back. The memory must be the host's.
int64_t work(const bfc_allocator& table, int64_t rounds, uint64_t seed, size_t most) {
    std::mt19937_64 random(seed);
    std::vector<Block> live;
    char why[256];
    int64_t overwritten = 0;
    const auto drop = [&](size_t i) {
        overwritten += *live[i].ptr != live[i].mark;
        give_back(table, live[i].ptr);
        live[i] = live.back();
        live.pop_back();
    };
    for (int64_t round = 0; round < rounds; ++round) {
        ++rounds_done;
        if (live.size() == 8 || (!live.empty() && random() % 2)) {
            drop(random() % live.size());
            continue;
        }
        void* ptr = nullptr;
        const int device = static_cast<int>(seed % 2);
        if (table.allocate(table.self, device, 8 + random() % most, 0, &ptr, why, sizeof why) != BFC_OK) continue;
        live.push_back({static_cast<uint64_t*>(ptr), random()});
        *live.back().ptr = live.back().mark;
    }
    while (!live.empty()) drop(0);
    return overwritten;
}

}  // namespace

extern "C" {

int64_t harness_hammer(const bfc_allocator* table, int threads, int64_t rounds, uint64_t seed, size_t most) {
    std::atomic<int64_t> overwritten{0};
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i)
        workers.emplace_back([=, &overwritten] { overwritten += work(*table, rounds, seed + i, most); });
    for (auto& worker : workers) worker.join();
    return overwritten;
}

// Pairs of an allocation and its free in a thread of C, which is waited for. How many failed. The caller may hold the
// GIL: then the thread never gets it.
int64_t harness_pairs_elsewhere(const bfc_allocator* table, int64_t pairs, size_t nbytes, int64_t stream) {
    int64_t failed = 0;
    std::thread([&] {
        char why[256];
        for (int64_t pair = 0; pair < pairs; ++pair) {
            void* ptr = nullptr;
            failed += table->allocate(table->self, 0, nbytes, stream, &ptr, why, sizeof why) != BFC_OK;
            failed += table->free(table->self, ptr) != BFC_OK;
        }
    }).join();
    return failed;
}

// Threads that go on for as long as the process lives.
void harness_never_ends(const bfc_allocator* table, int threads, size_t most) {
    for (int i = 0; i < threads; ++i)
        std::thread([=] { work(*table, INT64_MAX, i, most); }).detach();
}

// With the GIL, as a tensor goes while an exception unwinds the frame that held it. Whether the exception is the same.
int harness_free_while_raising(const bfc_allocator* table, void* ptr) {
    PyErr_SetString(PyExc_LookupError, "raised before");
    give_back(*table, ptr);
    const int kept = PyErr_ExceptionMatches(PyExc_LookupError);
    PyErr_Clear();
    return kept;
}

// Calls during which the host has no memory for one allocation of Python's: which one stands in `arguments`. With the
// GIL. None of this may need memory of Python's itself.
bfc_result harness_allocate_without_memory(const bfc_allocator* table, PyObject* set, PyObject* arguments, PyObject* remove,
                                           size_t nbytes, int64_t stream, void** ptr, char* why, size_t room) {
    Py_XDECREF(PyObject_CallObject(set, arguments));
    const bfc_result result = table->allocate(table->self, 0, nbytes, stream, ptr, why, room);
    Py_XDECREF(PyObject_CallNoArgs(remove));
    return result;
}

bfc_result harness_free_without_memory(const bfc_allocator* table, PyObject* set, PyObject* arguments, PyObject* remove,
                                       void* ptr) {
    Py_XDECREF(PyObject_CallObject(set, arguments));
    const bfc_result result = table->free(table->self, ptr);
    Py_XDECREF(PyObject_CallNoArgs(remove));
    return result;
}

int64_t harness_rounds() { return rounds_done; }
}
