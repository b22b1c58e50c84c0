"""Sizes, counts, streams and addresses, from Python objects."""

from cpython.long cimport PyLong_CheckExact

from bfc.errors import InvalidPointerError
from bfc.streams import stream_handle
from bfc.units import parse_bytes

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1


cdef inline bint is_small_int(object value, uint64_t* number):
    """Whether it is a plain int from 0 to 2**63 - 1, and which."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    cdef long long found = PyLong_AsLongLongAndOverflow(value, &overflow)
    number[0] = <uint64_t>found
    return found >= 0 and overflow == 0


cdef uint64_t size_from(object nbytes) except? 0xFFFFFFFFFFFFFFFF:
    """A number of bytes up to 2**63 - 1. TypeError for a text, which only `allocate` takes."""
    cdef uint64_t size
    if is_small_int(nbytes, &size):
        return size
    if isinstance(nbytes, str):
        raise TypeError(f"a size here is an int, not {nbytes!r}: allocate() takes texts")
    return parse_bytes(nbytes)


cdef uint64_t count_from(object freed_before) except? 0xFFFFFFFFFFFFFFFF:
    """A count of the timing counter: an int, or what a function returns now."""
    return size_from(freed_before() if callable(freed_before) else freed_before)


cdef uint64_t stream_from(object stream) except? 0xFFFFFFFFFFFFFFFF:
    """A stream's handle; None is the default stream, 0."""
    cdef uint64_t handle
    if stream is None:
        return 0
    return handle if is_small_int(stream, &handle) else stream_handle(stream)


cdef uint64_t address_from(object ptr) except? 0xFFFFFFFFFFFFFFFF:
    """An address. TypeError for what is no int, InvalidPointerError for what no address can be."""
    cdef uint64_t small
    if is_small_int(ptr, &small):
        return small
    try:
        address = ptr.__index__()
    except AttributeError:
        raise TypeError(f"an address is an int, not {type(ptr).__name__}") from None
    if not 0 <= address < 2**64 - 1:
        raise InvalidPointerError(f"{address:#x} is no address")
    return address


cdef object sizes_from(object sizes):
    """An array of its own of uint64, each as `size_from` gives it. Any iterable; an array of ints goes fastest."""
    return numbers_from(sizes, False)


cdef object addresses_from(object ptrs):
    """An array of its own of uint64, each as `address_from` gives it."""
    return numbers_from(ptrs, True)


cdef object numbers_from(object given, bint are_addresses):
    import numpy

    if isinstance(given, numpy.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
        # A signed number below 0 has the highest bit, and goes the slow way with its error. A copy: other threads may
        # write to theirs.
        numbers = given.astype(numpy.int64 if given.dtype.kind == "i" else numpy.uint64).view(numpy.uint64)
        if are_below_half(numbers):
            return numbers
    items = list(given)     # of its own: what stands in theirs may run code that changes it
    return converted(items, numpy.empty(len(items), numpy.uint64), are_addresses)


cdef bint are_below_half(uint64_t[::1] numbers) except -1:
    cdef uint64_t together = 0
    cdef Py_ssize_t i
    for i in range(numbers.shape[0]):
        together |= numbers[i]
    return together >> 63 == 0


cdef object converted(list items, object array, bint are_addresses):
    cdef uint64_t[::1] out = array
    cdef Py_ssize_t i
    for i in range(out.shape[0]):
        out[i] = address_from(items[i]) if are_addresses else size_from(items[i])
    return array
