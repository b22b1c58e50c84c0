"""Frees: at once, from a finaliser, and when streams have finished."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport Chunk, ChunkHandle
from bfc.buffers._buffer cimport Buffer
from bfc.allocators._lock cimport Shown
from bfc.allocators._ledger cimport Ledger
from bfc.allocators._fences cimport Fences, some_wait

cdef struct Orphan:             # a free that found the lock taken
    ChunkHandle handle
    int64_t allocation_id


cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cdef cppclass PutOff[T]:
        cbool some()
        cbool add(T item)
        void miss()
        cbool take(vector[T]& items)

cdef enum:
    BETWEEN_OTHERS = 256        # how many of a list are dealt with before others get the lock: some 10 us


cdef class Frees(Ledger):
    cdef Shown[uint64_t] frees          # counts frees; a thread that waits for memory watches it
    cdef uint64_t fenced_frees          # how many of them left no work behind on the home stream
    cdef int64_t live_buffers
    cdef Fences fences                  # streams that use memory, and what was freed and waits for them
    cdef PutOff[Orphan] orphans         # frees left to a later call; guarded by the GIL
    cdef PutOff[Orphan] stuck_orphans
    cdef PutOff[Orphan] stranded        # frees left by callers without the GIL; guarded by the lock
    cdef Shown[size_t] strandings       # 0: none are stranded
    cdef bint is_abandoned              # garbage-collected, but views of its memory remain
    cdef bint source_is_python          # signals' handlers may run in its calls
    cdef bint by_stream                 # free chunks are kept apart by stream, and no stream is the home stream
    cdef bint must_look                 # an allocation or a free has more to do than ask the pool

    cdef int free_at_once(self, uint64_t address) except -1

    cdef int freeing(self, int64_t allocation_id) except -1     # only where `must_look` is set, and without the lock
    cdef int free_address(self, uint64_t address) except -1
    cdef int check_all_live(self, const vector[uint64_t]& addresses, vector[ChunkHandle]& handles) except -1
    cdef size_t free_plain(self, const vector[uint64_t]& addresses, const vector[ChunkHandle]& handles,
                           size_t i) noexcept
    cdef void leave(self, PutOff[Orphan]* among, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef void mark_left(self, ChunkHandle handle) noexcept nogil
    cdef void strand(self, ChunkHandle handle) noexcept nogil
    cdef object undo(self, ChunkHandle handle, int64_t allocation_id)
    cdef object undo_at(self, uint64_t address)
    cdef int free_locked(self, ChunkHandle handle) except -1
    cdef int free_shared(self, ChunkHandle handle) except -1
    cdef bint put_behind_users(self, ChunkHandle handle, allocation_id) except -1
    cdef bint is_waiting(self, ChunkHandle handle) noexcept
    cdef int finish_waiting(self, ChunkHandle handle) except -1
    cdef bint drain(self) noexcept
    cdef int free_stranded(self) except -1
    cdef int free_later(self, Orphan orphan) except -1
    cdef int free_orphan(self, Orphan orphan, list faults) except -1
    cdef int unstrand_left(self) except -1
    cdef int free_left(self, list faults) except -1
    cdef int try_stuck_again(self) except -1
    cdef bint mark_streams(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef bint is_unordered(self, uint64_t stream) except -1
    cdef cbool is_foreign(self, Chunk* chunk, uint64_t stream) noexcept nogil
    cdef int settle(self, bint again=*, bint wait=*) except -1
    cdef int free_put_off(self, list faults) except -1
    cdef int free_orphans(self, list faults) except -1
    cdef int wait_for_streams(self) except -1
    cdef int forget_frees(self) except -1
    cdef Buffer own_buffer(self, Buffer buffer)


cdef inline bint is_quiet(Frees self) noexcept nogil:
    """Whether no work was put off that an allocation or a free would have to do first. Without the GIL the answer may
    be slightly out of date."""
    return not (self.must_look or self.orphans.some() or some_wait(self.fences) or self.strandings.get())

cdef void report_unraisable(object error, object doing) noexcept
cdef int report_faults(list faults) except -1
