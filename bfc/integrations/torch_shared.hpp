// Mapped memory of one process in another one: what CUDA's own handles (cudaIpcGetMemHandle) cannot do.
//
// The pages under a block are exported, each as a file descriptor that stays open here until the block is freed. The
// other process takes the descriptors out of this one, and maps the pages one behind the other.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bfc::shared {

#define BFC_TEXT(name) #name
#define BFC_NAME(name) BFC_TEXT(name)  // with the suffix that the header gives it
#define BFC_DRIVER(call) reinterpret_cast<decltype(&call)>(bfc::shared::find(BFC_NAME(call)))

inline void* find(const char* name) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = driver ? dlsym(driver, name) : nullptr;
    TORCH_CHECK(found, "bfc: the driver has no ", name);
    return found;
}
inline void check(CUresult result, const char* call) {
    const char* text = nullptr;
    if (result != CUDA_SUCCESS) (void)BFC_DRIVER(cuGetErrorString)(result, &text);
    TORCH_CHECK(result == CUDA_SUCCESS, "bfc: ", call, " failed: ", text ? text : "unknown error");
}
#define BFC_CALL(call, ...) bfc::shared::check(BFC_DRIVER(call)(__VA_ARGS__), #call)

struct Page {
    uint64_t size;
    int descriptor;
};
struct Header {
    char magic[8];
    int process;
    uint32_t pages;
};
constexpr char kMagic[8] = {'b', 'f', 'c', 'p', 'a', 'g', 'e', 's'};

// The descriptors of blocks that other processes may have.
class Exports {
public:
    // A handle for the block, and where it begins in what the handle stands for.
    std::pair<std::string, ptrdiff_t> add(CUdeviceptr block, size_t nbytes) {
        const std::lock_guard<std::mutex> held(lock_);
        auto [found, is_new] = blocks_.try_emplace(block);
        Block& it = found->second;
        try {
            if (is_new) export_pages(it, block, nbytes);
        } catch (...) {
            close_all(it);
            blocks_.erase(found);
            throw;
        }
        count_ = blocks_.size();
        Header header{{}, getpid(), static_cast<uint32_t>(it.pages.size())};
        std::memcpy(header.magic, kMagic, sizeof kMagic);
        std::string text(reinterpret_cast<const char*>(&header), sizeof header);
        text.append(reinterpret_cast<const char*>(it.pages.data()), it.pages.size() * sizeof(Page));
        return {text, static_cast<ptrdiff_t>(block - it.first)};
    }
    bool are_some() const { return count_.load(std::memory_order_acquire); }
    // The block is freed.
    void drop(const void* block) {
        if (!are_some()) return;
        const std::lock_guard<std::mutex> held(lock_);
        auto found = blocks_.find(reinterpret_cast<CUdeviceptr>(block));
        if (found == blocks_.end()) return;
        close_all(found->second);
        blocks_.erase(found);
        count_ = blocks_.size();
    }

private:
    struct Block {
        CUdeviceptr first = 0;
        std::vector<Page> pages;
    };

    static void close_all(const Block& block) {
        for (const Page& it : block.pages) close(it.descriptor);
    }
    static void export_pages(Block& block, CUdeviceptr at, size_t nbytes) {
        const CUdeviceptr end = at + nbytes;
        while (at < end) {
            CUdeviceptr first = 0;
            size_t size = 0;
            BFC_CALL(cuMemGetAddressRange, &first, &size, at);  // of one page
            if (block.pages.empty()) block.first = first;
            block.pages.push_back({size, export_page(first)});
            at = first + size;
        }
    }
    static int export_page(CUdeviceptr page) {
        CUmemGenericAllocationHandle handle = 0;
        BFC_CALL(cuMemRetainAllocationHandle, &handle, reinterpret_cast<void*>(page));
        CUmemAllocationProp made_for{};
        int descriptor = -1;
        CUresult result = BFC_DRIVER(cuMemGetAllocationPropertiesFromHandle)(&made_for, handle);
        const bool is_possible = made_for.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        if (result == CUDA_SUCCESS && is_possible)
            result = BFC_DRIVER(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        (void)BFC_DRIVER(cuMemRelease)(handle);
        TORCH_CHECK(result != CUDA_SUCCESS || is_possible,
                    "bfc: mapped memory can be shared with another process only if it was made for that: give install() "
                    "pools over bfc.CUDASubAllocator(device, handle_type='posix'), or such as neither stitch nor expand");
        TORCH_CHECK(result != CUDA_ERROR_OPERATING_SYSTEM,
                    "bfc: the driver could not make a file descriptor for a page of this tensor. It takes one for each page, "
                    "2 MiB and more: raise the limit with `ulimit -n`");
        check(result, "cuMemExportToShareableHandle");
        return descriptor;
    }

    std::mutex lock_;
    std::unordered_map<CUdeviceptr, Block> blocks_;
    std::atomic<size_t> count_{0};
};

// A descriptor of another process's, as one of this process's.
inline int take_descriptor(int process, int descriptor) {
    constexpr long kOpen = 434, kGet = 438;  // pidfd_open and pidfd_getfd, on all machines
    const int other = static_cast<int>(syscall(kOpen, process, 0));
    int error = errno;
    int taken = -1;
    if (other >= 0) {
        taken = static_cast<int>(syscall(kGet, other, descriptor, 0));
        error = errno;
        close(other);
    }
    TORCH_CHECK(taken >= 0, "bfc: mapped memory of process ", process, " cannot be taken over (", std::strerror(error),
                error == EPERM ? "): this user may not trace that process. Let it call prctl(PR_SET_PTRACER, "
                                 "PR_SET_PTRACER_ANY, 0, 0, 0), or set kernel.yama.ptrace_scope to 0; "
                               : "); ",
                "or give install() pools that neither stitch nor expand");
    return taken;
}

// Addresses with the pages of another process's block.
class Import {
public:
    Import(const std::string& text, int device) : device_(device) {
        Header header;
        std::memcpy(&header, text.data(), sizeof header);
        std::vector<Page> pages((text.size() - sizeof header) / sizeof(Page));
        TORCH_CHECK(pages.size() == header.pages, "bfc: a handle of mapped memory is damaged");
        std::memcpy(pages.data(), text.data() + sizeof header, pages.size() * sizeof(Page));
        for (const Page& it : pages) nbytes_ += it.size;
        BFC_CALL(cuMemAddressReserve, &first_, nbytes_, 0, 0, 0);
        try {
            for (const Page& it : pages) map(header.process, it);
            CUmemAccessDesc access{};
            access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            BFC_CALL(cuMemSetAccess, first_, nbytes_, &access, 1);
        } catch (...) {
            let_go();
            throw;
        }
    }
    ~Import() {
        int before = device_;
        (void)cudaGetDevice(&before);
        (void)cudaSetDevice(device_);
        (void)cudaDeviceSynchronize();  // what uses it on any stream
        (void)cudaSetDevice(before);
        let_go();
    }
    Import(const Import&) = delete;
    Import& operator=(const Import&) = delete;
    void* address() const { return reinterpret_cast<void*>(first_); }

private:
    void map(int process, const Page& page) {
        const int descriptor = take_descriptor(process, page.descriptor);
        CUmemGenericAllocationHandle handle = 0;
        const CUresult result = BFC_DRIVER(cuMemImportFromShareableHandle)(
            &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        close(descriptor);
        check(result, "cuMemImportFromShareableHandle");
        const CUresult mapped = BFC_DRIVER(cuMemMap)(first_ + mapped_, page.size, 0, handle, 0);
        (void)BFC_DRIVER(cuMemRelease)(handle);  // the mapping keeps it
        check(mapped, "cuMemMap");
        mapped_ += page.size;
    }
    void let_go() noexcept {
        if (mapped_) (void)BFC_DRIVER(cuMemUnmap)(first_, mapped_);
        (void)BFC_DRIVER(cuMemAddressFree)(first_, nbytes_);
    }

    int device_;
    CUdeviceptr first_ = 0;
    size_t nbytes_ = 0, mapped_ = 0;
};

inline bool is_handle(const std::string& text) {
    return text.size() > sizeof(Header) && !std::memcmp(text.data(), kMagic, sizeof kMagic);
}
inline std::shared_ptr<void> open(const std::string& text, int device) {
    auto made = std::make_shared<Import>(text, device);
    return {made, made->address()};
}

}  // namespace bfc::shared
