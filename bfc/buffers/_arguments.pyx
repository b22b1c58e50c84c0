"""Sizes, counts, streams and addresses, from Python objects."""

import operator

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

from bfc.errors import InvalidPointerError
from bfc.streams import stream_handle
from bfc.units import as_int, parse_bytes

cdef extern from *:
    """
    typedef struct {
        PyObject_HEAD
        char *data;
    } bfc_array_head;
    """
    ctypedef struct ArrayHead "bfc_array_head":     # the head of a NumPy array, as its ABI defines it
        char* data

cdef enum:
    MAX_DIMENSIONS = 64

ctypedef uint64_t (*Reader)(object) except? 0xFFFFFFFFFFFFFFFF


cdef uint64_t size_from(object nbytes) except? 0xFFFFFFFFFFFFFFFF:
    """A number of bytes up to 2**63 - 1. Raises TypeError for a string, which only `allocate` accepts."""
    cdef uint64_t size
    if small_int(nbytes, &size):
        return size
    if isinstance(nbytes, str):
        raise TypeError(f"a size here is an int, not {nbytes!r}: allocate() takes texts")
    return parse_bytes(nbytes)


cdef uint64_t alignment_from(object alignment) except? 0xFFFFFFFFFFFFFFFF:
    """An alignment. Raises TypeError if it is not an int, ValueError if it is not a power of two."""
    try:
        number = as_int(alignment)
    except TypeError:
        raise TypeError(f"an alignment is an int, not {type(alignment).__name__}") from None
    if not 0 < number < 2**63 or number & (number - 1):
        raise ValueError(f"an alignment is a power of two, not {number}")
    return number


cdef uint64_t count_from(object freed_before) except? 0xFFFFFFFFFFFFFFFF:
    """A count of the timing counter: an int, or a function that returns one."""
    return size_from(freed_before() if callable(freed_before) else freed_before)


cdef uint64_t stream_from(object stream) except? 0xFFFFFFFFFFFFFFFF:
    """A stream's handle; None is the default stream, 0."""
    cdef uint64_t handle
    if stream is None:
        return 0
    return handle if small_int(stream, &handle) else stream_handle(stream)


cdef uint64_t address_from(object ptr) except? 0xFFFFFFFFFFFFFFFF:
    """An address. Raises TypeError if it is not an int, InvalidPointerError if it is negative or too large."""
    cdef uint64_t small
    if small_int(ptr, &small):
        return small
    try:
        address = as_int(ptr)
    except TypeError:
        raise TypeError(f"an address is an int, not {type(ptr).__name__}") from None
    if not 0 <= address < 2**64 - 1:
        raise InvalidPointerError(f"{address:#x} is not an address")
    return address


cpdef uint64_t array_address(object array) except? 0:
    """The address of the first item of a NumPy array. Raises TypeError.

    NumPy's own attributes for it take about 1 us, and crash if the host has no memory.
    """
    import numpy

    # Its head is read as a C structure below: any other object's memory would be taken for it.
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f"an array of NumPy's is needed, not {type(array).__name__}")
    return <uintptr_t>(<ArrayHead*><PyObject*>array).data


cdef int sizes_from(object sizes, vector[uint64_t]* found) except -1:
    """Reads the sizes as `size_from` does. Any iterable; an array of 64-bit ints is fastest."""
    return numbers_from(sizes, found, size_from)


cdef int addresses_from(object ptrs, vector[uint64_t]* found) except -1:
    """Reads the addresses as `address_from` does. Any iterable; an array of 64-bit ints is fastest."""
    return numbers_from(ptrs, found, address_from)


cdef int numbers_from(object given, vector[uint64_t]* found, Reader read) except -1:
    cdef Py_ssize_t i
    if copy_ints(given, found):
        return 0
    cdef list items = list(given)   # a copy: reading an item may run code that changes the caller's list
    found.resize(len(items))
    for i, item in enumerate(items):
        found.data()[<size_t>i] = read(item)
    return 0


cdef bint copy_ints(object given, vector[uint64_t]* found) except -1:
    """Copies an array of 64-bit ints from 0 to 2**63 - 1 without gaps. False if it is not such an array."""
    cdef Py_buffer view
    cdef uint64_t together = 0
    cdef uint64_t number
    if not PyObject_CheckBuffer(given):
        return False
    try:
        PyObject_GetBuffer(given, &view, PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, ValueError):   # NumPy raises either for gaps, or for a dtype without a format
        return False
    try:
        if view.ndim != 1 or view.itemsize != 8 or view.format not in (b"l", b"L", b"q", b"Q"):
            return False
        found.resize(view.shape[0])
        if view.len:        # an empty array may have the address NULL
            memcpy(found.data(), view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    for number in found[0]:
        # One pass without a branch: the top bit of all together says whether any has it.
        together |= number
    return together >> 63 == 0


cdef tuple shape_from(object shape, items):
    """A shape as a tuple of ints, with -1 filled in from the number of items."""
    try:
        dims = [operator.index(shape)]
    except TypeError:
        try:
            dims = list(map(operator.index, shape))
        except TypeError:
            raise TypeError(f"a shape is an int or a sequence of ints, not {shape!r}") from None
    if len(dims) > MAX_DIMENSIONS or dims.count(-1) > 1 or any(not -1 <= n < 2**63 for n in dims):
        raise ValueError(f"{tuple(dims)} is not a shape: at most {MAX_DIMENSIONS} dimensions, one of them -1")
    if -1 in dims:
        known = 1
        for n in dims:
            known *= n if n != -1 else 1
        if known == 0 or items % known:
            raise ValueError(f"{items} items do not fill {tuple(dims)}")
        dims[dims.index(-1)] = items // known
    return tuple(dims)
