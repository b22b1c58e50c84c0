"""What an allocator is made of, and what a policy overrides: requests become chunks here. Who calls it stands in
_allocator.pxd, the steps of a request in _misses.pxd. docs/walk.md follows one call through here."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport NO_HOST_MEMORY, BinSet, Chunk, ChunkHandle, Lane, Pool, Reasons, Region
from bfc.buffers._buffer cimport HOST_STREAM, BufferOwner
from bfc.allocators._lock cimport Lock, Shown, acquire_lock
from bfc.allocators._private_pools cimport PoolId, PoolUses, PrivatePools, is_private
from bfc.allocators._source cimport Asking, Source
from bfc.allocators._recorder cimport Recorder
from bfc.allocators._fences cimport Captures, Fences
from bfc.allocators._frees cimport Frees
from bfc.allocators._tags cimport Tags
from bfc.allocators.mapping._address_ranges cimport AddressRanges
from bfc.allocators.mapping._stitching cimport Stitching
from bfc.allocators._plans cimport Planned

cdef extern from "allocator_parts.hpp" namespace "bfc" nogil:
    cdef cppclass StreamRules:
        uint64_t home
        uint64_t default_alias
        vector[uint64_t] of_threads
        bint by_stream
        Shown[bint] has_lanes
        bint may_be_unordered

    cdef cppclass Lifetime:
        bint is_closed
        bint is_abandoned
        int64_t live_buffers


cdef struct Request:
    uint64_t nbytes             # as asked
    uint64_t rounded            # as the policy rounds it
    uint64_t stream
    uint64_t freed_before
    cbool indexed               # whether it must be found by its address; False where the caller keeps the handle
    Asking asking               # what it asks of the sub-allocator
    cbool blocked               # whether bytes set aside for another thread's call stand in its way
    cbool has_waited            # whether it has waited for other streams
    uint32_t polls              # how often it has waited for bytes set aside by threads that are in no call
    uint64_t frees_before       # the count of frees when a free chunk was looked for, before it waits
    cbool shared                # whether it is for a stream whose work runs in any order
    cbool contiguous            # whether it must be one physical allocation, and not pages mapped end to end
    cbool refused               # whether the policy refuses it without an attempt to make room: nothing more is tried
    cbool rejected              # and that for what is reserved already, before the device is asked
    uint64_t taken              # then, the bytes that were reserved
    Lane lane                   # where it may take free chunks from, if a policy keeps them apart
    uint64_t tag                # the tag that it belongs to; 0: none
    cbool asked_plan            # whether it has been asked whether a plan has a place for it
    uint64_t captured[2]        # the pool of the graph that captures its stream; (0, 0): none
    cbool in_capture            # whether its stream captures, and the capture is marked
    uint32_t owner              # the number of its owner in the pool; 0: none
    uint32_t end                # LOWER_END or UPPER_END
    uint64_t alignment          # a power of two, if it must lie at multiples of more than all chunks do; else 0

cdef enum:                      # how a request is asked, in bits
    CONTIGUOUS = 1              # it must be one physical allocation
    OR_NONE = 2                 # a refusal is an answer, and no error
    FROM_UPPER_END = 4

cdef struct Placement:
    ChunkHandle handle          # NO_CHUNK: refused
    int64_t allocation_id
    uint64_t ptr


cdef inline void set_plain_request(Request* request, uint64_t nbytes, uint64_t rounded,
                                   uint64_t stream) noexcept nogil:
    memset(request, 0, sizeof(Request))
    request.nbytes = nbytes
    request.rounded = rounded
    request.stream = stream
    request.indexed = True


cdef inline cbool note_hit(Pool pool, ChunkHandle handle, Placement* placed) noexcept nogil:
    """Notes a chunk that was handed out. Returns whether there was one."""
    if handle >= NO_HOST_MEMORY:
        return False
    placed.handle = handle
    placed.allocation_id = pool.chunks[handle].allocation_id
    placed.ptr = pool.chunks[handle].ptr
    return True


cdef class ChunkAllocator(BufferOwner):
    cdef Lock lock
    cdef Reasons reasons                # why an allocation or a free has more to do than ask the pool
    cdef Pool pool
    cdef Source source                  # where its regions come from
    cdef Fences fences                  # streams that use memory, and what was freed and waits for them
    cdef Frees frees                    # how memory comes back
    cdef Tags tags                      # which parts of its memory can sleep, each for itself
    cdef PrivatePools private_pools     # memory of parts of a program, and which requests are diverted there
    cdef Captures captures              # the graphs that are captured, and their private pools
    cdef Recorder recorder              # the counts of PyTorch's policy, and the frames of a history
    cdef StreamRules streams
    cdef Lifetime life
    cdef uint64_t limit
    cdef readonly bint strict
    cdef readonly double retry_seconds
    # A part as those above, behind what a hit reads.
    cdef AddressRanges mapped           # memory that is mapped to addresses
    cdef Stitching stitching            # the same, where pages are mapped one by one; else None
    cdef tuple backings                 # of Backing, in the order in which they are asked
    cdef Planned planned                # a plan and its steps; None: there was never one
    cdef object __weakref__

    # What a policy overrides: the request that it makes of so many bytes (`set_request`); where that may be placed,
    # with the lock held (`place`, `find`); the rules of a lane (`set_rules`) and of a new region (`set_aside_for`,
    # `add_region`); what to do if nothing fits (`place_after_miss`), and what else to try where upstream would refuse
    # (`place_where_refused`). The last three take the lock themselves, and the GIL only to call a sub-allocator in
    # Python.
    cdef cbool hit(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil
    cdef void set_request(self, Request* request, uint64_t nbytes, uint64_t stream) noexcept nogil
    cdef ChunkHandle place(self, Request* request) noexcept nogil
    cdef ChunkHandle find(self, Request* request) noexcept nogil
    cdef BinSet rules_for(self, Request* request, uint32_t bin_set) noexcept nogil
    cdef void set_rules(self, uint32_t lane) noexcept nogil
    cdef uint64_t set_aside_for(self, Request* request) noexcept nogil
    cdef int add_region(self, Request* request, Placement* placed) except -1 nogil
    cdef int place_after_miss(self, Request* request, Placement* placed) except -1 nogil
    cdef int place_where_refused(self, Request* request, Placement* placed) except -1 nogil
    cdef ChunkHandle find_in_new_region(self, Request* request, Region* region) noexcept nogil
    cdef uint32_t bin_set_of(self, Request* request) noexcept nogil
    cdef void set_lane(self, Lane* lane, uint64_t stream) noexcept nogil
    cdef void regions_released(self) noexcept nogil
    cdef int plan_changed(self) except -1   # a plan came into use, or is not in use any more
    cdef void scopes_changed(self) noexcept     # requests are diverted into private pools from now on, or no more
    cdef int pool_ended(self, pool) except -1       # a scope of a private pool was closed
    cdef int pool_released(self, pool) except -1    # the last reference to one is gone
    cdef int was_refused(self, Request* request) except -1
    cdef bint plays_alone(self) except -1   # whether a replay needs no look at fences between its events
    cdef uint64_t alignment_for(self, uint64_t alignment) except? 0xFFFFFFFFFFFFFFFF
    cdef int join_tag(self, Request* request, PoolId pool) except -1
    cdef int set_freed_before(self, Request* request, object freed_before) except -1
    cdef object settings_now(self)
    cdef object torch_now(self)
    cdef object against_pieces(self)
    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1
    cdef int set_home_stream(self, stream) except -1
    cdef inline void acquire(self) noexcept nogil:
        """Takes the lock. Callers may hold the GIL or not."""
        acquire_lock(self.lock)
    cdef void give_way(self) noexcept nogil
    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF
    cdef cbool is_of_thread(self, uint64_t stream) noexcept nogil
    cdef bint is_unordered(self, uint64_t stream) except -1
    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil
    cdef str refused_by(self, Request* request)
    cdef tuple memory_of_device(self)
    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef int take_region(self, Request* request, Placement* placed, Region* block) except -1 nogil
    cdef uint64_t release_mapped(self) except? 0xFFFFFFFFFFFFFFFF
    cdef int check_books(self) except -1
    cdef int end_for(self, object allocation_end) except -1


cdef object closed()      # the error of calls to an allocator that is closed


cdef inline cbool is_apart(ChunkAllocator allocator, const Lane* lane) noexcept nogil:
    """Whether the free chunks of a lane serve one stream alone, in the order of its work. Under BFC that is so in
    private pools only: a graph orders its streams, and no other one may be made to wait for them."""
    return allocator.streams.by_stream or (is_private(lane) and allocator.streams.home != HOST_STREAM)


cdef inline cbool is_foreign(ChunkAllocator allocator, Chunk* chunk, uint64_t stream) noexcept nogil:
    """Whether a free of the chunk has to wait for this stream."""
    if is_apart(allocator, &allocator.pool.bin_sets[chunk.bin_set].lane):
        return stream != chunk.stream or allocator.is_of_thread(stream)
    # a chunk that was allocated for another stream may be used on the home stream only after this call
    return stream != allocator.streams.home or chunk.stream != allocator.streams.home


cdef inline cbool is_in_capture(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Whether a request comes while its stream captures, or may capture: nothing is waited for then."""
    return allocator.fences.capture_is_marked() and (request.in_capture or request.asking.without_gil)
