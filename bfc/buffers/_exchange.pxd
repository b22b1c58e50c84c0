"""How other libraries use memory: the types of its items in each protocol, and DLPack's capsules."""

from libc.stdint cimport uint8_t, uint64_t


# DLPack's numbers, as `bfc.devices` has them.
cdef uint64_t READ_ONLY, IS_COPIED
cdef int CPU, CUDA, OPENCL, CUDA_MANAGED


cdef class _Layout:
    cdef object dtype
    cdef str typestr
    cdef str format                 # None: the buffer protocol has no format for it
    cdef object descr               # None: not structured
    cdef Py_ssize_t itemsize
    cdef uint8_t code, bits         # DLPack's numbers; 0 bits: DLPack has none


cdef _Layout ONE_BYTE

cdef _Layout layout_of(dtype)
cdef bint is_versioned(max_version) except -1
cdef tuple device_from(dl_device)
cdef object consumer_from(stream, bint on_cuda)
cdef object capsule_of(keeper, uint64_t data, uint64_t offset, tuple shape, _Layout items, tuple there, bint versioned,
                       uint64_t flags)
