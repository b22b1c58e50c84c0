// The calls of NVML that PyTorch makes, for the emulated driver: no fabric, no links, no other processes.
//
// PyTorch's own allocator calls them without looking, once its segments are expandable.
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))

namespace {
enum { SUCCESS = 0, UNKNOWN = 999, NOT_SUPPORTED = 3 };

template <typename... Arguments>
int call(const char* name, Arguments... arguments) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver, name));
    return function && !function(arguments...) ? SUCCESS : UNKNOWN;
}
}  // namespace

API int nvmlInit_v2() { return call("cuInit", 0u); }
API int nvmlInit() { return nvmlInit_v2(); }
API int nvmlDeviceGetCount_v2(unsigned* out) { return call("cuDeviceGetCount", reinterpret_cast<int*>(out)); }
API int nvmlSystemGetCudaDriverVersion_v2(int* out) { return call("cuDriverGetVersion", out); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) {
    static int device;
    *out = &device;
    return SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return SUCCESS;
}
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
