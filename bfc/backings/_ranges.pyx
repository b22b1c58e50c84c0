"""PyTorch's expandable segments, as an allocator has them. `ExpandableSegments` says what is mapped where."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, NO_LANE, ChunkHandle
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._private_pools cimport pool_of
from bfc.allocators.mapping._expandable cimport ExpandableSegments, Growing
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing

from bfc.errors import ClosedError, out_of_host_memory


cdef Ranges ranges_of(ExpandableSegments segments):
    cdef Ranges made = Ranges()
    made.segments = segments
    return made


cdef class Ranges(Backing):
    """One range of addresses for each lane and kind, which memory is mapped to from its start on. What is free there
    lies in the lane's second set of bins, which the pool searches together with that of its regions: so there is
    nothing to `find`."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        # A range is mapped chunk by chunk, and its errors are Python's. Such requests get ordinary segments.
        return self.segments.is_on and not request.contiguous and not request.asking.without_gil

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        cdef uint64_t nbytes = allocator.set_aside_for(request)
        return self.map_for(allocator, request, placed, nbytes) if nbytes else 0

    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed,
                     uint64_t set_aside) except -1 with gil:
        """Maps memory for a request; the bytes of its segment are set aside from the limit meanwhile (PyTorch's
        behaviour, 11.5)."""
        cdef uint64_t changes
        cdef Growing growing
        try:
            # One thread maps at a time. What it maps may be enough for this request, too, which looks again when that
            # has ended.
            if not self.segments.enter(set_aside):
                request.blocked = True
                return 0
            changes = self.segments.changes
            try:
                if request.tag:
                    allocator.tags.refuse_if_asleep(request.tag)
                self.open_ranges(allocator, request, &growing)
                while not self.place(allocator, request, placed, &growing):
                    if not self.segments.map_more(&growing):
                        # The device is asked for pages one by one: the error's text names the size of one.
                        allocator.source.refused_bytes.set(self.segments.slot_of(&growing))
                        break
            finally:
                # Changes of its own are no reason for a request to try again.
                request.asking.changes += self.segments.changes - changes
                self.segments.leave()
        finally:
            # What was mapped counts in the pool by now, in whole chunks: that may be more than was set aside (EX-23).
            allocator.source.put_bytes_back(set_aside)
        return 0

    cdef int open_ranges(self, ChunkAllocator allocator, Request* request, Growing* growing) except -1:
        """Fills in what is to grow, and opens a set of bins for it."""
        cdef uint32_t bin_set
        cdef bint known
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
        if growing.bin_set == NO_LANE:
            raise out_of_host_memory()
        return 0

    cdef bint place(self, ChunkAllocator allocator, Request* request, Placement* placed, Growing* growing) except -1:
        """Serves the request if the chunk is large enough by now. Returns True if it was, and also if the host has no
        memory."""
        cdef ChunkHandle handle
        acquire_lock(allocator.lock)    # another thread may have closed the allocator since the device was asked
        cdef bint closed = allocator.life.is_closed
        handle = NO_CHUNK if closed else self.segments.ready(growing)
        if handle != NO_CHUNK:
            handle = allocator.pool.allocate_this(handle, request.rounded, request.nbytes, request.stream,
                                                  request.indexed)
            allocator.fill(handle, request, placed)
        allocator.lock.release()
        if closed:
            self.segments.must_close = True
            raise ClosedError("this allocator was closed while it asked for memory")
        return handle != NO_CHUNK
