"""Where the pool, a policy and a sub-allocator meet. docs/walk.md follows one call through here."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._buffer cimport Buffer, Owner
from bfc._core cimport Chunk, ChunkHandle, Counters, Pool, Region

cdef extern from "_lock.hpp" namespace "bfc" nogil:
    cdef cppclass Lock:
        cbool try_acquire()
        void wait_and_acquire()
        void release()
        void give_way()

cdef struct Request:
    uint64_t nbytes             # as asked
    uint64_t rounded            # as the policy rounds it
    uint64_t stream
    uint64_t freed_before
    cbool indexed               # whether its address must lead to it: not where the caller keeps the handle
    uint64_t changes            # regions that came or went on its behalf
    cbool blocked               # by bytes that are set aside for another thread's call
    cbool has_waited            # for other streams

cdef struct Placement:
    ChunkHandle handle          # NO_CHUNK: refused
    int64_t allocation_id
    uint64_t ptr

cdef struct Orphan:             # a free that found the lock taken
    ChunkHandle handle
    int64_t allocation_id


cdef class Allocator(Owner):
    cdef Lock lock
    cdef Pool pool
    cdef readonly object sub_allocator
    cdef readonly bint strict
    cdef uint64_t home_stream           # HOST_STREAM where memory is not reused in a stream's order
    cdef uint64_t default_stream_alias
    cdef object thread_streams
    cdef uint64_t fenced_frees          # the part of `frees` that left no work behind on the home stream
    cdef dict ordered                   # stream -> the frees on the home stream that it waits for already
    cdef uint64_t limit
    cdef uint64_t set_aside             # bytes that the sub-allocator is asked for now, or has not taken back yet
    cdef uint64_t changes               # counts regions that came or went
    cdef list callers                   # the threads that are inside a call to the sub-allocator
    cdef bint is_closed
    cdef uint64_t frees                 # counts frees; who waits for memory watches it
    cdef int64_t live_buffers
    cdef vector[Orphan] orphans         # guarded by the GIL
    cdef dict streams_of                # allocation id -> {stream: what the user passed for it, kept alive}
    cdef list waiting                   # [(handle, fences)]: freed, but a stream may still use them
    cdef object __weakref__

    cdef vector[Region] unreturned      # given up by the pool, but the sub-allocator's free() failed
    cdef uint64_t unreturned_bytes
    cdef bint joins_regions
    cdef readonly double retry_seconds

    cdef list stuck                     # of `waiting`, what the device failed for
    cdef vector[Orphan] stuck_orphans
    cdef bint is_abandoned              # collected, but for views of its memory
    cdef uint64_t refused_bytes         # of the sub-allocator's last refusal; 0: the limit refused

    # What a policy answers: what is asked of the pool for so many bytes; where they may lie, with the lock held; and
    # what to do where nothing fits, which takes the lock itself.
    cdef Request request(self, uint64_t nbytes, uint64_t stream) noexcept nogil
    cdef ChunkHandle place(self, Request* request) noexcept nogil
    cdef ChunkHandle find(self, Request* request) noexcept nogil
    cdef int place_after_miss(self, Request* request, Placement* placed) except -1
    cdef void regions_released(self) noexcept nogil

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1
    cdef void acquire(self) noexcept
    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF
    cdef int allocate_placement(self, uint64_t size, uint64_t on, object stream, object freed_before,
                                Placement* placed) except -1
    cdef int leave_home(self, Placement* placed, uint64_t on, object stream) except -1
    cdef int order_after_home(self, uint64_t on) except -1
    cdef int try_harder(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1
    cdef int free_handle_quietly(self, Placement* placed) except -1
    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1
    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1
    cdef int try_allocate(self, Request* request, Placement* placed) except -1
    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil
    cdef int after_miss(self, Request* request, Placement* placed) except -1
    cdef int free_locked(self, ChunkHandle handle) except -1
    cdef bint is_waiting(self, ChunkHandle handle) noexcept
    cdef Buffer own_buffer(self, Buffer buffer)
    cdef bint is_live_locked(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef int free_shared(self, ChunkHandle handle) except -1
    cdef int finish_waiting(self, ChunkHandle handle) except -1
    cdef Counters start_peaks(self) noexcept
    cdef Counters end_peaks(self, Counters before) noexcept
    cdef int hand_over(self, ChunkHandle handle) except -1
    cdef list fences_for(self, streams)
    cdef int settle(self, bint again=*) except -1
    cdef int wait_for_streams(self) except -1
    cdef tuple ask(self, uint64_t nbytes)
    cdef int take_unreturned(self, vector[Region]& regions) except -1
    cdef uint64_t forget(self, vector[Region]& regions) noexcept
    cdef object stats_of(self, Counters counters, uint64_t largest_free)
    cdef int take_region(self, Request* request, Placement* placed, tuple block, uint32_t bin_set) except -1
    cdef int give_back(self, vector[Region]& regions) except -1
    cdef Chunk chunk_at(self, object ptr) except *
    cdef int raise_invalid_pointer(self, uint64_t address) except -1
