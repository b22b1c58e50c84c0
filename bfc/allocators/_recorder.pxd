"""What a history writes down, and what PyTorch's policy counts: a part of `Allocator`."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

from bfc._core cimport History, HistoryRecord, Lane, Pool
from bfc.allocators._lock cimport Lock
from bfc.allocators._reading cimport ChunkRow, RegionRow


cdef History* new_history(enabled, context, stacks, max_entries, skip_actions) except? NULL


@cython.final
cdef class Recorder:
    # Guarded by the allocator's lock.
    cdef int64_t num_alloc_retries
    cdef int64_t num_ooms
    cdef int64_t num_sync_all_streams
    cdef int64_t num_oom_rejections
    cdef object noter                   # None, or a function to tell the ids of allocations from Python: a leak check

    # Guarded by the GIL.
    cdef bint keeps_frames          # of allocations
    cdef bint keeps_free_frames
    cdef dict frames                # allocation id -> frames
    cdef dict free_frames           # allocation id -> frames of its free
    cdef dict region_frames         # address -> frames of the allocation that it was taken for
    cdef dict steps                 # allocation id -> the step that its scope named
    cdef size_t frames_allowed      # how many are kept before those that nothing refers to are dropped

    cdef dict stats(self, Pool pool, Lock& lock, int64_t max_split_size, uint64_t pools_below)
    cdef void restart_counts(self) noexcept nogil
    cdef int restart(self, enabled, context) except -1
    cdef list history(self, Pool pool, Lock& lock)
    cdef object columns_of(self, vector[HistoryRecord]& records)
    cdef list frames_of_chunks(self, vector[ChunkRow]& chunks)
    cdef list steps_of_chunks(self, vector[ChunkRow]& chunks)
    cdef list frames_of_regions(self, vector[RegionRow]& regions)
    cdef int keep_frames(self, Pool pool, Lock& lock, int64_t allocation_id, uint64_t ptr, bint region_came,
                         object step) except -1
    cdef int keep_free_frames(self, int64_t allocation_id) except -1
    cdef int64_t mark_release(self, Pool pool, Lock& lock, bint of_pool=*) except -1
    cdef int note_refusal(self, Pool pool, Lock& lock, uint64_t rounded, uint64_t device_free, Lane* lane,
                          uint32_t owner) except -1
    cdef int note_of_pool(self, Pool pool, Lock& lock, which, str said, uint64_t stream=*) except -1
    cdef bint keeps_history(self, Pool pool) noexcept
    cdef int bound_frames(self, Pool pool, Lock& lock) except -1
    cdef int forget_frames(self, Pool pool, Lock& lock) except -1
