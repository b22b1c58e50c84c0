"""How memory comes back to an allocator: at once, from finalisers, and when streams have finished."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, PendingFree, Pool, Reasons
from bfc.allocators._lock cimport Lock, Shown
from bfc.allocators._source cimport Source
from bfc.allocators._fences cimport Fences, TakenMark

cdef enum:                      # what a call of `drain` is for, in bits. 0: somebody wants to read
    AT_ALLOCATION = 1
    QUERY = 2                   # ask the fences, even where that happens at allocations only, or a scope is open
    RECORD = 4                  # ask for the fences of deferred frees, even if a scope is open
    AGAIN = 8                   # try once more what the device failed for
    WAIT = 16                   # wait for the fences
    IN_CAPTURE = 32             # ask nothing: the allocation is for a stream that captures


@cython.final
cdef class Frees:
    cdef Lock* lock                     # the allocator's, and so are the next five
    cdef Pool pool
    cdef Source source
    cdef Fences fences
    cdef Reasons* reasons
    cdef bint* is_closed
    cdef Shown[uint64_t] count          # counts frees; a thread that waits for memory watches it
    cdef uint64_t fenced                # how many of them left no work behind on the home stream
    cdef uint64_t home_stream
    cdef cmap[uint64_t, uint64_t] ordered   # stream's id -> how many frees on the home stream it waits for already

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Reasons* reasons,
                    bint* is_closed) except -1

    cdef int free_locked(self, ChunkHandle handle) except -1
    cdef int free_shared(self, ChunkHandle handle) except -1
    cdef void use_again(self, ChunkHandle handle, int64_t allocation_id) noexcept nogil
    cdef bint put_behind_users(self, ChunkHandle handle, allocation_id) except -1
    cdef bint is_waiting(self, ChunkHandle handle) noexcept nogil
    cdef int finish_waiting(self, ChunkHandle handle) except -1
    cdef void finish_mark(self, TakenMark* taken) noexcept nogil
    cdef void finish_locked(self, ChunkHandle handle) noexcept nogil
    cdef object undo(self, ChunkHandle handle, int64_t allocation_id)
    cdef void leave(self, ChunkHandle handle, int64_t allocation_id, uint32_t reason) noexcept nogil

    cdef int look_up_all(self, const vector[uint64_t]& addresses, vector[ChunkHandle]& handles) except -1
    cdef size_t free_many(self, const vector[uint64_t]& addresses, const vector[ChunkHandle]& handles,
                          size_t i) noexcept

    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef bint mark_streams(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept
    cdef bint synchronize(self) noexcept
    cdef cbool must_order(self, uint64_t stream_id, uint64_t* home_frees) noexcept nogil
    cdef void was_ordered(self, uint64_t stream_id, uint64_t home_frees) noexcept nogil

    cdef int drain(self, int how) except -1
    cdef int free_pending(self, list faults) except -1
    cdef int free_entry(self, PendingFree* entry, list faults) except -1
    cdef int wait_for_home(self, PendingFree* entry) except -1
    cdef int record_deferred_of(self, tuple pool) except -1
    cdef int record_deferred(self, bint again, tuple only, list faults) except -1
    cdef int free_safe_in_capture(self, uint64_t stream) except -1
    cdef int ask_fences(self, bint wait, list faults) except -1
    cdef cbool ask_events(self) noexcept nogil
    cdef cbool ask_events_of(self, uint64_t stream) noexcept nogil
    cdef int wait_for_streams(self) except -1
    cdef int forget(self) except -1


cdef void report_unraisable(object error, object doing) noexcept
cdef int report_faults(list faults, object doing) except -1
