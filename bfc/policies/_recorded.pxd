"""What PyTorch's policy counts and writes down, and what can be read of it."""

from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from bfc.allocators._allocator cimport Allocator
from bfc._core cimport HistoryRecord


cdef class Recorded(Allocator):
    # Guarded by the lock.
    cdef int64_t num_alloc_retries
    cdef int64_t num_ooms
    cdef int64_t num_sync_all_streams

    cdef int64_t first_max_split_size
    cdef bint keeps_frames          # of allocations
    cdef bint keeps_free_frames
    cdef dict frames                # allocation id -> frames
    cdef dict free_frames           # allocation id -> frames of its free
    cdef dict region_frames         # address -> frames of the allocation that it was taken for
    cdef size_t frames_allowed      # before those that nothing refers to are looked for

    cdef list callbacks             # guarded by the GIL, as the next two
    cdef list observers
    cdef bint has_callbacks
    cdef object observing           # the threads whose observers run now

    cdef int keep_frames(self, int64_t allocation_id, uint64_t ptr, uint64_t changes, tuple frames) except -1
    cdef bint has_more_to_do(self) noexcept
    cdef int bound_frames(self) except -1
    cdef int forget_frames(self) except -1
    cdef int run_callbacks(self) except -1 with gil
    cdef int tell_observers(self, uint64_t asked, uint64_t limit, uint64_t device_free) except -1
    cdef int note_refusal(self, uint64_t rounded, uint64_t device_free, uint64_t stream, uint64_t* pool) except -1
