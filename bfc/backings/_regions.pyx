"""Blocks from the sub-allocator: TensorFlow's regions, and PyTorch's segments."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, NO_LANE, ChunkHandle, Region, find_lane
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators.mapping._address_ranges cimport AddressRanges
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing
from bfc.backings._pages cimport may_be_mapped


cdef Regions regions_beside(uint64_t mark):
    cdef Regions made = Regions()
    made.mark = mark
    return made


cdef class Regions(Backing):
    """Each region is one block, whose size is the policy's. They serve what no other backing does: beside pages, a
    request that comes without the GIL, since mapping needs Python, one that must be a single physical allocation, and
    a private pool's. The first two have lanes of their own there, for whatever no page fits."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        return True

    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        if self.mark and may_be_mapped(&request.lane):
            return self.find_beside(allocator, request)
        return allocator.find(request)

    cdef ChunkHandle find_beside(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        cdef ChunkHandle handle = NO_CHUNK
        cdef uint64_t thread = request.lane.thread
        if request.tag:
            return NO_CHUNK     # it could not sleep
        request.lane.thread |= self.mark
        # A lane is opened only for a region that comes: a search must not leave empty ones behind.
        if find_lane(allocator.pool, &request.lane) != NO_LANE:
            handle = allocator.find(request)
        # The request may still get pages, in the lane without the mark.
        request.lane.thread = thread
        return handle

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        if may_be_mapped(&request.lane):
            request.lane.thread |= self.mark
        return allocator.add_region(request, placed)


cdef SleepingRegions sleeping_regions(AddressRanges memory):
    cdef SleepingRegions made = SleepingRegions()
    made.memory = memory
    return made


cdef class SleepingRegions(Backing):
    """The regions of a private pool that sleeps with a tag. Each has addresses of its own, which stay: a captured graph
    names them."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        cdef cbool joined
        if not allocator.source.has_blocks or request.tag:
            return False
        # Pools join tags under the lock.
        acquire_lock(allocator.lock)
        joined = allocator.tags.tag_of(request.lane.pool) != 0
        allocator.lock.release()
        return joined

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        cdef uint64_t nbytes = allocator.set_aside_for(request)
        # Mapping a block may raise, and takes Python for it.
        if nbytes and not request.asking.without_gil:
            return add_block(self, allocator, request, placed, nbytes)
        allocator.source.put_bytes_back(nbytes)
        return 0


cdef int add_block(SleepingRegions backing, ChunkAllocator allocator, Request* request, Placement* placed,
                   uint64_t nbytes) except -1 with gil:
    """Adds a region that can sleep; its bytes are set aside from the limit."""
    cdef Region block
    cdef bint entered = False, asked = False
    try:
        entered = backing.memory.enter(0)
        request.blocked = not entered
        if entered:
            allocator.tags.refuse_if_pool_sleeps(request.lane.pool)     # it cannot fall asleep from here on
            asked = request.asking.in_block = True
            if allocator.source.ask(&request.asking, nbytes, &block, True):
                allocator.take_region(request, placed, &block)
    finally:
        request.asking.in_block = False
        if not asked:       # who asks takes that off
            allocator.source.put_bytes_back(nbytes)
        if entered:
            backing.memory.leave()
    return 0
