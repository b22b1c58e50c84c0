// A libcudart.so.13 with no GPU behind it: it hands out integers and writes down what was asked.
//
// It defines the functions that libc10_cuda.so needs, and the driver's functions for virtual
// memory, which that library asks for by name. Built with `--default-symver`, so that the symbols
// carry the version of the real library. One thread drives it; nothing here is locked.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "simulated_device.hpp"

namespace {

using namespace simulated;

constexpr uint64_t kPage = 2 << 20;  // what one physical piece of expandable memory is rounded to

cudaError_t last_error = cudaSuccess;
bool has_fabric = true;

cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t answer(uint64_t error) {
  return error == 0 ? cudaSuccess : failed(static_cast<cudaError_t>(error));
}

cudaError_t grow(Kind kind, void** pointer, uint64_t nbytes) {
  uint64_t address = 0;
  const uint64_t error = simulated::grow(kind, nbytes, &address);
  *pointer = reinterpret_cast<void*>(address);
  return answer(error);
}

cudaError_t shrink(Kind kind, void* pointer) {
  return answer(simulated::shrink(kind, reinterpret_cast<uint64_t>(pointer)));
}

uint64_t key(cudaStream_t stream) { return reinterpret_cast<uint64_t>(stream); }
Event* as_event(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

extern "C" {

// For the shim: set up, steer, and read the log ---------------------------------------------------

void bfc_cudart_configure(uint64_t capacity, uint64_t base, uint64_t alignment, uint64_t gap,
                          uint64_t reserve_base, bool fabric, uint64_t placement) {
  Device& it = device();
  has_fabric = fabric;
  it.capacity = capacity;
  it.next = base;
  it.alignment = alignment;
  it.gap = gap;
  it.next_reserved = reserve_base;
  it.base = base;
  it.placement = static_cast<Placement>(placement);
}

void bfc_cudart_capture(uint64_t stream, bool captures) {
  captures ? begin_capture(stream) : end_capture(stream);
}

void bfc_cudart_capture_work(uint64_t stream) { add_node(stream); }
void bfc_cudart_capture_wait(uint64_t stream, uint64_t on) { join_capture(stream, on); }

void bfc_cudart_list_addresses(const uint64_t* addresses, uint64_t count) {
  device().listed = true;
  device().addresses.insert(device().addresses.end(), addresses, addresses + count);
}

// Of all calls that take memory, or of those of one kind.
void bfc_cudart_fail_at(uint64_t n, uint64_t code) { device().growth = {n, code}; }

void bfc_cudart_fail_kind_at(uint64_t n, uint64_t code, uint64_t kind) {
  device().faults.at(kind) = {n, code};
}

void bfc_cudart_resize(uint64_t capacity) { device().capacity = capacity; }

void bfc_cudart_hold(uint64_t stream) { device().streams[stream].held = true; }

void bfc_cudart_finish(uint64_t stream) { finish(device().streams[stream]); }

void bfc_cudart_finish_events(uint64_t stream, uint64_t count) {
  finish_events(device().streams[stream], count);
}

uint64_t bfc_cudart_call_count() { return device().calls.size(); }
const void* bfc_cudart_calls() { return device().calls.data(); }
uint64_t bfc_cudart_live_bytes() { return device().live_bytes; }

// What a private pool's own allocator does: the same device, told apart in the log.
void* bfc_cudart_pool_malloc(uint64_t nbytes) {
  void* pointer = nullptr;
  if (grow(kPoolMalloc, &pointer, nbytes) == cudaSuccess) return pointer;
  last_error = cudaSuccess;
  return nullptr;
}

void bfc_cudart_pool_free(void* pointer) { shrink(kPoolFree, pointer); }

// Memory ------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t nbytes) { return grow(kMalloc, pointer, nbytes); }

// The real one also waits for the device. This one lets held streams be, so that what the
// allocator itself waits for can be seen.
cudaError_t cudaFree(void* pointer) {
  return pointer == nullptr ? cudaSuccess : shrink(kFree, pointer);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = free_bytes();
  *total = device().capacity;
  return cudaSuccess;
}

// Events and streams ------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{++device().events});
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete as_event(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record(*as_event(event), key(stream));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return query(*as_event(event)) ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  log(kEventSynchronize, as_event(event)->number, as_event(event)->stream);
  if (!ready(*as_event(event))) finish(device().streams[as_event(event)->stream]);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  log(kDeviceSynchronize);
  for (auto& [handle, stream] : device().streams) finish(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  log(kStreamSynchronize, 0, key(stream));
  finish(device().streams[key(stream)]);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Stream& it = device().streams[key(stream)];
  return it.finished == it.recorded ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = device().streams[key(stream)].capture != 0 ? cudaStreamCaptureStatusActive
                                                       : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// A graph is named by the number of its capture.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** terminals,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  const Stream& it = device().streams[key(stream)];
  if (id != nullptr) *id = it.capture;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(it.capture);
  if (terminals != nullptr) {
    *terminals = reinterpret_cast<const cudaGraphNode_t*>(it.terminals.data());
  }
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = it.terminals.size();
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* dependencies,
                                         cudaGraphEdgeData*, size_t* count) {
  const std::vector<uint64_t>& parents = device().parents.at(reinterpret_cast<uint64_t>(node) - 1);
  if (dependencies != nullptr) {
    const size_t fit = std::min(*count, parents.size());
    std::memcpy(dependencies, parents.data(), fit * sizeof(*dependencies));
  }
  *count = parents.size();
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// The device --------------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  return number == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = cudaDeviceProp{};
  std::strcpy(properties->name, "simulated");
  properties->totalGlobalMem = device().capacity;
  properties->major = 9;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorInvalidValue) return "invalid argument";
  return "an error of the simulated device";
}

// Never needed by the caching allocator: each says so if it is.
cudaError_t unsupported() { return failed(cudaErrorNotSupported); }

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return unsupported(); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return unsupported(); }
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  return unsupported();
}
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  return unsupported();
}
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return unsupported(); }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return unsupported(); }
cudaError_t cudaIpcCloseMemHandle(void*) { return unsupported(); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return unsupported(); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return unsupported(); }
cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) { return unsupported(); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return unsupported(); }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return unsupported();
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return unsupported(); }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return unsupported(); }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { return unsupported(); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return unsupported();
}
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) {
  return unsupported();
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int) { return unsupported(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return unsupported(); }

}  // extern "C"

// The driver's virtual memory, for expandable segments --------------------------------------------

namespace {

CUresult device_get(CUdevice* made, int) {
  *made = 0;
  return CUDA_SUCCESS;
}

CUresult no_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult driver(uint64_t error) { return static_cast<CUresult>(error); }

// A refused call has no address in the log.
CUresult refused(Kind kind, uint64_t nbytes, uint64_t error) {
  log(kind, nbytes);
  return driver(error);
}

CUresult reserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  Device& it = device();
  *address = 0;
  if (const uint64_t error = ordered_fault(kReserve)) return refused(kReserve, nbytes, error);
  *address = it.next_reserved;
  it.next_reserved += (nbytes + kPage - 1) / kPage * kPage;
  it.reserved[*address] = nbytes;
  log(kReserve, nbytes, *address);
  return CUDA_SUCCESS;
}

// The mappings that begin in a range, if they fill it from end to end; else none of them.
std::vector<Mapping*> mappings(uint64_t address, uint64_t nbytes) {
  std::vector<Mapping*> found;
  uint64_t end = address;
  for (auto at = device().mapped.find(address);
       at != device().mapped.end() && at->first == end && end < address + nbytes; ++at) {
    found.push_back(&at->second);
    end += at->second.nbytes;
  }
  if (end != address + nbytes) found.clear();
  return found;
}

bool is_any_mapped(uint64_t address, uint64_t nbytes) {
  auto after = device().mapped.lower_bound(address + nbytes);
  if (after == device().mapped.begin()) return false;
  --after;
  return after->first + after->second.nbytes > address;
}

bool is_reserved(uint64_t address, uint64_t nbytes) {
  auto after = device().reserved.upper_bound(address);
  if (after == device().reserved.begin()) return false;
  --after;
  return address + nbytes <= after->first + after->second;
}

// As the real one: a whole reservation with nothing mapped in it.
CUresult unreserve(CUdeviceptr address, size_t nbytes) {
  const auto found = device().reserved.find(address);
  const bool known = found != device().reserved.end() && found->second == nbytes;
  if (!known || is_any_mapped(address, nbytes)) return refused(kUnreserve, nbytes, kInvalidValue);
  device().reserved.erase(found);
  log(kUnreserve, nbytes, address);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t nbytes,
                const CUmemAllocationProp* wanted, unsigned long long) {
  Device& it = device();
  *handle = 0;
  // The probe of a device without fabric handles is not in the log: it is no attempt to grow.
  if (!has_fabric && wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (const uint64_t error = refusal(kCreate, nbytes)) return refused(kCreate, nbytes, error);
  *handle = it.next_handle++;
  log(kCreate, nbytes, *handle);
  it.live_bytes += nbytes;
  it.handles[*handle] = nbytes;
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  Device& it = device();
  const auto found = it.handles.find(handle);
  if (found == it.handles.end()) return refused(kRelease, 0, kInvalidValue);
  log(kRelease, found->second, handle);
  it.live_bytes -= found->second;
  it.handles.erase(found);
  return CUDA_SUCCESS;
}

// As the real one: a whole handle, into addresses that are reserved and hold none.
CUresult map(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  if (const uint64_t error = ordered_fault(kMap)) return refused(kMap, nbytes, error);
  const auto page = device().handles.find(handle);
  const bool whole = page != device().handles.end() && page->second == nbytes && offset == 0;
  if (!whole || !is_reserved(address, nbytes) || is_any_mapped(address, nbytes)) {
    return refused(kMap, nbytes, kInvalidValue);
  }
  device().mapped[address] = {nbytes, handle};
  log(kMap, nbytes, address);
  return CUDA_SUCCESS;
}

// As the real one: whole mappings.
CUresult unmap(CUdeviceptr address, size_t nbytes) {
  if (const uint64_t error = ordered_fault(kUnmap)) return refused(kUnmap, nbytes, error);
  if (mappings(address, nbytes).empty()) return refused(kUnmap, nbytes, kInvalidValue);
  auto& mapped = device().mapped;
  mapped.erase(mapped.find(address), mapped.lower_bound(address + nbytes));
  log(kUnmap, nbytes, address);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc*, size_t) {
  if (const uint64_t error = ordered_fault(kSetAccess)) return refused(kSetAccess, nbytes, error);
  const std::vector<Mapping*> found = mappings(address, nbytes);
  if (found.empty()) return refused(kSetAccess, nbytes, kInvalidValue);
  for (Mapping* one : found) one->accessible = true;
  log(kSetAccess, nbytes, address);
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *nbytes = kPage;
  return CUDA_SUCCESS;
}

CUresult error_string(CUresult, const char** text) {
  *text = "an error of the simulated driver";
  return CUDA_SUCCESS;
}

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

template <typename Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

void* driver_function(std::string_view name) {
  static const std::unordered_map<std::string_view, void*> known = {
      {"cuDeviceGet", erased(device_get)},
      {"cuDeviceGetAttribute", erased(no_attribute)},
      {"cuMemAddressReserve", erased(reserve)},
      {"cuMemAddressFree", erased(unreserve)},
      {"cuMemCreate", erased(create)},
      {"cuMemRelease", erased(release)},
      {"cuMemMap", erased(map)},
      {"cuMemUnmap", erased(unmap)},
      {"cuMemSetAccess", erased(set_access)},
      {"cuMemGetAllocationGranularity", erased(granularity)},
      {"cuGetErrorString", erased(error_string)},
  };
  const auto found = known.find(name);
  // Every name gets an answer: upstream takes a missing one for a driver that is too old.
  return found == known.end() ? erased(not_supported) : found->second;
}

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* status) {
  *function = driver_function(name);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
