"""The calls that map memory: what is asked of a sub-allocator, and what it fails with."""

cimport cython
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint64_t

from bfc.errors import SubAllocatorError
from bfc.units import format_bytes


cdef uint64_t call_reserve(sub_allocator, uint64_t nbytes) except 0:
    cdef uint64_t place = 0, granularity = sub_allocator.mapping_granularity
    answer = sub_allocator.reserve(nbytes)
    if answer is None:
        raise SubAllocatorError(
            f"{sub_allocator!r} has no {format_bytes(nbytes)} of addresses left to reserve. Memory is not short: "
            f"each stream and private pool reserves that much. Use fewer of them, or expandable_segments:False")
    try:
        place = PyNumber_Index(answer)      # nothing here needs memory of the host: the addresses would be lost
    except (TypeError, OverflowError):
        pass
    if 0 < place <= (<uint64_t>1 << 63) - nbytes and place % granularity == 0:
        return place
    if place:
        try:
            sub_allocator.unreserve(place, nbytes)
        except Exception:
            pass    # it was no reservation
    raise SubAllocatorError(f"{sub_allocator!r}.reserve returned {answer!r}: an address is an int above 0, and a "
                            f"multiple of mapping_granularity")


cdef object call_create(sub_allocator, uint64_t nbytes):
    """The number of a new page; None: there is no memory for it."""
    try:
        number = sub_allocator.create(nbytes)
    except MemoryError:
        return None
    if number is None or isinstance(number, int):
        return number
    raise SubAllocatorError(f"{sub_allocator!r}.create returned {number!r}: a page is an int, or None")


cdef bint lies_in(uint64_t address, runs) noexcept:
    """Whether an address lies in one of these (address, bytes). What cannot be read as such may contain it."""
    try:
        for start, size in runs:
            if start <= address < start + size:
                return True
    except Exception:
        return True
    return False


cdef int raise_faults(sub_allocator, Faults faults) except -1:
    """Raises what the sub-allocator failed with while memory went back: a Ctrl-C as it is."""
    if faults.interrupt is not None:
        raise faults.interrupt
    if faults.first is not None:
        raise SubAllocatorError(f"{sub_allocator!r} failed {faults.count} time(s) to take memory back, first with "
                                f"{faults.first!r}; release_free_regions() and close() try again") from faults.first
    return 0


@cython.final
cdef class Faults:
    """What a sub-allocator fails with while memory goes back. Noting it needs no memory of the host."""

    cdef Faults restart(self):
        self.first = self.interrupt = None
        self.count = 0
        return self

    cdef void add(self, error) noexcept:
        self.count += 1
        if self.first is None:
            self.first = error
        if self.interrupt is None and not isinstance(error, Exception):
            self.interrupt = error


@cython.final
@cython.no_gc_clear
cdef class Page:
    """A page, made before the sub-allocator is asked for one: what goes wrong later needs no memory of the host."""


cdef uint64_t bytes_from(Page page) noexcept:
    """The bytes of a page and of those that are listed after it."""
    cdef uint64_t nbytes = 0
    while page is not None:
        nbytes += page.nbytes
        page = page.next
    return nbytes


cdef list driver_numbers(list pages):
    cdef list numbers = []
    cdef Page page
    for page in pages:
        numbers.append(page.number)
    return numbers
