"""How TensorFlow's regions grow, and what is asked for after a refusal."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport MINIMUM_SIZE, round_up

cdef extern from *:
    """
    #include <cstdint>

    // In single precision, as TensorFlow does it: 2 GiB becomes 1932735232, where a double would give 1932735488.
    static inline uint64_t bfc_times_nine_tenths(uint64_t size) {
        return static_cast<uint64_t>(static_cast<float>(size) * 0.9f);
    }
    """
    uint64_t bfc_times_nine_tenths(uint64_t size) noexcept nogil


cdef uint64_t backpedal(uint64_t size) noexcept nogil:
    """The next smaller size to ask for after a refusal. It always gets smaller; upstream's loops for ever at 256·n."""
    cdef uint64_t smaller = round_up(bfc_times_nine_tenths(size), MINIMUM_SIZE)
    return smaller if smaller < size else size - MINIMUM_SIZE


cdef class Growth:
    """How large the next region is, if the limit allows it: doubling from a first size (TensorFlow's behaviour,
    2.4)."""

    def __cinit__(self, uint64_t first_size):
        self.first_size = round_up(first_size, MINIMUM_SIZE)
        self.next_region_size = self.first_size

    cdef uint64_t grow_to(self, uint64_t rounded, uint64_t available, cbool* grew) noexcept nogil:
        """The bytes to ask for. `grew` tells succeeded() that a large request has doubled the size already."""
        grew[0] = False
        while rounded > self.next_region_size:
            self.double()
            grew[0] = True
        return min(self.next_region_size, available)

    cdef void succeeded(self, cbool grew) noexcept nogil:
        if not grew:
            self.double()

    cdef void reset(self) noexcept nogil:
        self.next_region_size = self.first_size

    cdef inline void double(self) noexcept nogil:
        # Upstream doubles past 2**64 to 0 and then loops for ever.
        if self.next_region_size <= (<uint64_t>1 << 62):
            self.next_region_size *= 2
