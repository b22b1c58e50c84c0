// A device with nothing behind it: it hands out integers and writes down what was asked. One thread
// drives it; nothing here is locked.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace simulated {

// As CUDA's runtime numbers them, and its driver the first two.
constexpr uint64_t kInvalidValue = 1;
constexpr uint64_t kOutOfMemory = 2;
constexpr uint64_t kUnknown = 999;

// Mirrored by `CALLS` in server.py.
enum Kind : uint64_t {
  kMalloc,
  kFree,
  kEventRecord,
  kEventQuery,
  kEventSynchronize,
  kDeviceSynchronize,
  kStreamSynchronize,
  kReserve,
  kUnreserve,
  kCreate,
  kRelease,
  kMap,
  kUnmap,
  kSetAccess,
  kPoolMalloc,
  kPoolFree,
  kHostMalloc,
  kHostFree,
  kKinds,
};

// Where the next block lies. Mirrored by `PLACEMENTS` in torch.py.
enum Placement : uint64_t { kRise, kReuse, kFall };

// What is refused on order: the `in`-th call from now, with this error.
struct Fault {
  uint64_t in = 0;
  uint64_t code = 0;
};

struct Call {
  uint64_t kind;
  uint64_t first;
  uint64_t second;
};

// The work of a stream: how many events were recorded there, and how many of them are over.
struct Stream {
  uint64_t recorded = 0;
  uint64_t finished = 0;
  bool held = false;
  uint64_t capture = 0;             // the number of the capture that it belongs to; 0: none
  std::vector<uint64_t> terminals;  // the nodes that its next one depends on
};

struct Event {
  uint64_t number;  // counted from 1, as events are made
  uint64_t stream = 0;
  uint64_t position = 0;  // among its stream's events
};

struct Mapping {
  uint64_t nbytes = 0;
  uint64_t handle = 0;
  bool accessible = false;
};

struct Device {
  uint64_t capacity = 80ull << 30;
  uint64_t alignment = 2 << 20;
  uint64_t gap = 0;
  uint64_t next = 1ull << 40;
  uint64_t base = 1ull << 40;
  Placement placement = kRise;
  uint64_t next_reserved = 1ull << 44;
  uint64_t next_handle = 1;
  uint64_t live_bytes = 0;
  Fault growth;                          // among the calls that take memory, of any kind
  std::array<Fault, kKinds> faults = {};  // among the calls of one kind
  bool listed = false;  // addresses come from `addresses` alone
  std::vector<uint64_t> addresses;
  size_t next_listed = 0;
  uint64_t events = 0;
  std::map<uint64_t, uint64_t> blocks;             // address to bytes, in address order
  std::unordered_map<uint64_t, uint64_t> handles;  // physical piece to bytes
  std::map<uint64_t, uint64_t> reserved;           // address to bytes, in address order
  std::map<uint64_t, Mapping> mapped;              // by address, in address order
  std::unordered_map<uint64_t, Stream> streams;
  uint64_t captures = 0;                        // that were begun
  std::vector<std::vector<uint64_t>> parents;  // of each node of a graph; nodes count from 1
  std::vector<Call> calls;
};

inline Device& device() {
  static Device* const made = new Device;  // never destroyed: upstream still calls at exit
  return *made;
}

inline void log(Kind kind, uint64_t first = 0, uint64_t second = 0) {
  device().calls.push_back({kind, first, second});
}

inline uint64_t strike(Fault& fault) {
  return fault.in != 0 && --fault.in == 0 ? fault.code : 0;
}

// The error that is on order for this call, 0 for none.
inline uint64_t ordered_fault(Kind kind) { return strike(device().faults[kind]); }

// The error that a growth of `nbytes` meets, 0 for none.
inline uint64_t refusal(Kind kind, uint64_t nbytes) {
  Device& it = device();
  const uint64_t own = ordered_fault(kind);
  if (const uint64_t error = strike(it.growth)) return error;
  if (own != 0) return own;
  const unsigned __int128 wanted = static_cast<unsigned __int128>(it.live_bytes) + nbytes;
  return wanted > it.capacity ? kOutOfMemory : 0;
}

inline uint64_t aligned(uint64_t address) {
  const uint64_t alignment = device().alignment;
  return (address + alignment - 1) / alignment * alignment;
}

inline uint64_t rising_address(uint64_t nbytes) {
  Device& it = device();
  const uint64_t address = aligned(it.next);
  it.next = address + nbytes + it.gap;
  return address;
}

// Below the last one.
inline uint64_t falling_address(uint64_t nbytes) {
  Device& it = device();
  it.next = (it.next - nbytes - it.gap) / it.alignment * it.alignment;
  return it.next;
}

// The lowest one from the base on with room for the block and its gap.
inline uint64_t first_gap(uint64_t nbytes) {
  const Device& it = device();
  uint64_t address = aligned(it.base);
  for (const auto& [start, size] : it.blocks) {
    if (address + nbytes + it.gap <= start) break;
    address = std::max(address, aligned(start + size + it.gap));
  }
  return address;
}

inline uint64_t next_address(uint64_t nbytes) {
  if (device().placement == kReuse) return first_gap(nbytes);
  return device().placement == kFall ? falling_address(nbytes) : rising_address(nbytes);
}

// The next recorded address; 0 stands for a call that was refused when the list was recorded.
inline uint64_t listed_address(uint64_t* address) {
  Device& it = device();
  if (it.next_listed == it.addresses.size()) return kUnknown;
  *address = it.addresses[it.next_listed++];
  return *address == 0 ? kOutOfMemory : 0;
}

inline uint64_t place(Kind kind, uint64_t nbytes, uint64_t* address) {
  if (const uint64_t error = refusal(kind, nbytes)) return error;
  if (device().listed) return listed_address(address);
  *address = next_address(nbytes);
  return 0;
}

// The error, 0 for none.
inline uint64_t grow(Kind kind, uint64_t nbytes, uint64_t* address) {
  *address = 0;
  const uint64_t error = place(kind, nbytes, address);
  log(kind, nbytes, *address);
  if (error != 0) return error;
  device().live_bytes += nbytes;
  device().blocks[*address] = nbytes;
  return 0;
}

inline uint64_t shrink(Kind kind, uint64_t address) {
  Device& it = device();
  const auto found = it.blocks.find(address);
  const bool known = found != it.blocks.end();
  log(kind, known ? found->second : 0, address);
  if (!known) return kInvalidValue;
  it.live_bytes -= found->second;
  it.blocks.erase(found);
  return 0;
}

// What is free; 0 where the device was made smaller than what is live.
inline uint64_t free_bytes() {
  const Device& it = device();
  return it.capacity - std::min(it.capacity, it.live_bytes);
}

inline bool ready(const Event& event) {
  return event.position <= device().streams[event.stream].finished;
}

// Waiting is what lets a stream finish, since nothing else runs here.
inline void finish(Stream& stream) {
  stream.finished = stream.recorded;
  stream.held = false;
}

// The event is behind all that was recorded on the stream so far.
inline void record(Event& event, uint64_t stream) {
  Stream& it = device().streams[stream];
  event.stream = stream;
  event.position = ++it.recorded;
  if (!it.held) it.finished = it.recorded;
  log(kEventRecord, event.number, stream);
}

inline bool query(const Event& event) {
  const bool over = ready(event);
  log(kEventQuery, event.number, over);
  return over;
}

// The `count` oldest of the stream's unfinished events are over; the stream stays as it is.
inline void finish_events(Stream& stream, uint64_t count) {
  stream.finished += std::min(count, stream.recorded - stream.finished);
}

// A stream begins to capture, unless it captures already.
inline void begin_capture(uint64_t stream) {
  Stream& it = device().streams[stream];
  if (it.capture == 0) it.capture = ++device().captures;
}

// Ends the capture of a stream, and of all that have joined it.
inline void end_capture(uint64_t stream) {
  const uint64_t ended = device().streams[stream].capture;
  if (ended == 0) return;
  for (auto& [handle, it] : device().streams) {
    if (it.capture != ended) continue;
    it.capture = 0;
    it.terminals.clear();
  }
}

// A capturing stream is given something to do, which becomes a node.
inline void add_node(uint64_t stream) {
  Stream& it = device().streams[stream];
  device().parents.push_back(it.terminals);
  it.terminals = {device().parents.size()};
}

// A stream waits for a capturing one, and joins its capture.
inline void join_capture(uint64_t stream, uint64_t on) {
  const Stream other = device().streams[on];
  Stream& it = device().streams[stream];
  it.capture = other.capture;
  for (const uint64_t node : other.terminals) {
    if (std::ranges::find(it.terminals, node) == it.terminals.end()) it.terminals.push_back(node);
  }
}

}  // namespace simulated
