// A C interface to the compiled tsl::BFCAllocator, over a device that hands out integers.
// BFC_TF_ENDS is 1 for the versions that place requests from two ends, and honour alignments.
//
// Nothing behind an address is ever touched: upstream keeps its books outside the memory it manages,
// so any number will do as a pointer.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/json/json.h"
#include "xla/tsl/framework/bfc_allocator.h"
#include "xla/tsl/framework/shared_counter.h"
#include "xla/tsl/protobuf/bfc_memory_map.pb.h"

namespace {

constexpr size_t kAlignment = tsl::Allocator::kAllocatorAlignment;
constexpr int kStats = 11;
constexpr int kChunkFields = 6;

void* as_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }
uint64_t as_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

struct Call {
  uint64_t kind;  // 0 alloc, 1 free
  uint64_t nbytes;
  uint64_t address;  // 0 when refused
};

}  // namespace

extern "C" {

// Mirrored field by field by `_Options` in tensorflow.py: eight-byte fields only, so no padding.
struct bfc_tf_options {
  uint64_t memory_limit;
  uint64_t capacity;
  uint64_t base;
  uint64_t alignment;
  uint64_t gap;
  uint64_t max_bytes;  // 0: no maximum
  uint64_t overdeliver;
  double fragmentation_fraction;
  uint64_t allow_growth;
  uint64_t garbage_collection;
  uint64_t supports_coalescing;
  uint64_t timing_counter;
  uint64_t granularity;   // from here on: with two ends alone
  uint64_t partitioned;
  uint64_t initial_region_bytes;
  uint64_t lower_policy;  // bits: 1 the highest address first, 2 holes are split exactly, 4 so is the gap
  uint64_t upper_policy;
};

}  // extern "C"

namespace {

// The simulated device. It outlives the allocator, so that the frees of the allocator's destructor
// can still be read from the log.
struct Device {
  explicit Device(const bfc_tf_options& options) : options(options), next(options.base) {}

  bool refuses(uint64_t nbytes) {
    if (fail_in != 0 && --fail_in == 0) return true;
    if (options.max_bytes != 0 && nbytes > options.max_bytes) return true;
    // 128 bits, so that a limit near 2^64 cannot wrap past the capacity.
    return static_cast<unsigned __int128>(live_bytes) + nbytes > options.capacity;
  }

  void* alloc(uint64_t alignment, uint64_t nbytes, size_t* received) {
    *received = 0;
    if (refuses(nbytes)) {
      calls.push_back({0, nbytes, 0});
      return nullptr;
    }
    const uint64_t step = std::max(options.alignment, alignment);
    const uint64_t address = (next + step - 1) / step * step;
    const uint64_t padded = (nbytes + options.granularity - 1) / options.granularity * options.granularity;
    *received = padded + options.overdeliver;
    next = address + *received + options.gap;
    live_bytes += *received;
    calls.push_back({0, nbytes, address});
    return as_pointer(address);
  }

  // One range may span several allocs: upstream joins touching regions when coalescing is on.
  void free(void* pointer, uint64_t nbytes) {
    live_bytes -= nbytes;
    calls.push_back({1, nbytes, as_address(pointer)});
  }

  const bfc_tf_options options;
  uint64_t next;
  uint64_t live_bytes = 0;
  uint64_t fail_in = 0;
  std::vector<Call> calls;
};

class IntegerSubAllocator : public tsl::SubAllocator {
 public:
  explicit IntegerSubAllocator(Device* device) : tsl::SubAllocator({}, {}), device_(device) {}

  void* Alloc(size_t alignment, size_t nbytes, size_t* received) override {
    return device_->alloc(alignment, nbytes, received);
  }
  void Free(void* pointer, size_t nbytes) override { device_->free(pointer, nbytes); }
  bool SupportsCoalescing() const override { return device_->options.supports_coalescing != 0; }
#if BFC_TF_ENDS
  size_t GetAllocationGranularity() const override { return device_->options.granularity; }
#endif

 private:
  Device* const device_;
};

#if BFC_TF_ENDS
tsl::BFCAllocator::AllocationPolicy policy_of(uint64_t bits) {
  using Allocator = tsl::BFCAllocator;
  const auto split = [bits](uint64_t bit) {
    return bits & bit ? Allocator::SplitPolicy::kExact : Allocator::SplitPolicy::kRetainPadding;
  };
  return {bits & 1 ? Allocator::HoleOrder::kDescendingAddress : Allocator::HoleOrder::kAscendingAddress,
          split(2), split(4)};
}
#endif

// What a request says besides its size and alignment. `end` is 1 for the upper end.
tsl::AllocationAttributes attributes_of(std::function<uint64_t()>* freed_by, uint64_t end) {
#if BFC_TF_ENDS
  return {false, false, freed_by, end ? tsl::AllocationEnd::kUpper : tsl::AllocationEnd::kLower};
#else
  (void)end;
  return {false, false, freed_by};
#endif
}

std::unique_ptr<tsl::BFCAllocator> make_allocator(Device* device) {
  const bfc_tf_options& options = device->options;
  tsl::BFCAllocator::Options upstream;
  upstream.allow_growth = options.allow_growth != 0;
  upstream.allow_retry_on_failure = false;  // a lone thread would sleep for ten seconds
  upstream.garbage_collection = options.garbage_collection != 0;
  upstream.fragmentation_fraction = options.fragmentation_fraction;
#if BFC_TF_ENDS
  upstream.enable_spatial_partitioning = options.partitioned != 0;
  upstream.initial_region_bytes = options.initial_region_bytes;
  upstream.lower_end_policy = policy_of(options.lower_policy);
  upstream.upper_end_policy = policy_of(options.upper_policy);
#endif
  return std::make_unique<tsl::BFCAllocator>(std::make_unique<IntegerSubAllocator>(device),
                                             options.memory_limit, "bfc_peer", upstream);
}

using Clock = std::chrono::steady_clock;

struct Trace {
  const uint8_t* op;
  const uint32_t* ident;
  const uint64_t* size;
  const uint64_t* freed_before;  // may be null
  const uint8_t* end;            // so may this
  size_t length;
};

// A template, so that a trace without constraints or ends pays nothing for those that have them.
template <bool kConstrained, bool kEnds>
double replay(tsl::BFCAllocator& allocator, const Trace& trace, void** table,
              uint64_t* addresses) {
  uint64_t frontier = 0;
  std::function<uint64_t()> freed_by = [&frontier] { return frontier; };
  const tsl::AllocationAttributes attributes = attributes_of(kConstrained ? &freed_by : nullptr, 0);
  const tsl::AllocationAttributes upper = attributes_of(kConstrained ? &freed_by : nullptr, 1);
  const Clock::time_point start = Clock::now();
  for (size_t i = 0; i < trace.length; ++i) {
    const uint32_t ident = trace.ident[i];
    if (trace.op[i] == 0) {
      if (kConstrained) frontier = trace.freed_before[i];
      void* pointer =
          allocator.AllocateRaw(kAlignment, trace.size[i], kEnds && trace.end[i] ? upper : attributes);
      table[ident] = pointer;
      addresses[i] = as_address(pointer);
    } else if (table[ident] != nullptr) {
      allocator.DeallocateRaw(table[ident]);
    }
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// With every field, also those that are 0.
const char* write_json(const tensorflow::MemoryDump& dump, std::string* text) {
  google::protobuf::json::PrintOptions options;
  options.always_print_fields_with_no_presence = true;
  text->clear();
  const bool is_written = google::protobuf::json::MessageToJsonString(dump, text, options).ok();
  return is_written ? text->c_str() : nullptr;
}

}  // namespace

extern "C" {

// Declared in this order so that the allocator goes first and the device last.
struct bfc_tf_peer {
  explicit bfc_tf_peer(const bfc_tf_options& options)
      : device(options), allocator(make_allocator(&device)) {
    if (options.timing_counter != 0) allocator->SetTimingCounter(&counter);
  }

  Device device;
  tsl::SharedCounter counter;
  std::unique_ptr<tsl::BFCAllocator> allocator;
  std::vector<uint64_t> chunks;
  std::string json;
};

bfc_tf_peer* bfc_tf_new(const bfc_tf_options* options) { return new bfc_tf_peer(*options); }

// Destroys the allocator only: the log stays readable until bfc_tf_delete.
void bfc_tf_close(bfc_tf_peer* peer) { peer->allocator.reset(); }

void bfc_tf_delete(bfc_tf_peer* peer) { delete peer; }

uint64_t bfc_tf_allocate(bfc_tf_peer* peer, uint64_t nbytes, uint64_t freed_before, uint64_t alignment,
                         uint64_t end) {
  std::function<uint64_t()> freed_by = [freed_before] { return freed_before; };
  const tsl::AllocationAttributes attributes = attributes_of(freed_before ? &freed_by : nullptr, end);
  return as_address(peer->allocator->AllocateRaw(alignment ? alignment : kAlignment, nbytes, attributes));
}

void bfc_tf_deallocate(bfc_tf_peer* peer, uint64_t address) {
  peer->allocator->DeallocateRaw(as_pointer(address));
}

void bfc_tf_stats(bfc_tf_peer* peer, int64_t* out) {
  const tsl::AllocatorStats stats = peer->allocator->GetStats().value();
  const int64_t values[kStats] = {stats.num_allocs,
                                  stats.bytes_in_use,
                                  stats.peak_bytes_in_use,
                                  stats.largest_alloc_size,
                                  stats.bytes_limit.value_or(0),
                                  stats.pool_bytes.value_or(0),
                                  stats.peak_pool_bytes.value_or(0),
                                  stats.bytes_reserved,
                                  stats.peak_bytes_reserved,
                                  stats.largest_free_block_bytes,
#if BFC_TF_ENDS
                                  stats.peak_allocated_bytes};
#else
                                  stats.peak_bytes_in_use};
#endif
  std::copy(values, values + kStats, out);
}

void bfc_tf_clear_stats(bfc_tf_peer* peer) { (void)!peer->allocator->ClearStats(); }

uint64_t bfc_tf_requested_size(bfc_tf_peer* peer, uint64_t address) {
  return peer->allocator->RequestedSize(as_pointer(address));
}

uint64_t bfc_tf_allocated_size(bfc_tf_peer* peer, uint64_t address) {
  return peer->allocator->AllocatedSize(as_pointer(address));
}

int64_t bfc_tf_allocation_id(bfc_tf_peer* peer, uint64_t address) {
  return peer->allocator->AllocationId(as_pointer(address));
}

void bfc_tf_set_safe_frontier(bfc_tf_peer* peer, uint64_t count) {
  peer->allocator->SetSafeFrontier(count);
}

void bfc_tf_fail_at(bfc_tf_peer* peer, uint64_t n) { peer->device.fail_in = n; }

uint64_t bfc_tf_call_count(bfc_tf_peer* peer) { return peer->device.calls.size(); }

// Three numbers a call: kind, bytes asked, address.
void bfc_tf_copy_calls(bfc_tf_peer* peer, uint64_t* out) {
  for (const Call& call : peer->device.calls) {
    *out++ = call.kind;
    *out++ = call.nbytes;
    *out++ = call.address;
  }
}

// Takes a memory map, keeps it, and says how many chunks it has.
uint64_t bfc_tf_map_chunks(bfc_tf_peer* peer) {
  const tensorflow::MemoryDump dump = peer->allocator->RecordMemoryMap();
  peer->chunks.clear();
  peer->chunks.reserve(static_cast<size_t>(dump.chunk_size()) * kChunkFields);
  for (const tensorflow::MemChunk& chunk : dump.chunk()) {
    const int64_t bin = chunk.bin();
    peer->chunks.insert(peer->chunks.end(),
                        {chunk.address(), static_cast<uint64_t>(chunk.size()),
                         static_cast<uint64_t>(chunk.requested_size()), static_cast<uint64_t>(bin),
                         chunk.freed_at_count(), static_cast<uint64_t>(chunk.in_use())});
  }
  return peer->chunks.size() / kChunkFields;
}

// Six numbers a chunk: address, size, requested size, bin, freed at, in use.
void bfc_tf_copy_chunks(bfc_tf_peer* peer, int64_t* out) {
  std::transform(peer->chunks.begin(), peer->chunks.end(), out,
                 [](uint64_t value) { return static_cast<int64_t>(value); });
}

// The memory map as protobuf's JSON. The text stays until the next call.
const char* bfc_tf_dump(bfc_tf_peer* peer) {
  return write_json(peer->allocator->RecordMemoryMap(), &peer->json);
}

// Reads JSON into upstream's message, and writes it again. Null: it has a field too many, or is none.
const char* bfc_tf_read_dump(bfc_tf_peer* peer, const char* text) {
  tensorflow::MemoryDump dump;
  const bool is_read = google::protobuf::json::JsonStringToMessage(text, &dump).ok();
  return is_read ? write_json(dump, &peer->json) : nullptr;
}

// Returns the seconds spent in the loop. The table and `addresses` are written once before the
// clock starts, so that no page is touched for the first time inside.
double bfc_tf_replay(bfc_tf_peer* peer, const uint8_t* op, const uint32_t* ident,
                     const uint64_t* size, const uint64_t* freed_before, const uint8_t* end,
                     uint64_t length, uint64_t idents, uint64_t* addresses) {
  std::vector<void*> table(idents, nullptr);
  std::fill(addresses, addresses + length, 0);
  const Trace trace{op, ident, size, freed_before, end, length};
  const auto play = freed_before != nullptr ? (end != nullptr ? replay<true, true> : replay<true, false>)
                                            : (end != nullptr ? replay<false, true> : replay<false, false>);
  return play(*peer->allocator, trace, table.data(), addresses);
}

}  // extern "C"
