// The least that an allocator for PyTorch's CUDAPluggableAllocator may be that is faster than CUDA's runtime: two functions,
// which keep what is freed for the next request of that size.
#include <cstddef>
#include <map>

extern "C" {
int cudaMalloc(void** ptr, std::size_t size);

static std::multimap<std::size_t, void*> kept;

void* pluggable_alloc(std::size_t size, int, void*) {
    void* ptr = nullptr;
    const auto found = kept.find(size);
    if (found == kept.end()) {
        cudaMalloc(&ptr, size);
    } else {
        ptr = found->second;
        kept.erase(found);
    }
    return ptr;
}
void pluggable_free(void* ptr, std::size_t size, int, void*) { kept.emplace(size, ptr); }
}
