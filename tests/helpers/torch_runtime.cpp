// The calls of the CUDA runtime that PyTorch makes, by the driver's calls of the same meaning.
//
// NVIDIA's runtime library refuses every driver but NVIDIA's. This one takes its place in a process
// of PyTorch's, on the emulated driver. Kernels do nothing: a launch only takes its place in the
// stream or graph. What PyTorch calls and is not here, fails: see `torch_runtime.py`.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {
using Handle = void*;
thread_local cudaError_t last_error = cudaSuccess;

// A call of the driver, looked up once. Its errors have the same numbers.
template <typename... Arguments>
cudaError_t call(const char* name, Arguments... arguments) {
    static Handle driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver, name));
    if (!function) {
        std::fprintf(stderr, "the driver has no %s\n", name);
        return last_error = cudaErrorNotSupported;
    }
    const int result = function(arguments...);
    return result ? last_error = static_cast<cudaError_t>(result) : cudaSuccess;
}

// The runtime keeps the primary context of a device for good, once it has used it.
cudaError_t context_of(int device, Handle* out) {
    static Handle contexts[16];
    if (!contexts[device])
        if (cudaError_t error = call("cuDevicePrimaryCtxRetain", &contexts[device], device)) return error;
    *out = contexts[device];
    return cudaSuccess;
}

cudaError_t use_device(int device) {
    Handle context = nullptr;
    if (cudaError_t error = context_of(device, &context)) return error;
    return call("cuCtxSetCurrent", context);
}

// It does so for device 0 when a thread first needs one.
cudaError_t with_context() {
    Handle context = nullptr;
    if (cudaError_t error = call("cuInit", 0u)) return error;
    if (cudaError_t error = call("cuCtxGetCurrent", &context)) return error;
    return context ? cudaSuccess : use_device(0);
}

template <typename... Arguments>
cudaError_t act(const char* name, Arguments... arguments) {
    const cudaError_t error = with_context();
    return error ? error : call(name, arguments...);
}

uint64_t at(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
unsigned char byte(int value) { return static_cast<unsigned char>(value); }
}  // namespace

// -- errors, devices ------------------------------------------------------------------------------

API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
API const char* cudaGetErrorString(cudaError_t error) {
    const char* text = nullptr;
    return call("cuGetErrorString", int(error), &text) ? "unrecognized error code" : text;
}
API const char* cudaGetErrorName(cudaError_t error) {
    const char* text = nullptr;
    return call("cuGetErrorName", int(error), &text) ? "unrecognized error code" : text;
}

API cudaError_t cudaDriverGetVersion(int* version) { return call("cuDriverGetVersion", version); }
API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int* count) {
    const cudaError_t error = call("cuInit", 0u);
    return error ? error : call("cuDeviceGetCount", count);
}
API cudaError_t cudaGetDevice(int* device) { return act("cuCtxGetDevice", device); }
API cudaError_t cudaSetDevice(int device) {
    const cudaError_t error = call("cuInit", 0u);
    return error ? error : use_device(device);
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return act("cuDeviceGetAttribute", value, static_cast<int>(attribute), device);
}
API cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) {
    return act("cuDeviceGetPCIBusId", out, length, device);
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    std::memset(out, 0, sizeof *out);
    std::strcpy(out->name, "Emulated GPU");
    cudaError_t error = cudaDeviceGetAttribute(&out->major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error) {
        error = cudaDeviceGetAttribute(&out->minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    if (error) return error;
    out->multiProcessorCount = 132;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->l2CacheSize = 50 << 20;
    out->sharedMemPerBlock = 48 << 10;
    out->maxGridSize[0] = 0x7fffffff;
    out->maxGridSize[1] = out->maxGridSize[2] = 0xffff;
    return act("cuDeviceTotalMem_v2", &out->totalGlobalMem, device);
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return act("cuCtxGetStreamPriorityRange", least, greatest);
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    return act("cuDeviceCanAccessPeer", can, device, peer);
}
API cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) {
    Handle peer = nullptr;
    if (cudaError_t error = with_context()) return error;
    if (cudaError_t error = context_of(device, &peer)) return error;
    return call("cuCtxEnablePeerAccess", peer, flags);
}
API cudaError_t cudaDeviceSynchronize() { return act("cuCtxSynchronize"); }

// -- memory ---------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** out, size_t nbytes) { return act("cuMemAlloc_v2", out, nbytes); }
API cudaError_t cudaFree(void* pointer) { return pointer ? act("cuMemFree_v2", at(pointer)) : with_context(); }
API cudaError_t cudaMallocHost(void** out, size_t nbytes) { return act("cuMemHostAlloc", out, nbytes, 0u); }
API cudaError_t cudaHostAlloc(void** out, size_t nbytes, unsigned flags) {
    return act("cuMemHostAlloc", out, nbytes, flags);
}
API cudaError_t cudaFreeHost(void* pointer) { return act("cuMemFreeHost", pointer); }
API cudaError_t cudaHostGetFlags(unsigned* out, void* pointer) { return act("cuMemHostGetFlags", out, pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned flags) {
    return act("cuMemHostRegister_v2", pointer, nbytes, flags);
}
API cudaError_t cudaHostUnregister(void* pointer) { return act("cuMemHostUnregister", pointer); }
API cudaError_t cudaMallocManaged(void** out, size_t nbytes, unsigned flags) {
    return act("cuMemAllocManaged", out, nbytes, flags);
}
API cudaError_t cudaMallocAsync(void** out, size_t nbytes, cudaStream_t stream) {
    return act("cuMemAllocAsync", out, nbytes, stream);
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) { return act("cuMemFreeAsync", at(pointer), stream); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int device) {
    return act("cuDeviceGetDefaultMemPool", out, device);
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    return act("cuMemPoolSetAttribute", pool, static_cast<int>(attribute), value);
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    return act("cuMemPoolGetAttribute", pool, static_cast<int>(attribute), value);
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t kept) { return act("cuMemPoolTrimTo", pool, kept); }
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    return act("cuMemGetInfo_v2", free_bytes, total);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
    return act("cuMemcpy", at(to), at(from), nbytes);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    return act("cuMemcpyAsync", at(to), at(from), nbytes, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t nbytes,
                                    cudaStream_t stream) {
    Handle there = nullptr, here = nullptr;
    if (cudaError_t error = with_context()) return error;
    if (cudaError_t error = context_of(to_device, &there)) return error;
    if (cudaError_t error = context_of(from_device, &here)) return error;
    return call("cuMemcpyPeerAsync", at(to), there, at(from), here, nbytes, stream);
}
API cudaError_t cudaMemset(void* to, int value, size_t nbytes) {
    return act("cuMemsetD8_v2", at(to), byte(value), nbytes);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
    return act("cuMemsetD8Async", at(to), byte(value), nbytes, stream);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
    enum { MEMORY_TYPE = 2, ORDINAL = 9, HOST = 1 };
    int type = 0, device = 0;
    const cudaError_t before = last_error;
    std::memset(out, 0, sizeof *out);
    if (act("cuPointerGetAttribute", &type, int(MEMORY_TYPE), at(pointer)) ||
        act("cuPointerGetAttribute", &device, int(ORDINAL), at(pointer))) {
        last_error = before;
        out->type = cudaMemoryTypeUnregistered;
        return cudaSuccess;
    }
    out->type = type == HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = device;
    out->devicePointer = const_cast<void*>(pointer);
    out->hostPointer = type == HOST ? out->devicePointer : nullptr;
    return cudaSuccess;
}

// -- streams and events ---------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    return act("cuStreamCreateWithPriority", out, flags, priority);
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    return act("cuStreamCreate", out, flags);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return act("cuStreamCreate", out, 0u); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return act("cuStreamDestroy_v2", stream); }
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return act("cuStreamQuery", stream); }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return act("cuStreamSynchronize", stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) {
    return act("cuStreamGetPriority", stream, out);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return act("cuStreamWaitEvent", stream, event, flags);
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    return act("cuEventCreate", out, flags);
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return act("cuEventCreate", out, 0u); }
API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end) {
    return act("cuEventElapsedTime", out, start, end);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    return act("cuLaunchHostFunc", stream, function, argument);
}
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return act("cuEventDestroy_v2", event); }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return act("cuEventRecord", event, stream);
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return act("cuEventRecordWithFlags", event, stream, flags);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) { return act("cuEventQuery", event); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return act("cuEventSynchronize", event); }

// -- other processes, and the driver itself -------------------------------------------------------

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* pointer) {
    return act("cuIpcGetMemHandle", out, at(pointer));
}
API cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned flags) {
    return act("cuIpcOpenMemHandle_v2", out, handle, flags);
}
API cudaError_t cudaIpcCloseMemHandle(void* pointer) { return act("cuIpcCloseMemHandle", at(pointer)); }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t event) {
    return act("cuIpcGetEventHandle", out, event);
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t handle) {
    return act("cuIpcOpenEventHandle", out, handle);
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned version,
                                                 unsigned long long flags, cudaDriverEntryPointQueryResult* found) {
    int status = 0;
    const cudaError_t error = call("cuGetProcAddress_v2", name, out, static_cast<int>(version), flags, &status);
    if (found) *found = static_cast<cudaDriverEntryPointQueryResult>(status);
    return error;
}

// -- captures and graphs --------------------------------------------------------------------------

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
    return act("cuStreamIsCapturing", stream, out);
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return act("cuStreamBeginCapture_v2", stream, static_cast<int>(mode));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
    return act("cuStreamEndCapture", stream, out);
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
    return act("cuStreamGetCaptureInfo_v3", stream, status, id, graph, nodes, edges, count);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return act("cuThreadExchangeStreamCaptureMode", mode);
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
    return act("cuGraphInstantiateWithFlags", out, graph, flags);
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
    return act("cuGraphInstantiateWithFlags", out, graph, flags);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return act("cuGraphLaunch", graph, stream);
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return act("cuGraphDestroy", graph); }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return act("cuGraphExecDestroy", graph); }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* out, size_t* count) {
    return act("cuGraphGetNodes", graph, out, count);
}
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                          unsigned flags) {
    return act("cuGraphRetainUserObject", graph, object, count, flags);
}
API cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* pointer, cudaHostFn_t destroy, unsigned count,
                                     unsigned flags) {
    return act("cuUserObjectCreate", out, pointer, destroy, count, flags);
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
    return act("cuUserObjectRelease", object, count);
}

// -- kernels, which do nothing --------------------------------------------------------------------

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return act("cuLaunchKernel", kernel, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, Handle(nullptr), Handle(nullptr));
}
API cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                   cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
API cudaError_t __cudaGetKernel(const void** out, const void* kernel) {
    *out = kernel;
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    std::memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->binaryVersion = out->ptxVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
    *out = 1;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
    *out = 1;
    return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

namespace {
struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local Configuration pushed;
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, cudaStream_t* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *stream = pushed.stream;
    return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
