"""The stream that `use_stream` sets, the owner that `owner` sets, and what threads without the GIL know of tags."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic

cdef atomic[int] scopes_open    # in all threads: 0 spares the look-up

cpdef object current_stream()

cdef enum:
    NO_OWNER = 0

cdef extern from *:
    """
    static const uint64_t BFC_NOT_A_TAG = ~uint64_t{0};
    """
    const uint64_t NOT_A_TAG "BFC_NOT_A_TAG"    # of a scope that says nothing about tags

cdef list owner_names            # by number; it only grows
cdef atomic[int] owners_used    # 1 once one was set, in any thread: 0 spares the look-up


cdef class Scope:
    cdef uint32_t number
    cdef object only            # the only allocator that it applies to; None: all of them
    cdef object step            # of the program; None: the scope around it says
    cdef uint64_t tag           # a number of that allocator; 0: none, whatever the scope around it says; or NOT_A_TAG
    cdef Scope outer
    cdef object context         # the context that it was entered in, while it is open
    cdef bint is_open           # whether threads without the GIL can find it

    cdef int stop(self) except -1
    cdef int open(self) except -1
    cdef void close(self) noexcept


cdef class Entered:
    cdef object token           # the token of the context variable
    cdef Scope scope

cdef Entered enter(uint32_t number, object only, object step=*, uint64_t tag=*)
cdef bint leave(Entered entered) except -1
cdef uint32_t owner_here(object allocator) except? 0xFFFFFFFF
cdef object step_here(object allocator)
cdef int follow_scopes() except -1
cdef uint32_t owner_without_gil(const void* allocator) noexcept nogil
# Which tag an allocation belongs to. False: only Python can tell.
cdef cbool tag_without_gil(const void* allocator, uint64_t* tag, uint32_t* owner) noexcept nogil
cdef void note_tag_here(const void* allocator, uint64_t tag, uint32_t owner) noexcept
cdef uint32_t number_of_owner(object name) except 0
cdef object name_of_owner(uint32_t number)
