"""What can be read from a pool: functions that take its lock, and change nothing but peaks."""

from cython.operator cimport dereference as deref
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport (
    IN_USE, NO_CHUNK, STATE, UNMAPPED, WAITING, BinSet, Chunk, ChunkHandle, Counters, Pool, Region,
)
from bfc.buffers._owners cimport name_of_owner
from bfc.allocators._pages cimport Pages
from bfc.allocators._page_use cimport PageUse, count_use
from bfc.allocators._lock cimport Lock, acquire_lock

from bfc.errors import InvalidPointerError, PagesInUse
from bfc.snapshots import snapshot as _snapshot

cdef extern from "bins.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "window.hpp":
    pass


def _by_falling_bytes(item):
    return -item[1], item[0]


cdef object bytes_by_name(uint64_t in_use, vector[uint64_t]& owned):
    """Bytes in use by owner, the largest first. `owned`: by the owner's number."""
    cdef uint64_t left = in_use
    cdef size_t i
    cdef list found = []
    for i in range(owned.size()):
        if owned[i]:
            left -= owned[i]
            found.append((name_of_owner(<uint32_t>i), owned[i]))
    if left:
        found.append(("", left))
    found.sort(key=_by_falling_bytes)
    return _snapshot.OwnerBytes(found)


cdef uint64_t count_bookkeeping(Pool pool) noexcept nogil:
    """The bytes of host memory that a pool keeps: records ever used, the table of starts, the bins. Needs the lock."""
    cdef uint64_t total = pool.chunk_count * sizeof(Chunk) + pool.starts.bytes()
    cdef BinSet bin_set
    for bin_set in pool.bin_sets:
        total += bin_set.bins.bytes() + (bin_set.window.bytes() if bin_set.window != NULL else 0)
    return total


cdef ChunkHandle chunk_around(Pool pool, uint64_t ptr) noexcept nogil:
    """The chunk, free or not, that `ptr` lies in, or NO_CHUNK: a walk along its region, for messages. Needs the lock.
    """
    cdef cmap[uint64_t, Region].iterator found = pool.regions.upper_bound(ptr)
    if found == pool.regions.end() or ptr < deref(found).second.ptr:
        return NO_CHUNK
    cdef ChunkHandle handle = deref(found).second.first
    while ptr >= pool.chunks[handle].ptr + pool.chunks[handle].size:
        handle = pool.chunks[handle].next
    return handle


cdef Counters start_peaks(Pool pool, Lock& lock) noexcept:
    """Restarts the peaks of bytes. Returns the counters as they were, for end_peaks."""
    acquire_lock(lock)
    cdef Counters before = pool.totals()
    pool.restart_peaks()
    if pool.usage != NULL:
        pool.usage.restart_bytes_peak()
    lock.release()
    return before


cdef Counters end_peaks(Pool pool, Lock& lock, Counters before) noexcept:
    """The peaks since start_peaks."""
    cdef Counters* counters = &pool.counters
    acquire_lock(lock)
    cdef Counters since = pool.totals()
    if pool.usage != NULL:
        pool.usage.merge_bytes_peak(before.peak_bytes_in_use)
    counters.peak_bytes_in_use = max(since.peak_bytes_in_use, before.peak_bytes_in_use)
    counters.peak_pool_bytes = max(since.peak_pool_bytes, before.peak_pool_bytes)
    lock.release()
    return since


cdef Chunk chunk_at(Pool pool, Lock& lock, uint64_t address) except *:
    """A copy of the live chunk that starts at an address."""
    cdef Chunk chunk
    acquire_lock(lock)
    cdef ChunkHandle handle = pool.handle_of(address)
    if handle != NO_CHUNK:
        chunk = pool.chunks[handle]
    lock.release()
    if handle == NO_CHUNK:
        raise_invalid_pointer(pool, lock, address)
    return chunk


cdef object pages_in_use(Pool pool, Lock& lock):
    """How much of the pages is in use, for the text of a refusal; None: there are no pages."""
    cdef PageUse use
    if pool.pages == NULL:
        return None
    acquire_lock(lock)
    cdef cbool counted = count_use(<Pages>pool.pages, &use)
    lock.release()
    return PagesInUse(use.page_size, use.pages, use.in_use, use.sparse) if counted else None


cdef int raise_invalid_pointer(Pool pool, Lock& lock, uint64_t address) except -1:
    """Raises InvalidPointerError, with what lies at the address."""
    cdef Chunk chunk
    acquire_lock(lock)
    cdef ChunkHandle handle = chunk_around(pool, address)
    if handle != NO_CHUNK:
        chunk = pool.chunks[handle]
    lock.release()
    if handle == NO_CHUNK:
        text = "lies in no region of this allocator: it was allocated elsewhere, or its region was given back"
    elif chunk.state & STATE == IN_USE:
        text = (f"lies {address - chunk.ptr} bytes inside the allocation at {chunk.ptr:#x} "
                f"({chunk.requested_size} bytes): pass the address that allocate_raw returned")
    elif chunk.state & STATE == UNMAPPED:
        text = "lies in reserved addresses that have no memory: it was freed, and given back to the device"
    elif chunk.state & STATE == WAITING:
        text = "is freed already, and waits for another stream to finish with it"
    else:
        text = "lies in free memory: it is freed already, or was never handed out"
    raise InvalidPointerError(f"{address:#x} {text}")
