"""What is kept of the entries of a recording while its file is read."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from bfc.pytorch._stacks cimport Stacks


cdef class Event:
    cdef readonly str action
    cdef readonly object stream
    cdef readonly object note       # what the program had said of itself, if that is a text
    cdef readonly uint64_t address, size, time_us
    cdef readonly uint32_t walked   # the number of its stack in the packer's table
    cdef readonly uint32_t stack
    cdef readonly uint16_t owner
    cdef readonly uint8_t named
    cdef readonly bint is_private


cdef class Packer:
    cdef readonly Stacks stacks
    cdef readonly bint has_internal_metadata    # whether an entry that it was given has this key
    cdef dict named

    cdef object packed_list(self, list value)
    cdef object packed_dict(self, dict value)
