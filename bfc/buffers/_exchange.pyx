"""How other libraries use memory: the types of its items in each protocol, and DLPack's capsules, made and read.

This file does not know buffers: a capsule keeps some object alive until its consumer is done.
"""

import operator

cimport cython
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint16_t

from bfc.interpreter._process cimport has_entered, start_entering

from bfc import devices

cdef extern from "dlpack.h" nogil:
    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id
    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct DLTensor:
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void* manager_ctx
        void (*deleter)(DLManagedTensor*) noexcept
    ctypedef struct DLPackVersion:
        int major "major"
        int minor "minor"
    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void* manager_ctx
        void (*deleter)(DLManagedTensorVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor

cdef extern from "Python.h":
    ctypedef int PyGILState_STATE
    void PyGILState_Release(PyGILState_STATE state) nogil

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    PyGILState_STATE ensure_gil()

cdef struct Export:             # what a capsule points to; shape and strides follow it in memory
    PyObject* keeper            # a reference
    DLManagedTensorVersioned versioned
    DLManagedTensor old

READ_ONLY, IS_COPIED = devices.DLPACK_READ_ONLY, devices.DLPACK_IS_COPIED
CPU, CUDA = devices.DLPACK_DEVICE_TYPES["cpu"], devices.DLPACK_DEVICE_TYPES["cuda"]
OPENCL, CUDA_MANAGED = devices.DLPACK_DEVICE_TYPES["opencl"], devices.DLPACK_DEVICE_TYPES["cuda_managed"]

#: DLPack's (code, bits) by NumPy's name of a dtype. NumPy's long double is missing on purpose: its bytes are not
#: an IEEE number.
_TYPES = {
    **{f"int{bits}": (devices.DLPACK_CODES["i"], bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (devices.DLPACK_CODES["u"], bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (devices.DLPACK_CODES["f"], bits) for bits in (16, 32, 64)},
    **{f"complex{bits}": (devices.DLPACK_CODES["c"], bits) for bits in (64, 128)},
    "bool": (devices.DLPACK_CODES["b"], 8),
    **{name: (code, 16 if name == "bfloat16" else 8) for name, code in devices.DLPACK_EXTRA_CODES.items()},
}


# -- items -----------------------------------------------------------------------------------------------------------

@cython.final
cdef class _Layout:
    """The type of a buffer's items in each protocol. `dtype` is anything that NumPy accepts as a dtype."""

    def __init__(self, dtype, typestr, format, itemsize, dlpack, descr=None):
        self.dtype = dtype
        self.typestr = typestr
        self.format = format
        self.itemsize = itemsize
        self.code, self.bits = dlpack
        self.descr = descr


cdef _Layout ONE_BYTE = _Layout("|u1", "|u1", "B", 1, _TYPES["uint8"])


def _format_of(dtype):
    """NumPy's format for a dtype in the buffer protocol, or None if it has none that can be read back (dates, void)."""
    import numpy

    try:
        exported = memoryview(numpy.empty(1, dtype))
    except ValueError:
        return None
    return exported.format if numpy.asarray(exported).dtype == dtype else None


cdef _Layout layout_of(dtype):
    dlpack = _TYPES.get(dtype.name, (0, 0)) if dtype.isnative else (0, 0)
    return _Layout(dtype, dtype.str, _format_of(dtype), dtype.itemsize, dlpack, _descr_of(dtype))


def _descr_of(dtype):
    """The fields of a structured dtype. None for all others, and if fields overlap or are out of order."""
    try:
        return dtype.descr if dtype.names else None
    except ValueError:
        return None


# -- what a consumer asks for -----------------------------------------------------------------------------------------

cdef bint is_versioned(max_version) except -1:
    """Whether a consumer knows DLPack 1.0 or newer."""
    if max_version is None:
        return False
    major, _minor = max_version
    return operator.index(major) >= 1


cdef tuple device_from(dl_device):
    """DLPack's numbers of a device."""
    number, ordinal = dl_device
    return operator.index(number), operator.index(ordinal)


cdef object consumer_from(stream, bint on_cuda):
    """A DLPack consumer's stream: None, -1 or a handle."""
    if stream is None:
        return None
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream is an int or None, not {type(stream).__name__}: pass the handle")
    handle = operator.index(stream)
    if handle != -1 and not on_cuda:
        raise BufferError("memory that no CUDA device reaches has no stream: pass stream=None")
    if handle == 0:
        raise ValueError("stream=0 could mean two streams: pass 1 for the legacy default stream, 2 for the thread's")
    if not -1 <= handle < 2**64:
        raise ValueError(f"a stream handle lies between 1 and 2**64 - 1, not {handle}")
    return handle


# -- DLPack capsules ---------------------------------------------------------------------------------------------------
# One malloc holds both structures, of which the capsule uses one, followed by shape and strides.

cdef object capsule_of(keeper, uint64_t data, uint64_t offset, tuple shape, _Layout items, tuple there, bint versioned,
                       uint64_t flags):
    """A capsule for the items at `data`, row by row, on DLPack's device `there`. It keeps `keeper` alive."""
    cdef int32_t device_type, device_id
    device_type, device_id = there
    cdef Py_ssize_t i, ndim = len(shape)
    cdef int64_t step = 1
    cdef Export* export = <Export*>PyMem_Malloc(sizeof(Export) + 2 * ndim * sizeof(int64_t))
    if export == NULL:
        raise MemoryError
    cdef int64_t* dims = <int64_t*>(export + 1)
    for i in range(ndim - 1, -1, -1):
        dims[i] = shape[i]
        dims[ndim + i] = step
        step *= dims[i]
    cdef DLTensor* tensor = &export.versioned.dl_tensor
    tensor.data = <void*>data
    tensor.device = DLDevice(device_type, device_id)
    tensor.ndim = <int32_t>ndim
    tensor.dtype = DLDataType(items.code, items.bits, 1)
    tensor.shape = dims
    tensor.strides = dims + ndim
    tensor.byte_offset = offset
    export.old.dl_tensor = tensor[0]
    export.versioned.version = DLPackVersion(1, 1)
    export.versioned.flags = flags
    export.versioned.manager_ctx = export.old.manager_ctx = export
    export.versioned.deleter = delete_versioned
    export.old.deleter = delete_old
    export.keeper = <PyObject*>keeper
    try:
        if versioned:
            capsule = PyCapsule_New(&export.versioned, "dltensor_versioned", drop)
        else:
            capsule = PyCapsule_New(&export.old, "dltensor", drop)
    except BaseException:
        PyMem_Free(export)
        raise
    # Last: a capsule that was not made must not keep it.
    Py_INCREF(keeper)
    return capsule


cdef void drop(object capsule) noexcept:
    """The destructor of a capsule. It releases the export, unless a consumer has taken it over and so renamed the
    capsule."""
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))
    elif PyCapsule_IsValid(capsule, "dltensor"):
        delete_old(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))


cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    release(<Export*>managed.manager_ctx)


cdef void delete_old(DLManagedTensor* managed) noexcept nogil:
    release(<Export*>managed.manager_ctx)


cdef void release(Export* export) noexcept nogil:
    """Releases an export. A C++ consumer may call this from a destructor, where the thread must not be unwound."""
    cdef PyGILState_STATE state
    if start_entering():
        state = ensure_gil()
        has_entered()
        forget(export)
        PyGILState_Release(state)


cdef void forget(Export* export) noexcept with gil:
    """Drops an export. It preserves a pending exception, since consumers may clean up while one is set."""
    cdef PyObject* kind
    cdef PyObject* error
    cdef PyObject* trace
    PyErr_Fetch(&kind, &error, &trace)
    Py_DECREF(<object>export.keeper)
    PyMem_Free(export)
    PyErr_Restore(kind, error, trace)


def read_capsule(capsule):
    """The contents of a DLPack capsule of either kind. It is not consumed: the memory lives as long as the capsule.

    Parameters
    ----------
    capsule : PyCapsule
        From the `__dlpack__` of a producer.

    Returns
    -------
    tuple of (int, int, tuple of int, tuple of int or None, tuple of int, bool)
        `data` (0 for NULL), `byte_offset`, the shape, the strides in items (None: row by row), the dtype as
        (code, bits, lanes), and whether the memory may only be read.

    Raises
    ------
    ValueError
        If it is not a DLPack capsule, or was consumed.
    """
    cdef DLManagedTensorVersioned* managed
    cdef DLTensor* tensor
    cdef bint read_only = False
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        tensor = &managed.dl_tensor
        read_only = managed.flags & READ_ONLY != 0
    else:
        tensor = &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor
    shape, strides = numbers_at(tensor.shape, tensor.ndim), None
    if tensor.strides != NULL:
        strides = numbers_at(tensor.strides, tensor.ndim)
    dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    return <uint64_t>tensor.data, tensor.byte_offset, shape, strides, dtype, read_only


cdef tuple numbers_at(int64_t* first, int32_t count):
    cdef int32_t i
    cdef list found = []
    for i in range(count):
        found.append(first[i])
    return tuple(found)
