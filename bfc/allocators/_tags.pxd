"""Tags: names for parts of an allocator's memory that can sleep, each for itself."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport Pool, Reasons
from bfc.allocators._lock cimport Lock
from bfc.allocators._private_pools cimport PoolId, PrivatePool, PrivatePools


cdef enum:
    NO_TAG = 0

cdef extern from *:
    """
    static const uint64_t BFC_TAG_POOLS = uint64_t{1} << 62;
    """
    const uint64_t TAG_POOLS "BFC_TAG_POOLS"    # the first number of the id of a tag's pool; the second is the tag's


@cython.final
cdef class Tag:
    cdef readonly str name
    cdef readonly uint64_t number   # from 1
    cdef readonly bint is_asleep
    cdef object kept                # what it held, while it sleeps; None: that was dropped
    cdef bint is_broken             # its contents were lost, and it cannot wake


@cython.final
cdef class Entry:
    cdef object allocator           # None: the scope was left
    cdef Tag tag


@cython.final
cdef class Tags:
    cdef dict by_name
    cdef vector[uint64_t] asleep    # their numbers: nothing is allocated in these. Guarded by the lock
    cdef PrivatePools private_pools     # which of them sleep with a tag
    cdef int64_t scopes_open        # that were entered and not left; changed with a turn
    cdef uint64_t everywhere        # the tag of what is allocated outside of all scopes, or NO_TAG
    cdef Lock* lock                 # the allocator's, and so are its reasons
    cdef Reasons* reasons

    cdef int attach(self, Lock* lock, Reasons* reasons, PrivatePools private_pools) except -1
    cdef int count_scopes(self, int64_t more) except -1
    cdef int cover(self, object name) except -1
    cdef Tag find(self, name)
    cdef Tag known(self, name)
    cdef uint64_t here(self, object allocator) except? 0xFFFFFFFFFFFFFFFF
    cdef cbool is_asleep(self, uint64_t number) noexcept nogil
    cdef cbool join(self, PoolId pool, uint64_t tag) noexcept nogil
    cdef uint64_t tag_of(self, const uint64_t* pool) noexcept nogil
    cdef uint64_t asleep_with(self, const uint64_t* pool) noexcept nogil
    cdef uint64_t find_asleep_with(self, const uint64_t* pool) noexcept nogil
    cdef int refuse_if_pool_sleeps(self, const uint64_t* pool) except -1 nogil
    cdef int refuse_if_asleep(self, uint64_t tag) except -1 with gil
    cdef object name_of_pool(self, uint64_t first, uint64_t second)
    cdef void drop_kept(self) noexcept
    cdef dict ways_from(self, keep, drop)
    cdef list to_wake(self, tuple names, fill)


cdef uint64_t count_tag(Pool pool, Lock& lock, Tags tags, uint64_t number, uint64_t* allocations) noexcept
cdef object scope_of(object allocator, Tags tags, object name)
cdef object no_mapping(object allocator)
cdef list names_asleep(list tags)
cdef bint some_kept(dict ways) noexcept
