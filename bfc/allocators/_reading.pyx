"""Facts about a pool, in the words of statistics and messages: whose the bytes are, what the records take, what an
address is."""

from cython.operator cimport dereference as deref
from libc.stdint cimport uint32_t
from libcpp.map cimport map as cmap

from bfc._core cimport IN_USE, NO_CHUNK, STATE, UNMAPPED, WAITING, BinSet, Region
from bfc.buffers._owners cimport name_of_owner

from bfc.snapshots import snapshot as _snapshot


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


cdef str what_is_at(uint64_t address, const Chunk* chunk):
    """Why an address can be neither freed nor looked up, from the chunk that it lies in; NULL: it lies in none."""
    if chunk == NULL:
        return "lies in no region of this allocator: it was allocated elsewhere, or its region was given back"
    if chunk.state & STATE == IN_USE:
        return (f"lies {address - chunk.ptr} bytes inside the allocation at {chunk.ptr:#x} "
                f"({chunk.requested_size} bytes): pass the address that allocate_raw returned")
    if chunk.state & STATE == UNMAPPED:
        return "lies in reserved addresses that have no memory: it was freed, and given back to the device"
    if chunk.state & STATE == WAITING:
        return "is freed already, and waits for another stream to finish with it"
    return "lies in free memory: it is freed already, or was never handed out"
