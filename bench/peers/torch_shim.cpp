// A server, over its standard input and output, to the compiled c10::cuda::CUDACachingAllocator.
//
// Upstream keeps settings and statistics for the whole process, so each peer is a process of its
// own. A request is a list of operations and its reply the list of their results, both in 8-byte
// words. What upstream throws becomes a result too. No memory stands behind an address.

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include "server.hpp"

// From cudart_standin.cpp.
extern "C" {
void bfc_cudart_configure(uint64_t capacity, uint64_t base, uint64_t alignment, uint64_t gap,
                          uint64_t reserve_base, bool fabric, uint64_t placement);
void bfc_cudart_capture(uint64_t stream, bool captures);
void bfc_cudart_capture_work(uint64_t stream);
void bfc_cudart_capture_wait(uint64_t stream, uint64_t on);
void bfc_cudart_list_addresses(const uint64_t* addresses, uint64_t count);
void bfc_cudart_fail_at(uint64_t n, uint64_t code);
void bfc_cudart_fail_kind_at(uint64_t n, uint64_t code, uint64_t kind);
void bfc_cudart_resize(uint64_t capacity);
void bfc_cudart_hold(uint64_t stream);
void bfc_cudart_finish(uint64_t stream);
void bfc_cudart_finish_events(uint64_t stream, uint64_t count);
uint64_t bfc_cudart_call_count();
const void* bfc_cudart_calls();
uint64_t bfc_cudart_live_bytes();
void* bfc_cudart_pool_malloc(uint64_t nbytes);
void bfc_cudart_pool_free(void* pointer);
}

// Whether no memory of the host is used twice. Upstream keeps some of what it knows of a block by the
// address of its record, and forgets to delete it: a later record at that address finds it.
static bool keeps_records = false;

void operator delete(void* pointer) noexcept {
  if (!keeps_records) std::free(pointer);
}
void operator delete(void* pointer, std::size_t) noexcept { operator delete(pointer); }

// Upstream exports this function and declares it in no header of the wheel.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

// Upstream asks NVML about other processes when it is out of memory, and takes any failure there
// for its own; and since 2.13, whether the device has fabric handles. The simulated device is not
// one that NVML knows. To 2.11 it is not to be found, to others it is this program.
extern "C" void* dlopen(const char* name, int flags) noexcept {
  using Function = void* (*)(const char*, int);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "dlopen"));
  if (name != nullptr && std::string_view(name).find("nvidia-ml") != std::string_view::npos) {
    return BFC_TORCH_MINOR < 13 ? nullptr : real(nullptr, RTLD_NOW);
  }
  return real(name, flags);
}

// No other process, and no fabric. (3: not supported.)
extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
}

namespace {

namespace cuda = c10::cuda;
namespace cca = c10::cuda::CUDACachingAllocator;

using server::Operation;
using server::Result;
using server::Words;
using server::failure;

// Mirrored by `_CODES` in torch.py, in this order.
enum Code : uint64_t {
  kConfigure,
  kListAddresses,
  kInit,
  kMalloc,
  kAllocate,
  kFree,
  kFreeSlot,
  kRecordStream,
  kRecordStreamSlot,
  kEmptyCache,
  kSetSettings,
  kSetMemoryFraction,
  kMemoryFraction,
  kResetPeakStats,
  kResetAccumulatedStats,
  kEnable,
  kCreatePool,
  kBeginPool,
  kEndPool,
  kReleasePool,
  kPoolUseCount,
  kSetUseOnOom,
  kSetNoSplit,
  kStats,
  kSnapshot,
  kRecordHistory,
  kTrace,
  kCalls,
  kFailAt,
  kHold,
  kFinish,
  kFinishEvents,
  kLiveBytes,
  kReplay,
  kResize,
  kMarkCapture,
  kCapture,
  kRejections,
  kMallocAt,
  kCaptureWork,
  kCaptureWait,
  kKeepRecords,
};

// Which streams an allocation scope takes in.
enum Scope : uint64_t { kAllStreams, kNoStream, kOneStream };

constexpr uint64_t kNoSlot = ~uint64_t{0};
constexpr uint64_t kAnyKind = ~uint64_t{0};  // `ANY_KIND` in server.py

struct Slots {
  void* at(uint64_t slot) const {
    const auto found = table.find(slot);
    if (found == table.end()) throw std::out_of_range("no such slot");
    return found->second;
  }

  std::unordered_map<uint64_t, void*> table;
};

Slots slots;

void* as_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }
uint64_t as_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
cudaStream_t as_stream(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

cuda::CUDAStream external_stream(uint64_t handle) {
  if (handle == 0) return cuda::getDefaultCUDAStream(0);
  return cuda::getStreamFromExternal(as_stream(handle), 0);
}

// Allocating --------------------------------------------------------------------------------------

void* malloc_raw(uint64_t nbytes, uint64_t stream) {
  return cca::get()->raw_alloc_with_stream(nbytes, as_stream(stream));
}

// The way that a tensor takes: on the current stream, and with a test of the size first.
void* malloc_for_tensor(uint64_t nbytes, uint64_t stream) {
  cuda::setCurrentCUDAStream(external_stream(stream));
  c10::DataPtr data = cca::get()->allocate(nbytes);
  return data.release_context();
}

using Malloc = void* (*)(uint64_t, uint64_t);

// The slot of a request that fails is empty, and to free it does nothing.
uint64_t malloc_into(Malloc malloc, const Operation& operation) {
  const auto [nbytes, stream, slot, unused] = operation.word;
  if (slot != kNoSlot) slots.table[slot] = nullptr;
  void* const pointer = malloc(nbytes, stream);
  if (slot != kNoSlot) slots.table[slot] = pointer;
  return as_address(pointer);
}

void free_slot(uint64_t slot) {
  void* const pointer = slots.at(slot);
  slots.table.erase(slot);
  if (pointer != nullptr) cca::get()->raw_delete(pointer);
}

// Upstream records on a DataPtr that it made; here one is made again around the address.
void record_stream(void* pointer, uint64_t stream) {
  if (pointer == nullptr) return;
  c10::DataPtr data(pointer, pointer, cca::get()->raw_deleter(), c10::Device(c10::kCUDA, 0));
  try {
    cca::get()->recordStream(data, external_stream(stream));
  } catch (...) {
    (void)data.release_context();
    throw;
  }
  (void)data.release_context();  // or it would free the block
}

// Private pools -----------------------------------------------------------------------------------

// An allocator for a pool of its own. Upstream calls two of its functions; the others are there
// because the class asks for them.
class PoolAllocator final : public cca::CUDAAllocator {
 public:
  void* raw_alloc(size_t nbytes) override { return bfc_cudart_pool_malloc(nbytes); }
  void raw_delete(void* pointer) override { bfc_cudart_pool_free(pointer); }

  c10::DataPtr allocate(size_t) override { unused(); }
  void copy_data(void*, const void*, size_t) const override { unused(); }
  bool initialized() override { unused(); }
  void emptyCache(c10::MempoolId_t) override { unused(); }
  cca::DeviceStats getDeviceStats(c10::DeviceIndex) override { unused(); }
  void resetAccumulatedStats(c10::DeviceIndex) override { unused(); }
  void resetPeakStats(c10::DeviceIndex) override { unused(); }
  void* raw_alloc_with_stream(size_t, cudaStream_t) override { unused(); }
  void init(int) override { unused(); }
  double getMemoryFraction(c10::DeviceIndex) override { unused(); }
  void setMemoryFraction(double, c10::DeviceIndex) override { unused(); }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override {
    unused();
  }
  void enable(bool) override { unused(); }
  bool isEnabled() const override { unused(); }
  void cacheInfo(c10::DeviceIndex, size_t*) override { unused(); }
  void* getBaseAllocation(void*, size_t*) override { unused(); }
  void recordStream(const c10::DataPtr&, cuda::CUDAStream) override { unused(); }
  cca::SnapshotInfo snapshot(c10::MempoolId_t, bool) override { unused(); }
  void beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t,
                           std::function<bool(cudaStream_t)>) override {
    unused();
  }
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) override { unused(); }
  void releasePool(c10::DeviceIndex, c10::MempoolId_t) override { unused(); }
  cca::ShareableHandle shareIpcHandle(void*) override { unused(); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { unused(); }
  void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext, bool,
                     const std::vector<std::string>&) override {
    unused();
  }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver) override { unused(); }
#if BFC_TORCH_MINOR >= 12
  void attachOomRejectionObserver(cca::OomRejectionObserver) override { unused(); }
#endif
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker) override { unused(); }
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override { unused(); }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override {
    unused();
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex,
                                                          c10::MempoolId_t) override {
    unused();
  }
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex,
                                              std::shared_ptr<cca::AllocatorState>) override {
    unused();
  }
  std::string name() override { return "a pool's own"; }

 private:
  [[noreturn]] static void unused() { throw std::logic_error("a pool's allocator was asked this"); }
};

c10::MempoolId_t pool_id(const Operation& operation) {
  return {operation.word[0], operation.word[1]};
}

void create_pool(const Operation& operation) {
  std::shared_ptr<cca::CUDAAllocator> own;
  if (operation.word[2] != 0) own = std::make_shared<PoolAllocator>();
  cca::get()->createOrIncrefPool(0, pool_id(operation), std::move(own));
}

void begin_pool(const Operation& operation) {
  const uint64_t scope = operation.word[2];
  const cudaStream_t only = as_stream(operation.word[3]);
  cca::get()->beginAllocateToPool(0, pool_id(operation), [scope, only](cudaStream_t stream) {
    return scope == kAllStreams || (scope == kOneStream && stream == only);
  });
}

// Reading back ------------------------------------------------------------------------------------

void put(Words& out, const cca::DeviceStats& stats) {
  const auto stat = [&out](const c10::CachingAllocator::Stat& it) {
    for (const int64_t value : {it.current, it.peak, it.allocated, it.freed}) {
      out.push_back(static_cast<uint64_t>(value));
    }
  };
  for (const auto* group :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
        &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
        &stats.inactive_split_bytes, &stats.requested_bytes}) {
    std::for_each(group->begin(), group->end(), stat);
  }
  stat(stats.oversize_allocations);
  stat(stats.oversize_segments);
  for (const int64_t value :
       {stats.num_alloc_retries, stats.num_ooms, stats.num_sync_all_streams,
        stats.num_device_alloc, stats.num_device_free, stats.max_split_size}) {
    out.push_back(static_cast<uint64_t>(value));
  }
#if BFC_TORCH_MINOR >= 13
  out.push_back(static_cast<uint64_t>(stats.num_oom_rejections));
  for (const auto& [pool, reserved] : stats.reserved_bytes_by_private_pools) {
    out.insert(out.end(), {pool.first, pool.second});
    std::for_each(reserved.begin(), reserved.end(), stat);
  }
#endif
}

// Eleven words a segment, the last their number of blocks, then four words a block.
void put(Words& out, const c10::CachingDeviceAllocator::SegmentInfo& segment) {
  const auto [first, second] = segment.owner_private_pool_id;
  out.insert(out.end(),
             {segment.address, segment.total_size, segment.requested_size, segment.allocated_size,
              segment.active_size, as_address(segment.stream), uint64_t{segment.is_large},
              uint64_t{segment.is_expandable}, first, second, segment.blocks.size()});
  for (const auto& block : segment.blocks) {
    out.insert(out.end(), {block.size, block.requested_size, uint64_t{block.allocated},
                           uint64_t{block.active}});
  }
}

void put(Words& out, const cca::TraceEntry& entry) {
  out.insert(out.end(), {static_cast<uint64_t>(entry.action_), entry.addr_, entry.size_,
                         as_address(entry.stream_), entry.mempool_.first, entry.mempool_.second});
}

// Word 0 and 1: one pool's segments, or with (0, 0) all of them.
void put_snapshot(Words& out, const Operation& operation) {
  for (const auto& segment : cca::get()->snapshot(pool_id(operation), false).segments) {
    put(out, segment);
  }
}

void put_trace(Words& out) {
  const cca::SnapshotInfo snapshot = cca::get()->snapshot();
  for (const auto& entry : snapshot.device_traces.at(0)) put(out, entry);
}

void put_calls(Words& out) {
  const auto* first = static_cast<const uint64_t*>(bfc_cudart_calls());
  out.assign(first, first + 3 * bfc_cudart_call_count());
}

// The names of the actions to leave out stand in the text, one a line.
void record_history(const Operation& operation) {
  std::vector<std::string> skipped;
  for (std::string_view rest = operation.text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    skipped.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  cca::get()->recordHistory(operation.word[0] != 0, nullptr, operation.word[1],
                            cca::RecordContext::NEVER, false, skipped);
}

// What 2.15 has ----------------------------------------------------------------------------------

#if BFC_TORCH_MINOR >= 13
std::mutex rejections_lock;  // the observer runs in a thread of its own
Words rejections;

void note_rejection(int64_t, size_t asked, size_t allocated, size_t total) {
  const std::lock_guard<std::mutex> held(rejections_lock);
  rejections.insert(rejections.end(), {asked, allocated, total});
}

void mark_capture(bool begins) {
  if (begins) return cca::get()->markCaptureBegin(0);
  cca::get()->markCaptureEnd(0);
}

// Waits until as many were told as were counted.
void put_rejections(Words& out) {
  const auto counted = static_cast<size_t>(cca::get()->getDeviceStats(0).num_oom_rejections);
  for (int tries = 0; tries < 1000; ++tries) {
    {
      const std::lock_guard<std::mutex> held(rejections_lock);
      if (rejections.size() >= 3 * counted) {
        out = rejections;
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error("the observer was not told of every rejection");
}

// On the current stream.
uint64_t malloc_at(const Operation& operation) {
  const auto [address, nbytes, slot, unused] = operation.word;
  slots.table[slot] = nullptr;
  c10::DataPtr data = cca::get()->allocateWithAddress(nbytes, as_pointer(address));
  slots.table[slot] = data.release_context();
  return as_address(slots.table[slot]);
}

bool run_later(const Operation& operation, Words& out) {
  switch (operation.code) {
    case kMarkCapture: mark_capture(operation.word[0] != 0); return true;
    case kRejections: put_rejections(out); return true;
    case kMallocAt: out.push_back(malloc_at(operation)); return true;
    default: return false;
  }
}

void attach_observers() { cca::get()->attachOomRejectionObserver(note_rejection); }
#else
bool run_later(const Operation&, Words&) { return false; }
void attach_observers() {}
#endif

// Replaying ---------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

// The text holds sizes, streams, numbers and kinds, so that each array is aligned.
struct Trace {
  explicit Trace(const Operation& operation)
      : length(operation.word[0]),
        size(reinterpret_cast<const uint64_t*>(operation.text.data())),
        stream(size + length),
        ident(reinterpret_cast<const uint32_t*>(stream + length)),
        op(reinterpret_cast<const uint8_t*>(ident + length)) {}

  const uint64_t length;
  const uint64_t* const size;
  const uint64_t* const stream;
  const uint32_t* const ident;
  const uint8_t* const op;
};

// What fails for lack of memory has address 0; any other failure ends the replay.
void* malloc_or_null(cca::CUDAAllocator& allocator, uint64_t nbytes, uint64_t stream) {
  try {
    return allocator.raw_alloc_with_stream(nbytes, as_stream(stream));
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  }
}

double replay(const Trace& trace, void** table, uint64_t* addresses) {
  cca::CUDAAllocator& allocator = *cca::get();
  const Clock::time_point start = Clock::now();
  for (uint64_t i = 0; i < trace.length; ++i) {
    void*& place = table[trace.ident[i]];
    if (trace.op[i] == 0) {
      place = malloc_or_null(allocator, trace.size[i], trace.stream[i]);
      addresses[i] = as_address(place);
    } else if (trace.op[i] == 2) {
      allocator.emptyCache();
    } else if (place != nullptr) {
      allocator.raw_delete(place);
      place = nullptr;
    }
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The seconds of the loop, and each event's address. Both tables are written once before the clock
// starts, so that no page is touched for the first time inside. A later replay may free what an
// earlier one left live, by the same numbers.
void put_replay(Words& out, const Operation& operation) {
  static std::vector<void*> table;
  table.resize(std::max<size_t>(table.size(), operation.word[1]), nullptr);
  out.assign(operation.word[0] + 1, 0);
  out[0] = std::bit_cast<uint64_t>(replay(Trace(operation), table.data(), out.data() + 1));
}

// Dispatch ----------------------------------------------------------------------------------------

void init() {
  cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  cuda::detail::init_p2p_access_cache(1);
  cca::get()->init(1);
  attach_observers();
}

// Word 2: the kind of call that fails, or any that takes memory.
void fail_at(const Operation& operation) {
  const auto [n, code, kind, unused] = operation.word;
  if (kind == kAnyKind) return bfc_cudart_fail_at(n, code);
  bfc_cudart_fail_kind_at(n, code, kind);
}

// The simulated device's own operations. False: not one of them.
bool run_device(const Operation& operation, Words& out) {
  const auto [first, second, third, fourth] = operation.word;
  switch (operation.code) {
    case kConfigure: {
      const auto* more = reinterpret_cast<const uint64_t*>(operation.text.data());
      bfc_cudart_configure(first, second, third, fourth, more[0], more[1] != 0, more[2]);
      return true;
    }
    case kListAddresses:
      bfc_cudart_list_addresses(reinterpret_cast<const uint64_t*>(operation.text.data()), first);
      return true;
    case kCalls: put_calls(out); return true;
    case kFailAt: fail_at(operation); return true;
    case kResize: bfc_cudart_resize(first); return true;
    case kCapture:
      cuda::setCurrentCUDAStream(external_stream(first));
      bfc_cudart_capture(first, second != 0);
      return true;
    case kCaptureWork: bfc_cudart_capture_work(first); return true;
    case kCaptureWait: bfc_cudart_capture_wait(first, second); return true;
    case kKeepRecords: keeps_records = first != 0; return true;
    case kHold: bfc_cudart_hold(first); return true;
    case kFinish: bfc_cudart_finish(first); return true;
    case kFinishEvents: bfc_cudart_finish_events(first, second); return true;
    case kLiveBytes: out.push_back(bfc_cudart_live_bytes()); return true;
    default: return false;
  }
}

bool run_pool(const Operation& operation, Words& out) {
  const c10::MempoolId_t id = pool_id(operation);
  switch (operation.code) {
    case kEmptyCache: cca::get()->emptyCache(id); return true;
    case kCreatePool: create_pool(operation); return true;
    case kBeginPool: begin_pool(operation); return true;
    case kEndPool: cca::get()->endAllocateToPool(0, id); return true;
    case kReleasePool: cca::get()->releasePool(0, id); return true;
    case kPoolUseCount:
      out.push_back(static_cast<uint64_t>(cca::get()->getPoolUseCount(0, id)));
      return true;
    case kSetUseOnOom: cca::get()->setUseOnOOM(0, id, operation.word[2] != 0); return true;
    case kSetNoSplit: cca::get()->setNoSplit(0, id); return true;
    default: return false;
  }
}

bool run_report(const Operation& operation, Words& out) {
  switch (operation.code) {
    case kResetPeakStats: cca::get()->resetPeakStats(0); return true;
    case kResetAccumulatedStats: cca::get()->resetAccumulatedStats(0); return true;
    case kStats: put(out, cca::get()->getDeviceStats(0)); return true;
    case kSnapshot: put_snapshot(out, operation); return true;
    case kRecordHistory: record_history(operation); return true;
    case kTrace: put_trace(out); return true;
    case kReplay: put_replay(out, operation); return true;
    default: return false;
  }
}

void run_block(const Operation& operation, Words& out) {
  const auto& word = operation.word;
  switch (operation.code) {
    case kInit: return init();
    case kMalloc: out.push_back(malloc_into(malloc_raw, operation)); return;
    case kAllocate: out.push_back(malloc_into(malloc_for_tensor, operation)); return;
    case kFree: return cca::get()->raw_delete(as_pointer(word[0]));
    case kFreeSlot: return free_slot(word[0]);
    case kRecordStream: return record_stream(as_pointer(word[0]), word[1]);
    case kRecordStreamSlot: return record_stream(slots.at(word[0]), word[1]);
    case kSetSettings:
      return c10::CachingAllocator::setAllocatorSettings(std::string(operation.text));
    case kSetMemoryFraction:
      return cca::get()->setMemoryFraction(std::bit_cast<double>(word[0]), 0);
    case kMemoryFraction:
      out.push_back(std::bit_cast<uint64_t>(cca::get()->getMemoryFraction(0)));
      return;
    case kEnable: return cca::get()->enable(word[0] != 0);
    default: throw std::invalid_argument("no such operation");
  }
}

// Upstream has no class of its own for what the driver refuses, as it has for the runtime.
server::Status kind_of(const c10::Error& error) {
  const std::string_view text = error.what_without_backtrace();
  return text.starts_with("CUDA driver error") ? server::kDriver : server::kInternal;
}

// Errors as values. The order is that of the classes: each of upstream's derives from c10::Error.
Result run(const Operation& operation) {
  Result result;
  try {
    if (!run_device(operation, result.words) && !run_pool(operation, result.words) &&
        !run_report(operation, result.words) && !run_later(operation, result.words)) {
      run_block(operation, result.words);
    }
    return result;
  } catch (const c10::OutOfMemoryError& error) {
    return failure(server::kOom, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return failure(server::kValue, error.what_without_backtrace());
  } catch (const c10::AcceleratorError& error) {
    return failure(server::kDriver, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return failure(kind_of(error), error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failure(server::kOther, error.what());
  }
}

}  // namespace

int main() { server::serve(run); }
