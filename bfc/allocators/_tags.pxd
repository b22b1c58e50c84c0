"""Tags: names for parts of an allocator's memory that can sleep, each for itself."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.allocators._frees cimport Frees


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
    cdef Tagged owner               # None: the scope was left
    cdef Tag tag


cdef class Tagged(Frees):
    cdef dict tags                  # of Tag, by name
    cdef vector[uint64_t] tags_asleep   # their numbers: nothing is allocated in these. Guarded by the lock
    cdef int64_t tags_open          # scopes of tags that were entered and not left; guarded by the GIL

    cdef int refuse_if_asleep(self, uint64_t tag) except -1 with gil
    cdef cbool is_tag_asleep(self, uint64_t number) noexcept nogil
    cdef uint64_t tag_here(self) except? 0xFFFFFFFFFFFFFFFF
    cdef Tag find_tag(self, name)
    cdef Tag known_tag(self, name)
    cdef dict ways_from(self, keep, drop)
    cdef void drop_kept(self) noexcept
    cdef bint has_more_to_do(self) noexcept         # the value for `must_look`
    cdef object put_to_sleep(self, dict ways)       # `ways`: way by Tag; a policy overrides this
    cdef int wake_up(self, list tags, object fill) except -1


cdef object no_mapping(Tagged allocator)
cdef bint some_sleep(list tags) noexcept
