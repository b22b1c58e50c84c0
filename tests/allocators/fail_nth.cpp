// Preloaded: makes the n-th allocation that a module of bfc asks of C or of C++ fail. Python's own, and those of other
// libraries, are none of ours: the caller's address tells.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> left{0};      // until the one that fails; 0: none does
std::atomic<long> at_once{1};   // how many fail then
std::atomic<long> failed{0};

struct Found {
    ElfW(Addr) address;
    bool ours;
};

int look(dl_phdr_info* info, size_t, void* data) {
    auto* found = static_cast<Found*>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& header = info->dlpi_phdr[i];
        const ElfW(Addr) start = info->dlpi_addr + header.p_vaddr;
        if (header.p_type != PT_LOAD || found->address < start || found->address >= start + header.p_memsz) continue;
        found->ours = std::strstr(info->dlpi_name, "/bfc/") != nullptr;
        return 1;
    }
    return 0;
}

bool fails(void* caller) {
    if (left.load() == 0) return false;
    Found found{reinterpret_cast<ElfW(Addr)>(caller), false};
    dl_iterate_phdr(look, &found);
    if (!found.ours) return false;
    const long now = left.load();
    if (now > 1) {
        left.store(now - 1);
        return false;
    }
    failed.fetch_add(1);
    if (at_once.fetch_sub(1) <= 1) left.store(0);
    return true;
}

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" void bfc_fail_at(long n, long count) {
    failed.store(0);
    at_once.store(count);
    left.store(n);
}
extern "C" long bfc_failed() { return failed.load(); }

extern "C" void* malloc(size_t size) {
    static auto* real = next<void*(size_t)>("malloc");
    return fails(CALLER) ? nullptr : real(size);
}
extern "C" void* realloc(void* old, size_t size) {
    static auto* real = next<void*(void*, size_t)>("realloc");
    return fails(CALLER) ? nullptr : real(old, size);
}
void* operator new(size_t size) {
    static auto* real = next<void*(size_t)>("_Znwm");
    if (fails(CALLER)) throw std::bad_alloc();
    return real(size);
}
void* operator new(size_t size, const std::nothrow_t& tag) noexcept {
    static auto* real = next<void*(size_t, const std::nothrow_t&)>("_ZnwmRKSt9nothrow_t");
    return fails(CALLER) ? nullptr : real(size, tag);
}
void* operator new(size_t size, std::align_val_t alignment) {
    static auto* real = next<void*(size_t, std::align_val_t)>("_ZnwmSt11align_val_t");
    if (fails(CALLER)) throw std::bad_alloc();
    return real(size, alignment);
}
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t& tag) noexcept {
    static auto* real =
        next<void*(size_t, std::align_val_t, const std::nothrow_t&)>("_ZnwmSt11align_val_tRKSt9nothrow_t");
    return fails(CALLER) ? nullptr : real(size, alignment, tag);
}
