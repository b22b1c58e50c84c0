"""Where the pool, a policy and a sub-allocator meet. docs/walk.md follows one call through here."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport NO_HOST_MEMORY, ChunkHandle, Lane, Pool, Region
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.allocators._frees cimport Frees
from bfc.allocators._ledger cimport Shown

cdef struct Request:
    uint64_t nbytes             # as asked
    uint64_t rounded            # as the policy rounds it
    uint64_t stream
    uint64_t freed_before
    uint64_t asked              # of the sub-allocator for the block that take_region gets
    cbool indexed               # whether its address must lead to it: not where the caller keeps the handle
    cbool without_gil           # whether the sub-allocator must be called without the GIL
    int fault                   # what the sub-allocator failed with, called without the GIL; 0: nothing
    uint64_t changes            # regions that came or went on its behalf
    cbool blocked               # by bytes that are set aside for another thread's call
    cbool has_waited            # for other streams
    cbool shared                # whether it is for a stream whose work runs in any order
    cbool refused               # by the policy, for its size alone: nothing is tried
    Lane lane                   # whose free chunks it may take, where a policy keeps them apart

cdef struct Call:
    unsigned long thread        # that is inside it
    uint64_t nbytes             # that are set aside for it

cdef struct Placement:
    ChunkHandle handle          # NO_CHUNK: refused
    int64_t allocation_id
    uint64_t ptr


cdef void set_plain_request(Request* request, uint64_t nbytes, uint64_t rounded, uint64_t stream) noexcept nogil


cdef inline cbool note_hit(Pool pool, ChunkHandle handle, Placement* placed) noexcept nogil:
    """Notes a chunk that was handed out. Whether there was one."""
    if handle >= NO_HOST_MEMORY:
        return False
    placed.handle = handle
    placed.allocation_id = pool.chunks[handle].allocation_id
    placed.ptr = pool.chunks[handle].ptr
    return True


cdef class Allocator(Frees):
    cdef readonly bint strict
    cdef readonly double retry_seconds
    cdef bint joins_regions
    cdef object home_stream_object
    cdef object noter                   # None, or whom to tell the id of each allocation from Python: a check for leaks
    cdef bfc_native_source* native      # NULL where the sub-allocator has none
    cdef cmap[uint64_t, uint64_t] ordered   # stream's id -> the frees on the home stream that it waits for already

    cdef uint64_t alignment             # of regions
    cdef bint may_be_unordered          # whether a stream's work may run in any order: the sub-allocator is asked

    # Guarded by the lock; what is Shown may be read without.
    cdef uint64_t set_aside             # bytes that the sub-allocator is asked for now, or has not taken back yet
    cdef Shown[uint64_t] changes        # counts regions that came or went
    cdef Shown[uint64_t] calls_ended    # counts calls to the sub-allocator
    cdef vector[Call] calls             # to the sub-allocator, under way now
    cdef vector[Region] unreturned      # given up by the pool, but the sub-allocator's free() failed
    cdef uint64_t unreturned_bytes
    cdef vector[Region] closing         # empty; has room for all regions, as `unreturned` has
    cdef size_t on_their_way            # regions that are asked for, or go back
    cdef Shown[uint64_t] refused_bytes  # of the sub-allocator's last refusal; 0: the limit refused
    cdef Shown[int] last_fault          # of the last allocation without the GIL

    # What a policy answers: what is asked of the pool for so many bytes; where they may lie, with the lock held; and
    # what to do where nothing fits, and what else where upstream would refuse, both of which take the lock themselves,
    # and the GIL only to call a sub-allocator in Python.
    cdef cbool hit(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil
    cdef void set_request(self, Request* request, uint64_t nbytes, uint64_t stream) noexcept nogil
    cdef ChunkHandle place(self, Request* request) noexcept nogil
    cdef ChunkHandle find(self, Request* request) noexcept nogil
    cdef int place_after_miss(self, Request* request, Placement* placed) except -1 nogil
    cdef int place_where_refused(self, Request* request, Placement* placed) except -1 nogil
    cdef ChunkHandle find_in_new_region(self, Request* request, Region* region) noexcept nogil
    cdef uint32_t bin_set_of(self, Request* request) noexcept nogil
    cdef void set_lane(self, Lane* lane, uint64_t stream) noexcept nogil
    cdef void regions_released(self) noexcept nogil
    cdef int poll(self) except -1       # asks the fences of other streams, before an allocation
    cdef int was_refused(self, Request* request) except -1
    cdef bint plays_alone(self) except -1   # whether a replay needs no look at fences between its events
    cdef int set_freed_before(self, Request* request, object freed_before) except -1

    # Called only where `must_look` is set, without the lock. An error of `allocated` frees the memory again.
    cdef int allocated(self, Placement* placed, uint64_t changes_before) except -1
    cdef bint has_more_to_do(self) noexcept     # what `must_look` is to be

    cdef bint hits_are_plain(self, uint64_t on) except -1
    cdef size_t allocate_hits(self, const vector[uint64_t]& sizes, uint64_t[::1] addresses, size_t i,
                              uint64_t on) noexcept

    cdef int place_at_once(self, uint64_t nbytes, uint64_t on, Placement* placed) except -1
    cdef int check_alignment(self, uint64_t alignment) except -1
    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1
    cdef int set_home_stream(self, stream) except -1
    cdef int set_granularity(self) except -1
    cdef int allocate_placement(self, uint64_t size, uint64_t on, object stream, object freed_before,
                                Placement* placed) except -1
    cdef int try_harder(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1
    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1
    cdef int take_back(self, Placement* placed) except -1
    cdef int announce(self, Placement* placed, uint64_t changes_before) except -1
    cdef int leave_home(self, Placement* placed, uint64_t on, object stream) except -1
    cdef cbool must_order(self, uint64_t stream_id, uint64_t* home_frees) noexcept nogil
    cdef void was_ordered(self, uint64_t stream_id, uint64_t home_frees) noexcept nogil
    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1
    cdef int try_allocate(self, Request* request, Placement* placed) except -1
    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil
    cdef int after_miss(self, Request* request, Placement* placed) except -1
    cdef int hand_over(self, ChunkHandle handle) except -1

    cdef int ask(self, Request* request, uint64_t nbytes, Region* block, cbool is_set_aside) except -1 nogil
    cdef cbool keep_room(self) noexcept nogil
    cdef void keep_unreturned(self, Region region) noexcept nogil
    cdef cbool begin_call(self, uint64_t nbytes, uint64_t to_set_aside) noexcept nogil
    cdef Call* newest_call(self) noexcept nogil
    cdef void end_call(self, cbool listed, uint64_t nbytes) noexcept nogil
    cdef int ask_in_python(self, uint64_t nbytes, Region* block) except -1 with gil
    cdef int take_region(self, Request* request, Placement* placed, Region* block) except -1 nogil
    cdef int refuse_region(self, Region* block, cbool overlaps, cbool closed) except -1 with gil
    cdef bint is_inside_a_call(self) noexcept
    cdef bint is_any_inside_a_call(self) noexcept
    cdef uint64_t forget(self, vector[Region]& regions) noexcept nogil
    cdef void take_unreturned(self, vector[Region]& regions) noexcept nogil
    cdef int give_back(self, vector[Region]& regions, cbool without_gil) except -1 nogil
    cdef int give_back_in_python(self, vector[Region]& regions) except -1 with gil
    cdef void region_returned(self, Region region, cbool returned) noexcept nogil

    # For callers that must not take the GIL.
    cdef cbool allocate_without_gil(self, uint64_t nbytes, uint64_t stream, uint64_t* ptr) noexcept nogil
    cdef cbool free_without_gil(self, uint64_t ptr, uint64_t stream, cbool drain) noexcept nogil
