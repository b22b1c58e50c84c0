"""PyTorch's policy over the common allocator."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport BinSet, ChunkHandle, Lane, Region
from bfc.allocators._private_pools cimport PoolId
from bfc.allocators.mapping._expandable cimport ExpandableSegments
from bfc.allocators._chunk_allocator cimport Placement, Request
from bfc.allocators._allocator cimport Allocator
from bfc.policies._releasing cimport Emptying


@cython.final
cdef class Observers:
    cdef list callbacks             # guarded by the GIL, as all of this
    cdef list observers
    cdef list rejection_observers
    cdef bint has_callbacks         # may be read without
    cdef object running             # in which threads one of them runs now

    cdef int add_callback(self, callback) except -1
    cdef int remove_callback(self, callback) except -1
    cdef int attach(self, observer) except -1
    cdef int detach(self, observer) except -1
    cdef bint run_callbacks(self) except -1
    cdef int attach_to_rejections(self, observer) except -1
    cdef int detach_from_rejections(self, observer) except -1
    cdef int tell(self, device, uint64_t asked, uint64_t limit, uint64_t device_free) except -1
    cdef int tell_of_rejection(self, device, uint64_t asked, uint64_t taken, uint64_t total) except -1
    cdef bint call_each(self, list functions, tuple arguments) except -1


cdef class CachingAllocator(Allocator):
    cdef ExpandableSegments segments
    cdef Emptying emptying
    cdef bint expands                   # new memory is mapped into ranges
    cdef Observers observers
    cdef object rules                   # of PyTorch's version: a `Rules`
    cdef bint scopes_gate               # a rule that is asked for without the GIL: see is_gated
    cdef object applied                 # the settings in force
    cdef int64_t first_max_split_size   # -1: there was no such setting
    cdef readonly bint search_again
    cdef readonly bint collect_without_limit
    cdef readonly bint release_only_what_is_needed

    # Guarded by the lock.
    cdef uint64_t allowed               # bytes; UNLIMITED: only the sub-allocator says no
    cdef uint64_t collects_above        # reserved bytes; UNLIMITED: nothing is collected
    cdef uint64_t rejects_above         # reserved bytes; UNLIMITED: the device is asked first
    cdef uint64_t total_bytes
    cdef double threshold
    cdef uint64_t oversize
    cdef uint64_t oversize_slack

    cdef int set_up_memory(self, bint stitch, page_size) except -1
    cdef int apply(self, settings) except -1
    cdef int set_allowed(self, uint64_t allowed) except -1
    cdef void answer(self, BinSet* answers, cbool expands) noexcept nogil
    cdef void answer_all(self) noexcept nogil
    cdef cbool is_gated(self) noexcept nogil
