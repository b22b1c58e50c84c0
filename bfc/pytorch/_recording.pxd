"""What is kept of a recording while its file is read."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp.vector cimport vector

cdef extern from "number_map.hpp" namespace "bfc" nogil:
    cdef cppclass NumberMap:
        NumberMap() except +
        int64_t find(uint64_t key) noexcept
        void put(uint64_t key, int64_t value) except +
    const int64_t NOT_THERE "bfc::NumberMap::kNone"


cdef class Walked:
    cdef readonly uint32_t number   # in the table that has walked it


cdef class Stacks:
    cdef vector[uint32_t] parents, frames
    cdef NumberMap children         # parent and frame -> stack
    cdef NumberMap lists            # which list or tuple -> stack
    cdef NumberMap dicts            # which dict -> frame; -1 if it is not a frame
    cdef dict numbers               # row -> frame
    cdef object content             # keeps lists, tuples and dicts alive, so that no other object gets their address
    cdef Stacks source              # the table of the lists that were walked before
    cdef NumberMap of_source        # stack of `source` -> stack
    cdef list kept, walked          # the frames of lists that were walked at once; what stands for such lists
    cdef readonly list rows         # (file, line, function) of each frame

    cdef Walked walked_at_once(self, list frames)
    cdef int64_t walk(self, list frames, bint are_rows) except -1
    cdef int64_t from_source(self, int64_t number) except -1
    cdef int64_t child(self, int64_t parent, int64_t frame) except -1
    cdef int64_t frame(self, item) except -3
    cdef int64_t row_number(self, row) except -1


cdef class Pools:
    cdef dict numbers               # the number of each pool by its id
    cdef readonly list ids          # the ids by number

    cdef uint32_t number_of_id(self, uint64_t first, uint64_t second) except? 0xFFFFFFFF


cdef class Event:
    cdef readonly str action
    cdef readonly object stream
    cdef readonly object note       # what the program had said of itself, if that is a text
    cdef readonly uint64_t address, size, time_us
    cdef readonly uint32_t walked   # the number of its stack in the packer's table
    cdef readonly uint32_t stack
    cdef readonly uint16_t owner
    cdef readonly uint8_t named
    cdef readonly uint16_t pool       # the number of its private pool in a table of pools; 0: none


cdef class Packer:
    cdef readonly Stacks stacks
    cdef readonly Pools pools
    cdef readonly bint has_internal_metadata    # whether an entry that it was given has this key
    cdef dict named

    cdef object packed_list(self, list value)
    cdef object packed_dict(self, dict value)
    cdef bint is_pool(self, value, Event event) except -1
