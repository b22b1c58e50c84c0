"""Frees of many addresses in one call: all are looked up under one lock, and then freed, most of them under one lock.
"""

from libc.stdint cimport uint32_t, uint64_t

from bfc._core cimport COUNTED, EXPORTED, IN_USE, INDEXED, MARKS, NO_CHUNK, Chunk, ChunkHandle

from bfc.allocators._frees import VIEWED as _VIEWED
from bfc.errors import InvalidPointerError


cdef int free_many(Frees allocator, const vector[uint64_t]& addresses) except -1:
    """Frees the allocations at these addresses; an address of 0 stands for none."""
    cdef vector[ChunkHandle] handles
    cdef size_t i = 0
    handles.resize(addresses.size())
    check_all_live(allocator, addresses, handles)
    if allocator.orphans.some():
        allocator.catch_up()
    while i < addresses.size():
        i = free_plain(allocator, addresses, handles, i)
        if i < addresses.size():
            if addresses[i]:
                allocator.free_address(addresses[i])
            i += 1
    return 0


cdef int check_all_live(Frees allocator, const vector[uint64_t]& addresses, vector[ChunkHandle]& handles) except -1:
    """Looks the addresses up. Raises InvalidPointerError or BufferError where one of them could not be freed, or
    appears twice. An address of 0 may, and has no chunk."""
    cdef uint32_t* state
    cdef uint32_t found = 0
    cdef size_t checked = 0, i
    allocator.acquire()
    while checked < addresses.size():
        handles[checked] = NO_CHUNK
        if addresses[checked]:
            handles[checked] = allocator.pool.handle_of(addresses[checked])
            if handles[checked] == NO_CHUNK:
                break
            state = &allocator.pool.chunks[handles[checked]].state
            found = state[0] & (COUNTED | EXPORTED)
            if found:
                break
            state[0] |= COUNTED
        checked += 1
    for i in range(checked):
        if handles[i] != NO_CHUNK:
            allocator.pool.chunks[handles[i]].state &= ~<uint32_t>COUNTED
    allocator.lock.release()
    if checked == addresses.size():
        return 0
    if found & COUNTED:
        raise InvalidPointerError(f"{addresses[checked]:#x} appears twice in one call")
    if found & EXPORTED:
        raise BufferError(_VIEWED)
    allocator.raise_invalid_pointer(addresses[checked])


cdef size_t free_plain(Frees allocator, const vector[uint64_t]& addresses, const vector[ChunkHandle]& handles,
                       size_t i) noexcept:
    """Frees the chunks from the i-th on under one lock. Returns the index of the first that needs more than that.
    Since they were looked up, another thread may have freed them, and a replay, whose chunks are not indexed by
    address, may have taken them."""
    cdef Chunk* chunk
    if allocator.must_look:
        return i
    allocator.acquire()
    while i < addresses.size():
        if handles[i] != NO_CHUNK:
            chunk = &allocator.pool.chunks[handles[i]]
            if chunk.ptr != addresses[i] or chunk.state & ~<uint32_t>MARKS != IN_USE | INDEXED:
                break
            if not allocator.pool.free_chunk(handles[i]):
                break
            allocator.frees.add(1)
        i += 1
        if i % BETWEEN_OTHERS == 0:
            allocator.give_way()
    allocator.lock.release()
    return i
