"""Which addresses a trace used at which time, in two compiled passes over its events."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp.vector cimport vector

cdef extern from "occupancy.hpp" namespace "bfc" nogil:
    cdef cppclass Ranges:
        Ranges() except +
        void add(uint64_t start, uint64_t end) except +
        void lay() except +
        uint64_t place_of(uint64_t address)
        vector[uint64_t] starts
        vector[uint64_t] sizes
        uint64_t total

    cdef cppclass Cells:
        Cells(size_t rows, uint64_t cell_bytes) except +
        void add(uint64_t start, uint64_t end, uint64_t sign, uint64_t late)
        void end_column(uint64_t events, float* out)


def fill_cells(const uint8_t[::1] op, const uint32_t[::1] number, const uint64_t[::1] size,
               const uint64_t[::1] addresses, uint64_t[:, ::1] places, const uint64_t[::1] ends, float[:, ::1] cells):
    """Writes the fraction of each cell that is in use. `places` has room for the start and the end of each allocation;
    `ends` says after which event each column ends. Returns the ranges that the rows cover, and the bytes of a row."""
    cdef Ranges ranges
    cdef Cells* filled
    cdef size_t i
    cdef uint64_t cell_bytes
    for i in range(<size_t>op.shape[0]):
        if op[i] == 0 and addresses[i] and size[i]:
            ranges.add(addresses[i], addresses[i] + size[i])
    ranges.lay()
    cell_bytes = max((ranges.total + <uint64_t>cells.shape[1] - 1) // <uint64_t>cells.shape[1], <uint64_t>1)
    filled = new Cells(<size_t>cells.shape[1], cell_bytes)
    try:
        with nogil:
            play(op, number, size, addresses, places, ends, cells, ranges, filled)
    finally:
        del filled
    found = []
    for i in range(ranges.starts.size()):
        found.append((ranges.starts[i], ranges.sizes[i]))
    return found, cell_bytes


cdef void play(const uint8_t[::1] op, const uint32_t[::1] number, const uint64_t[::1] size,
               const uint64_t[::1] addresses, uint64_t[:, ::1] places, const uint64_t[::1] ends, float[:, ::1] cells,
               Ranges& ranges, Cells* filled) noexcept nogil:
    cdef size_t i = 0, column, start
    cdef uint64_t* place
    for column in range(<size_t>ends.shape[0]):
        start = i
        while i < ends[column]:
            place = &places[number[i], 0] if op[i] < 2 else NULL
            if op[i] == 0:
                place[0] = place[1] = 0
                if addresses[i] and size[i]:
                    place[0] = ranges.place_of(addresses[i])
                    place[1] = place[0] + size[i]
                    filled.add(place[0], place[1], 1, i - start)
            elif op[i] == 1 and place[1]:
                filled.add(place[0], place[1], <uint64_t>-1, i - start)
            i += 1
        filled.end_column(i - start, &cells[column, 0])
