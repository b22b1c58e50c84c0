// A source of mapped memory in C, for tests: addresses and pages are numbers, and any call can be made to fail. It counts
// what it has given, and the calls that came with the GIL held, of which there must be none.
#include <Python.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "bfc_mapping.h"

namespace {
struct Order { std::string call; int at; int code; };

std::mutex lock;
std::map<std::string, int> calls;
std::string log_;
std::map<uint64_t, uint64_t> reservations, mappings;    // bytes, and the page, by address
std::map<uint64_t, uint64_t> pages;                     // bytes by number
Order order, second;
uint64_t next_address, next_page, room;
int with_gil, wrong;
std::atomic<int> waits{0}, has_come{0};

// Counts a call. Returns what it is to fail with, or 0.
int begin(const char* name) {
    if (waits.load() && std::strcmp(name, "map") == 0) {
        has_come.store(1);
        while (waits.load()) {}     // until a thread of Python lets it on: it needs the GIL for that
    }
    std::lock_guard<std::mutex> held(lock);
    with_gil += PyGILState_Check();
    log_ += std::string(name) + " ";
    const int number = ++calls[name];
    for (Order* each : {&order, &second})
        if (each->call == name && each->at == number) return each->code;
    return 0;
}
bool is_free(uint64_t address, uint64_t nbytes) {
    const auto next = mappings.lower_bound(address);
    return next == mappings.end() || next->first >= address + nbytes;
}

int reserve(void*, uint64_t nbytes, uint64_t* address, bfc_mapping_fault*) {
    const int code = begin("reserve");
    if (code) return code;
    std::lock_guard<std::mutex> held(lock);
    *address = next_address;
    next_address += nbytes + (2 << 20);
    reservations[*address] = nbytes;
    return 0;
}
int unreserve(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) {
    const int code = begin("unreserve");
    if (code) return code;
    std::lock_guard<std::mutex> held(lock);
    wrong += reservations[address] != nbytes || !is_free(address, nbytes);
    reservations.erase(address);
    return 0;
}
int create(void*, uint64_t nbytes, uint64_t* page, bfc_mapping_fault*) {
    const int code = begin("create");
    if (code) return code;
    std::lock_guard<std::mutex> held(lock);
    if (room < nbytes) return BFC_NO_ROOM;
    room -= nbytes;
    pages[*page = ++next_page] = nbytes;
    return 0;
}
int release(void*, uint64_t page, bfc_mapping_fault*) {
    const int code = begin("release");
    if (code) return code;
    std::lock_guard<std::mutex> held(lock);
    wrong += pages.count(page) == 0;
    for (const auto& each : mappings) wrong += each.second == page;     // an allocator unmaps it before
    room += pages[page];
    pages.erase(page);
    return 0;
}
int unmap(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) {
    const int code = begin("unmap");
    if (code) return code;
    std::lock_guard<std::mutex> held(lock);
    uint64_t at = address;
    while (at < address + nbytes && mappings.count(at)) {
        const uint64_t page = mappings[at];
        mappings.erase(at);
        at += pages[page];
    }
    wrong += at != address + nbytes;    // not whole pages that lie end to end
    return 0;
}
int map(void* self, uint64_t address, const uint64_t* numbers, size_t count, bfc_mapping_fault* fault) {
    const int code = begin("map");
    if (code > 0) return code;
    const size_t done = code < 0 ? count / 2 : count;   // below 0: it fails half-way
    uint64_t to = address;
    {
        std::lock_guard<std::mutex> held(lock);
        for (size_t i = 0; i < done; ++i) {
            wrong += pages.count(numbers[i]) == 0 || !is_free(to, pages[numbers[i]]);
            mappings[to] = numbers[i];
            to += pages[numbers[i]];
        }
    }
    if (code == 0) return 0;
    if (done > 0 && unmap(self, address, to - address, fault) != 0) {
        fault->address = address;
        fault->lost = to - address;
    }
    return EIO;
}
int set_access(void*, uint64_t address, uint64_t, bfc_mapping_fault*) {
    const int code = begin("set_access");
    std::lock_guard<std::mutex> held(lock);
    wrong += mappings.count(address) == 0;
    return code;
}
bfc_native_mapping table = {nullptr, reserve, unreserve, create, release, map, set_access, unmap, nullptr};
}  // namespace

extern "C" {
#define SHOWN __attribute__((visibility("default")))
SHOWN void* open_source(uint64_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    calls.clear();
    reservations.clear();
    mappings.clear();
    pages.clear();
    log_.clear();
    order = second = Order{};
    next_address = uint64_t(1) << 40;
    next_page = with_gil = wrong = 0;
    room = bytes;
    return &table;
}
SHOWN void fail(const char* call, int at, int code) { (order.call.empty() ? order : second) = {call, at, code}; }
SHOWN int count(const char* call) { return calls[call]; }
SHOWN const char* log_of_calls() { return log_.c_str(); }
SHOWN int calls_with_gil() { return with_gil; }
SHOWN int mistakes() { return wrong; }
SHOWN int left() { return static_cast<int>(reservations.size() + mappings.size() + pages.size()); }
SHOWN void hold_maps(int whether) { waits.store(whether); }
SHOWN int is_in_map() { return has_come.exchange(0); }
}
