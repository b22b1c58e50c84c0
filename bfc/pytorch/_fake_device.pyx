"""A device "cuda" in a PyTorch that has none. `bfc_tools.predicting.guard` says where PyTorch keeps what it asks."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uintptr_t
from libcpp cimport bool as cbool

cdef extern from "fake_device.hpp" namespace "bfc::fake_device" nogil:
    int64_t current_stream
    cbool found(uintptr_t registry, uintptr_t object, uintptr_t plain, size_t words)
    cbool put_guard(size_t slot, const char* name)
    cbool put_hook(size_t slot, const char* name)
    void c_install "bfc::fake_device::install"(int wanted, int of)
    void c_remove "bfc::fake_device::remove"()


def prepare(uintptr_t registry, uintptr_t hooks, uintptr_t plain, size_t words, dict guard_slots, dict hook_slots):
    """Take three addresses, and slots by name: the registry, the hooks, and their plain table of `words`."""
    cdef bytes name
    if not found(registry, hooks, plain, words):
        raise RuntimeError(f"a table of virtual functions has {words} words")
    for slots, of_guard in ((guard_slots, True), (hook_slots, False)):
        for key, slot in slots.items():
            name = key.encode()
            if not (put_guard(slot, name) if of_guard else put_hook(slot, name)):
                raise RuntimeError(f"a predicted device has no function {key!r}")


def install(int number, int count):
    """Let PyTorch see so many devices, of which this is the current one."""
    c_install(number, count)


def remove():
    """Let PyTorch see what it saw before."""
    c_remove()


def stream():
    """The id of this thread's current stream."""
    return current_stream


def set_stream(int64_t wanted):
    """Change this thread's current stream."""
    global current_stream
    current_stream = wanted
