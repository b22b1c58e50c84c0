"""PyTorch's expandable segments, as an allocator has them. `ExpandableSegments` says what is mapped where."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, NO_LANE, ChunkHandle
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._private_pools cimport pool_of
from bfc.allocators.mapping._expandable cimport ExpandableSegments, Growing
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing, grow_mapped, refuse_closed


cdef Ranges ranges_of(ExpandableSegments segments):
    cdef Ranges made = Ranges()
    made.segments = segments
    return made


cdef class Ranges(Backing):
    """One range of addresses for each lane and kind, which memory is mapped to from its start on. What is free there
    lies in the lane's second set of bins, which the pool searches together with that of its regions: so there is
    nothing to `find`."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        # It may need the GIL: behind another thread that maps, for an error, or to ask how much memory there is. Such
        # requests get ordinary segments.
        return self.segments.is_on and not request.contiguous and not request.asking.without_gil

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        # The bytes of its segment are set aside from the limit meanwhile (PyTorch's behaviour, 11.5).
        cdef uint64_t set_aside = allocator.set_aside_for(request)
        if set_aside == 0:
            return 0
        try:
            return grow_mapped(self, self.segments, allocator, request, placed, set_aside)
        finally:
            # What was mapped counts in the pool by now, in whole chunks: that may be more than was set aside (EX-23).
            allocator.source.put_bytes_back(set_aside)

    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed) noexcept nogil:
        cdef Growing growing
        cdef int placed_now = self.open_ranges(allocator, request, &growing), mapped = 1
        while placed_now == 0 and mapped > 0:
            placed_now = self.place(allocator, request, placed, &growing)
            if placed_now == 0:
                mapped = self.segments.map_more(&growing)
        if mapped == 0:
            # The device is asked for pages one by one: the error's text names the size of one.
            allocator.source.refused_bytes.set(self.segments.slot_of(&growing))
        return -1 if placed_now < 0 or mapped < 0 else 0

    cdef int open_ranges(self, ChunkAllocator allocator, Request* request, Growing* growing) noexcept nogil:
        """Fills in what is to grow, and opens a set of bins for it. -1: the host has no memory."""
        cdef uint32_t bin_set
        cdef cbool known
        growing.size = request.rounded
        growing.start = NO_CHUNK
        growing.has_reserved = False
        # The set of bins has its rules before another thread can place a request in it.
        acquire_lock(allocator.lock)
        known = allocator.private_pools.know(pool_of(&request.lane))
        bin_set = allocator.bin_set_of(request)
        # The lane has no region yet, and the lock is let go of while addresses are reserved: nobody else may get its
        # record.
        allocator.pool.lanes.kept = bin_set & ~<uint32_t>1
        growing.bin_set = allocator.pool.open_ranges(bin_set) if known and bin_set != NO_LANE else NO_LANE
        if growing.bin_set != NO_LANE:
            allocator.set_rules(bin_set & ~<uint32_t>1)
        allocator.lock.release()
        return 0 if growing.bin_set != NO_LANE else self.segments.device.fail_for_memory()

    cdef int place(self, ChunkAllocator allocator, Request* request, Placement* placed,
                   Growing* growing) noexcept nogil:
        """Serves the request if the chunk is large enough by now. Returns 1 if it was, and also if the host has no
        memory. -1: the allocator was closed."""
        cdef ChunkHandle handle
        acquire_lock(allocator.lock)    # another thread may have closed the allocator since the device was asked
        cdef cbool closed = allocator.life.is_closed
        handle = NO_CHUNK if closed else self.segments.ready(growing)
        if handle != NO_CHUNK:
            handle = allocator.pool.allocate_this(handle, request.rounded, request.nbytes, request.stream,
                                                  request.indexed)
            allocator.fill(handle, request, placed)
        allocator.lock.release()
        return refuse_closed(self.segments) if closed else handle != NO_CHUNK
