// A device "cuda" of which nothing is used but its name: what PyTorch asks before it lets tensors that are only shapes
// through autograd. A program that runs a prediction need not have a compiler, so this is compiled without PyTorch's
// headers. It lays out both tables of virtual functions as the Itanium C++ ABI says, which GCC and clang follow.
//
// 1. The guard of the device, in c10's registry. PyTorch's engine asks it for devices and streams. Its functions stand in
//    an order that differs between releases: the caller names them.
// 2. The hooks of CUDA. Their object stays; its pointer to virtual functions becomes that to a copy of the plain table, in
//    which some functions are ours, and answer how many devices there are.
//
// Both are put back by remove().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace bfc::fake_device {

// c10::Device and c10::Stream as they are passed and returned: in registers.
struct Device {
  std::int8_t type, index;
};
struct Stream {
  Device device;
  std::int64_t id;
};
constexpr std::int8_t CUDA = 1;

// The number of the device, as the program calls it, and how many there are.
inline std::int8_t number = 0, count = 1;
// The stream of each thread. PyTorch's engine sets that of the forward pass for the backward pass.
inline thread_local std::int64_t current_stream = 0;

using Self = const void*;
inline Device device(Self) { return {CUDA, number}; }
inline Stream stream_of(std::int64_t id) { return {{CUDA, number}, id}; }

// -- what the guard answers ---------------------------------------------------------------------------------------------
inline std::int8_t type(Self) { return CUDA; }
inline Device exchange_device(Self, Device) { return {CUDA, number}; }
inline void set_device(Self, Device) {}
inline Stream get_stream(Self, Device) { return stream_of(current_stream); }
inline Stream default_stream(Self, Device) { return stream_of(0); }
inline Stream pooled_stream(Self, Device, bool) { return stream_of(0); }
inline Stream exchange_stream(Self, Stream stream) {
  const auto before = current_stream;
  current_stream = stream.id;
  return stream_of(before);
}
inline std::int8_t device_count(Self) { return count; }
// Nothing runs, so that every event is done as soon as it is recorded.
inline void record(Self, void** event, const void*, std::int8_t, int) { *event = nullptr; }
inline void destroy_event(Self, void*, std::int8_t) {}
inline void block(Self, void*, const void*) {}
inline bool done(Self, const void*) { return true; }
inline bool not_so(Self, const void*) { return false; }
inline void waited(Self, const void*) {}
inline void of_device(Self, std::int8_t) {}
inline void of_data(Self, const void*, const void*) {}
inline void refused(Self) { throw std::runtime_error("a predicted device cannot do this"); }

// -- what the hooks answer ----------------------------------------------------------------------------------------------
inline bool yes(Self) { return true; }
inline bool has_context(Self, std::int8_t) { return true; }
inline void init(Self) {}
inline std::int8_t current_device(Self) { return number; }
inline int number_of_gpus(Self) { return count; }

struct Named {
  const char* name;
  void* function;
};

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

inline const std::vector<Named>& guard_functions() {
  static const std::vector<Named> all{
      {"type", address(type)},
      {"exchangeDevice", address(exchange_device)},
      {"getDevice", address(device)},
      {"setDevice", address(set_device)},
      {"uncheckedSetDevice", address(set_device)},
      {"getStream", address(get_stream)},
      {"getDefaultStream", address(default_stream)},
      {"getStreamFromGlobalPool", address(pooled_stream)},
      {"getNewStream", address(refused)},
      {"exchangeStream", address(exchange_stream)},
      {"getStreamNativeHandle", address(refused)},
      {"destroyEvent", address(destroy_event)},
      {"record", address(record)},
      {"block", address(block)},
      {"queryEvent", address(done)},
      {"deviceCount", address(device_count)},
      {"getDeviceCapability", address(refused)},
      {"queryStream", address(done)},
      {"synchronizeStream", address(waited)},
      {"isStreamCapturing", address(not_so)},
      {"synchronizeEvent", address(waited)},
      {"synchronizeDevice", address(of_device)},
      {"recordDataPtrOnStream", address(of_data)},
      {"elapsedTime", address(refused)},
  };
  return all;
}

inline const std::vector<Named>& hooks_functions() {
  static const std::vector<Named> all{
      {"isBuilt", address(yes)},
      {"isAvailable", address(yes)},
      {"hasPrimaryContext", address(has_context)},
      {"init", address(init)},
      {"deviceCount", address(device_count)},
      {"getCurrentDevice", address(current_device)},
      {"current_device", address(current_device)},
      {"getNumGPUs", address(number_of_gpus)},
      {"deviceSynchronize", address(of_device)},
  };
  return all;
}

// The function that has a name, or nullptr.
inline void* function_of(const std::vector<Named>& all, const char* name) {
  for (const auto& one : all)
    if (!std::strcmp(one.name, name)) return one.function;
  return nullptr;
}

// -- where PyTorch finds them -------------------------------------------------------------------------------------------
constexpr std::size_t MOST = 96;    // functions of a table
constexpr std::size_t AHEAD = 2;    // words in front of them: an offset, and the type
inline void *guard_table[AHEAD + MOST], *hooks_table[AHEAD + MOST];
struct Object {
  void** table;
};
// The registry owns nothing, and outlives all.
inline Object guard{guard_table + AHEAD};

inline std::atomic<Object*>* registered = nullptr;
inline Object* hooks = nullptr;
inline Object* guard_before = nullptr;
inline void** hooks_before = nullptr;
inline bool installed = false;

// The entry of CUDA in the registry, the object of its hooks, and the plain table of these, whose words are all copied.
inline bool found(std::uintptr_t registry, std::uintptr_t object, std::uintptr_t plain, std::size_t words) {
  if (words > AHEAD + MOST) return false;
  if (installed) return true;
  registered = reinterpret_cast<std::atomic<Object*>*>(registry) + CUDA;
  hooks = reinterpret_cast<Object*>(object);
  std::memcpy(hooks_table, reinterpret_cast<const void*>(plain), words * sizeof(void*));
  return true;
}

inline bool put(void** table, const std::vector<Named>& all, std::size_t slot, const char* name) {
  void* function = function_of(all, name);
  if (!function || slot >= MOST) return false;
  table[AHEAD + slot] = function;
  return true;
}
inline bool put_guard(std::size_t slot, const char* name) { return put(guard_table, guard_functions(), slot, name); }
inline bool put_hook(std::size_t slot, const char* name) { return put(hooks_table, hooks_functions(), slot, name); }

inline void install(int wanted, int of) {
  number = static_cast<std::int8_t>(wanted);
  count = static_cast<std::int8_t>(of);
  if (installed) return;
  guard_before = registered->exchange(&guard);
  hooks_before = hooks->table;
  hooks->table = hooks_table + AHEAD;
  installed = true;
}

inline void remove() {
  if (!installed) return;
  registered->store(guard_before);
  hooks->table = hooks_before;
  current_stream = 0;
  installed = false;
}

}  // namespace bfc::fake_device
