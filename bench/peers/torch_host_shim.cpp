// A server to at::CachingHostAllocatorImpl, PyTorch's policy for pinned memory, which is a template
// in a header. What the header leaves to a backend is ours here: streams, events, and host memory
// of a simulated device.
//
// The functions of c10 that the header can call are at the end. The others that its classes name
// are never called and stay unresolved: a call would end the server.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/ApproximateClock.h>

#include "server.hpp"
#include "simulated_device.hpp"

namespace {

using server::Operation;
using server::Result;
using server::Words;

// Mirrored by `_CODES` in torch_host.py, in this order.
enum Code : uint64_t {
  kConfigure,
  kLimit,
  kReserve,
  kAllocate,
  kFree,
  kRecordEvent,
  kEmptyCache,
  kStats,
  kResetPeakStats,
  kResetAccumulatedStats,
  kCalls,
  kFailAt,
  kHold,
  kFinish,
  kFinishEvents,
  kLiveBytes,
};

constexpr uint64_t kNoSlot = ~uint64_t{0};

// Upstream walks the set of a block's streams in the order of their hashes, which is any order. Here
// a hash is the place among the streams recorded on the block, so that the walk is in that order.
using Places = std::unordered_map<uint64_t, uint64_t>;

Places* places_now = nullptr;

c10::Stream named(uint64_t handle) {
  const c10::Device device(c10::DeviceType::CUDA, 0);
  return c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(handle));
}

struct Stream {
  explicit Stream(c10::Stream stream) : handle(static_cast<uint64_t>(stream.id())) {
    place = places_now->try_emplace(handle, places_now->size()).first->second;
  }
  operator c10::Stream() const { return named(handle); }
  bool operator==(const Stream& other) const { return handle == other.handle; }

  uint64_t handle;
  uint64_t place;
};

}  // namespace

template <>
struct std::hash<Stream> {
  using hash_policy = ska::power_of_two_hash_policy;  // the hash itself, as a place in the table
  size_t operator()(const Stream& stream) const { return stream.place; }
};

namespace {

using Event = std::unique_ptr<simulated::Event>;
using Block = at::HostBlock<Stream>;

// The part of a backend. What each of its functions does is CUDA's, as far as the device goes.
class Allocator final : public at::CachingHostAllocatorImpl<Stream, Event> {
 public:
  // Later versions ask for these two, and know them for their own.
  size_t pinned_max_round_threshold() const { return round_at_most; }
  size_t pinned_max_cached_size() const { return cached_at_most; }
  bool pinned_use_background_threads() override { return false; }

  size_t round_at_most = ~size_t{0};
  size_t cached_at_most = ~size_t{0};
  size_t reserve_bytes = 0;

 private:
  // The reserve is made at the first call, and its pieces are given out by upstream's own class.
  void allocate_host_memory(size_t nbytes, void** pointer) override {
    if (reserve_bytes != 0 && reserve_ == nullptr) {
      void* const start = from_device(reserve_bytes);
      reserve_ = std::make_unique<at::PinnedReserveSegment>(start, reserve_bytes);
    }
    *pointer = reserve_ == nullptr ? nullptr : reserve_->allocate(nbytes);
    if (*pointer == nullptr) *pointer = from_device(nbytes);
  }

  void free_block(Block* block) override {
    if (reserve_ != nullptr && reserve_->owns(block->ptr_)) return;
    if (simulated::shrink(simulated::kHostFree, reinterpret_cast<uint64_t>(block->ptr_)) != 0) {
      throw std::runtime_error("not a block of the device");
    }
    stats_.host_free_time.increase(microseconds());
  }

  void record_stream(std::optional<std::vector<Event>>& events, Stream stream) override {
    auto event = std::make_unique<simulated::Event>(++simulated::device().events);
    simulated::record(*event, stream.handle);
    events->push_back(std::move(event));
  }

  bool query_event(Event& event) override { return simulated::query(*event); }

  void* from_device(size_t nbytes) {
    uint64_t address = 0;
    if (simulated::grow(simulated::kHostMalloc, nbytes, &address) != 0) throw std::bad_alloc();
    stats_.host_alloc_time.increase(microseconds());
    return reinterpret_cast<void*>(address);
  }

  // What a call is said to have taken. Mirrored by `microseconds` in torch_host.py.
  static int64_t microseconds() { return simulated::device().calls.size() * 5 % 7; }

  std::unique_ptr<at::PinnedReserveSegment> reserve_;
};

Allocator& allocator() {
  static auto* const made = new Allocator;
  return *made;
}

// Driving -----------------------------------------------------------------------------------------

struct Slot {
  void* pointer = nullptr;
  void* context = nullptr;
};

std::unordered_map<uint64_t, Slot> slots;
std::unordered_map<void*, Places> places;  // by context

uint64_t allocate(uint64_t nbytes, uint64_t slot) {
  const auto [pointer, context] = allocator().allocate(nbytes);
  slots[slot] = {pointer, context};
  return reinterpret_cast<uint64_t>(pointer);
}

// The slot stays, so that what is done to a block that was freed can be seen.
void free_slot(uint64_t slot) {
  void* const context = slots.at(slot).context;
  places.erase(context);
  allocator().free(context);
}

// The address is a slot's and an offset; the context another slot's, or none.
bool record_event(uint64_t slot, uint64_t offset, uint64_t owner, uint64_t stream) {
  void* const context = owner == kNoSlot ? nullptr : slots.at(owner).context;
  places_now = &places[context == nullptr ? slots.at(slot).context : context];
  void* const pointer = static_cast<char*>(slots.at(slot).pointer) + offset;
  return allocator().record_event(pointer, context, named(stream));
}

void put_stats(Words& out) {
  const at::HostStats stats = allocator().getStats();
  for (const auto* stat : {&stats.allocations, &stats.allocated_bytes, &stats.active_requests,
                           &stats.active_bytes}) {
    for (const int64_t value : {stat->current, stat->peak, stat->allocated, stat->freed}) {
      out.push_back(static_cast<uint64_t>(value));
    }
  }
  for (const auto* stat : {&stats.host_alloc_time, &stats.host_free_time}) {
    for (const int64_t value : {stat->total, stat->max, stat->min, stat->count}) {
      out.push_back(static_cast<uint64_t>(value));
    }
  }
  out.push_back(static_cast<uint64_t>(stats.num_host_alloc));
  out.push_back(static_cast<uint64_t>(stats.num_host_free));
}

void put_calls(Words& out) {
  for (const auto& call : simulated::device().calls) {
    out.insert(out.end(), {call.kind, call.first, call.second});
  }
}

void configure(uint64_t capacity, uint64_t base, uint64_t alignment) {
  simulated::device().capacity = capacity;
  simulated::device().next = base;
  simulated::device().alignment = alignment;
}

// False: not one of them.
bool run_device(const Operation& operation, Words& out) {
  const auto [first, second, third, fourth] = operation.word;
  simulated::Device& device = simulated::device();
  switch (operation.code) {
    case kConfigure: configure(first, second, third); return true;
    case kCalls: put_calls(out); return true;
    case kFailAt: device.growth = {first, second}; return true;
    case kHold: device.streams[first].held = true; return true;
    case kFinish: simulated::finish(device.streams[first]); return true;
    case kFinishEvents: simulated::finish_events(device.streams[first], second); return true;
    case kLiveBytes: out.push_back(device.live_bytes); return true;
    default: return false;
  }
}

void run_allocator(const Operation& operation, Words& out) {
  const auto [first, second, third, fourth] = operation.word;
  switch (operation.code) {
    case kLimit:
      allocator().round_at_most = first;
      allocator().cached_at_most = second;
      return;
    case kReserve: allocator().reserve_bytes = first; return;
    case kAllocate: out.push_back(allocate(first, second)); return;
    case kFree: return free_slot(first);
    case kRecordEvent: out.push_back(record_event(first, second, third, fourth)); return;
    case kEmptyCache: return allocator().empty_cache();
    case kStats: put_stats(out); return;
    case kResetPeakStats: return allocator().resetPeakStats();
    case kResetAccumulatedStats: return allocator().resetAccumulatedStats();
    default: throw std::invalid_argument("no such operation");
  }
}

// An error that upstream found in itself or in its caller.
struct Internal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Result run(const Operation& operation) {
  Result result;
  try {
    if (!run_device(operation, result.words)) run_allocator(operation, result.words);
    return result;
  } catch (const std::bad_alloc&) {
    return server::failure(server::kOom, "out of memory");
  } catch (const Internal& error) {
    return server::failure(server::kInternal, error.what());
  } catch (const std::exception& error) {
    return server::failure(server::kOther, error.what());
  }
}

}  // namespace

// What the header calls of c10's library ----------------------------------------------------------

// For the times in a trace, of which there is none.
c10::ApproximateClockToUnixTimeConverter::ApproximateClockToUnixTimeConverter() = default;

namespace c10::detail {

void torchCheckFail(const char*, const char*, uint32_t, const char* text) { throw Internal(text); }

void torchInternalAssertFail(const char*, const char*, uint32_t, const char* condition,
                             const char*) {
  throw Internal(condition);
}

}  // namespace c10::detail

int main() { server::serve(run); }
