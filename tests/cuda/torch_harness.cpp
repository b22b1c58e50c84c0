// Calls the functions that PyTorch calls, as PyTorch does: from C++, with a mutex of its own held, the GIL held or not.
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <new>

typedef void* (*alloc_t)(size_t, int, void*);
typedef void (*free_t)(void*, size_t, int, void*);

static std::mutex mutex;  // as that of PyTorch's caching allocator

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

void harness_lock() { mutex.lock(); }
void harness_unlock() { mutex.unlock(); }

}
