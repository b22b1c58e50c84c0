"""Buffers, and the exchange protocols: the buffer protocol, DLPack, and views with a dtype and a shape."""

cimport cython
from cpython.buffer cimport PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF

import math
import operator

from bfc.errors import ClosedError
from bfc.suballocators.base import DLPACK_DEVICE_TYPES

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
    int Py_IsInitialized() nogil

cdef enum:
    MAX_DIMENSIONS = 64
    UINT8_CODE = 1
    BFLOAT16_CODE = 4

_GONE = "this buffer was freed, or its allocator closed: its memory belongs to others now"
#: NumPy's kinds, and DLPack's numbers for them.
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_ONE_BYTE = ("|u1", "B", 1, (UINT8_CODE, 8))


cdef class Owner:
    cdef int hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except -1:
        raise NotImplementedError

    cdef int copy_bytes(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream) except -1:
        raise NotImplementedError

    cdef Buffer another(self, Py_ssize_t nbytes, uint64_t stream):
        raise NotImplementedError

    cdef object visible_stream(self, uint64_t stream):
        return stream

    cdef object interface_stream(self, uint64_t stream):
        return None

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        raise NotImplementedError

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        pass

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        return False

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        return False

    cdef void last_view_gone(self) noexcept:
        pass


#: Who owns a buffer that was never made by an allocator.
cdef Owner NOBODY = Owner()


#: Format texts that live as long as the module, as the buffer protocol wants them.
_FORMATS = {}


# The collector must not take a buffer's owner away before the buffer has given its chunk back.
@cython.freelist(256)
@cython.no_gc_clear
cdef class Buffer:
    """An allocation that gives itself back: when collected, on `free()`, or at the end of a `with` block.

    Made by `Allocator.allocate`, not by hand.

    >>> import bfc
    >>> with bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4) as buffer:
    ...     memoryview(buffer)[:] = b"abcd"
    ...     bytes(buffer)
    b'abcd'
    """

    def __cinit__(self, *args, **kwargs):
        self.owner = NOBODY

    def __init__(self):
        raise TypeError("buffers come from an allocator: bfc.BFCAllocator(...).allocate(nbytes)")

    cdef void become(self, Owner owner, ChunkHandle handle, int64_t allocation_id, uint64_t start, Py_ssize_t nbytes,
                     uint64_t stream) noexcept:
        self.owner = owner
        self.handle = handle
        self.allocation_id = allocation_id
        self.start = start
        self.nbytes = nbytes
        self.made_on = stream

    def __dealloc__(self):
        if self.allocation_id:
            self.owner.free_handle_from_finaliser(self.handle, self.allocation_id)

    cdef uint64_t address(self) except? 0xFFFFFFFFFFFFFFFF:
        if self.nbytes and not (self.allocation_id and self.owner.is_live(self.handle, self.allocation_id)):
            raise ClosedError(_GONE)
        return self.start

    cdef int hold(self) except -1:
        """One more view of this memory. It counts before it is sure that there is any, so that a free or a close that
        comes in between waits for the answer or is seen."""
        self.exports += 1
        self.owner.exports += 1
        if self.nbytes and not self.owner.sync_exported(self.handle, self.allocation_id, &self.exports):
            self.let_go()
            raise ClosedError(_GONE)
        return 0

    cdef void let_go(self) noexcept:
        self.exports -= 1
        self.owner.exports -= 1
        if self.exports == 0 and self.nbytes:
            self.owner.sync_exported(self.handle, self.allocation_id, &self.exports)
        if self.owner.exports == 0:
            self.owner.last_view_gone()

    @property
    def device(self):
        """Where the memory lies: `bfc.Device(kind, ordinal)`."""
        return self.owner.device

    @property
    def ptr(self):
        """The address as an int; 0 for a buffer of 0 bytes."""
        return self.start

    @property
    def stream(self):
        """The stream it was allocated on, as an int; None for pinned memory allocated on none."""
        return self.owner.visible_stream(self.made_on)

    @property
    def freed(self):
        """Whether `free()` has been called on it."""
        return self.allocation_id == 0 and self.nbytes > 0

    def free(self):
        """Gives the memory back now. Freeing twice does nothing.

        Raises BufferError while another object holds a view of host memory through the buffer protocol or DLPack.
        """
        cdef int64_t allocation_id = self.allocation_id
        if self.exports:
            raise BufferError(f"{self.exports} view(s) of this buffer are in use: delete them first")
        if allocation_id:
            self.allocation_id = 0
            try:
                self.owner.free_handle(self.handle, allocation_id)
            except BaseException:
                self.allocation_id = allocation_id
                raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.free()

    def __len__(self):
        return self.nbytes

    def __repr__(self):
        state = ", freed" if self.freed else ""
        return f"<bfc.Buffer {self.start:#x}, {self.nbytes} bytes on {self.device}{state}>"

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _layout(self):
        """(typestr, buffer-protocol format, item size, (DLPack code, bits)) and the shape."""
        return _ONE_BYTE, (self.nbytes,)

    def _require_host(self, what):
        if not self.owner.host_accessible:
            raise BufferError(f"{what}: this memory is on {self.device}, where the host cannot read it")

    def __getbuffer__(self, Py_buffer* view, int flags):
        self._require_host("the buffer protocol")
        layout, shape = self._layout()
        if layout[1] is None:
            raise BufferError(f"the buffer protocol has no format for {layout[0]}")
        if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and len(shape) > 1:
            raise BufferError("this memory lies row by row, not column by column")
        cdef Py_ssize_t ndim = len(shape), i, step = layout[2]
        cdef Py_ssize_t* dims = <Py_ssize_t*>PyMem_Malloc((2 * ndim + 1) * sizeof(Py_ssize_t))
        if dims == NULL:
            raise MemoryError
        for i in range(ndim - 1, -1, -1):
            dims[i] = shape[i]
            dims[ndim + i] = step
            step *= dims[i]
        try:
            view.buf = <void*>self.address()
            self.hold()
        except BaseException:
            PyMem_Free(dims)
            raise
        view.obj = self
        view.len = self.nbytes
        view.itemsize = layout[2]
        view.readonly = 0
        view.ndim = <int>ndim
        view.shape = dims if flags & PyBUF_ND == PyBUF_ND else NULL
        view.strides = dims + ndim if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = dims
        cdef bytes kept = _FORMATS.setdefault(layout[1], layout[1].encode())
        view.format = PyBytes_AS_STRING(kept) if flags & PyBUF_FORMAT else NULL

    def __releasebuffer__(self, Py_buffer* view):
        PyMem_Free(view.internal)
        self.let_go()

    def __array__(self, dtype=None, copy=None):
        """NumPy comes here where the buffer protocol failed: for a dtype that it cannot name, or to hear the error."""
        import numpy

        array = numpy.frombuffer(memoryview(self), numpy.uint8)
        return array.astype(dtype, copy=bool(copy)) if copy or dtype not in (None, array.dtype) else array

    def __dlpack_device__(self):
        """(device type, ordinal) in DLPack's numbers."""
        device = self.device
        if device is None or device.kind not in DLPACK_DEVICE_TYPES:
            raise BufferError(f"DLPack has no number for memory on {device}")
        return DLPACK_DEVICE_TYPES[device.kind], device.ordinal

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule: versioned where the consumer asks for 1.0 or later, else the old kind.

        The consumer keeps this object, and so the memory, until it is done. `stream` must be None for host memory, and
        `copy=True` is refused: there is nothing here to copy with.
        """
        here = self.__dlpack_device__()
        if stream is not None and here[0] == DLPACK_DEVICE_TYPES["cpu"]:
            raise BufferError("host memory has no stream: pass stream=None")
        if dl_device is not None and tuple(dl_device) != here:
            raise BufferError(f"the memory is on device {here}, and is not copied to {tuple(dl_device)}")
        if copy:
            raise BufferError("copy=True is not supported: import without a copy, then copy")
        if max_version is not None and _major(max_version) >= 1:
            return versioned_capsule(self, here)
        return old_capsule(self, here)

    def view(self, dtype, shape=None):
        """The same memory with a dtype (anything NumPy takes) and a shape; one dimension may be -1.

        Raises ValueError where they do not fit into the memory. No copy; the view keeps the buffer alive.
        """
        return BufferView(self, dtype, shape)


@cython.no_gc_clear
cdef class BufferView(Buffer):
    """A buffer's memory with a dtype and a shape. Keeps the buffer alive; frees nothing itself."""

    def __init__(self, Buffer base not None, dtype, shape=None):
        import numpy

        if self.base is not None:
            raise RuntimeError("a view is made once: make another")
        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise ValueError("a view cannot hold Python objects")
        if dtype.itemsize == 0:
            raise ValueError(f"a view needs items of at least one byte, not {dtype}")
        if shape is None:
            if base.nbytes % dtype.itemsize:
                raise ValueError(f"{base.nbytes} bytes are no whole number of {dtype}")
            shape = (base.nbytes // dtype.itemsize,)
        shape = _whole_shape(shape, base.nbytes // dtype.itemsize)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > base.nbytes:
            raise ValueError(f"{shape} of {dtype} needs {nbytes} bytes; there are {base.nbytes}")
        self.layout = (dtype.str, _format_of(dtype), dtype.itemsize, _dlpack_type(dtype))
        self.become(base.owner, base.handle, 0, base.start, nbytes, base.made_on)
        self.dtype = dtype
        self.shape = shape
        self.base = base

    cdef uint64_t address(self) except? 0xFFFFFFFFFFFFFFFF:
        if self.base is None:
            raise ClosedError("a view of no buffer")
        return self.base.address()

    cdef int hold(self) except -1:
        return self.base.hold()

    cdef void let_go(self) noexcept:
        self.base.let_go()

    def free(self):
        """Does nothing: the memory belongs to the buffer under the view."""

    def _layout(self):
        return self.layout, self.shape

    def __array__(self, dtype=None, copy=None):
        array = self.base.__array__()[:self.nbytes].view(self.dtype).reshape(self.shape)
        return array.astype(dtype, copy=bool(copy)) if copy or dtype not in (None, array.dtype) else array

    @property
    def freed(self):
        """Whether the buffer under the view was freed."""
        return self.base.freed

    def __repr__(self):
        return f"<bfc.BufferView {self.dtype}{list(self.shape)} on {self.device}>"


def _major(version):
    major, _minor = version
    return operator.index(major)


def _format_of(dtype):
    """NumPy's own text for a dtype in the buffer protocol, or None where it has none that leads back (dates, void)."""
    import numpy

    try:
        exported = memoryview(numpy.empty(1, dtype))
    except ValueError:
        return None
    return exported.format if numpy.asarray(exported).dtype == dtype else None


def _dlpack_type(dtype):
    """(code, bits) of DLPack, or None: it knows native byte order and plain numbers only."""
    code = BFLOAT16_CODE if dtype.name == "bfloat16" else _DLPACK_CODES.get(dtype.kind)
    return None if code is None or not dtype.isnative else (code, dtype.itemsize * 8)


def _whole_shape(shape, items):
    """The shape as a tuple of ints, with -1 filled in."""
    try:
        dims = [operator.index(shape)]
    except TypeError:
        try:
            dims = [operator.index(n) for n in shape]
        except TypeError:
            raise TypeError(f"a shape is an int or a sequence of ints, not {shape!r}") from None
    if len(dims) > MAX_DIMENSIONS or dims.count(-1) > 1 or any(not -1 <= n < 2**63 for n in dims):
        raise ValueError(f"{tuple(dims)} is no shape: at most {MAX_DIMENSIONS} dimensions, one of them -1")
    if -1 in dims:
        known = 1
        for n in dims:
            known *= n if n != -1 else 1
        if known == 0 or items % known:
            raise ValueError(f"{items} items do not fill {tuple(dims)}")
        dims[dims.index(-1)] = items // known
    return tuple(dims)


# -- DLPack capsules ---------------------------------------------------------------------------------------------------
# One malloc holds the structure and, behind it, shape and strides. `manager_ctx` owns a reference to the buffer.

cdef int fill(DLTensor* tensor, int64_t* dims, Buffer buffer, here) except -1:
    layout, shape = buffer._layout()
    if layout[3] is None:
        raise BufferError(f"DLPack has no code for {layout[0]}")
    cdef Py_ssize_t i, ndim = len(shape)
    cdef int64_t step = 1
    for i in range(ndim - 1, -1, -1):
        dims[i] = shape[i]
        dims[ndim + i] = step
        step *= dims[i]
    tensor.data = <void*>buffer.address() if buffer.nbytes else NULL
    tensor.device.device_type = here[0]
    tensor.device.device_id = here[1]
    tensor.ndim = <int32_t>ndim
    tensor.dtype.code = layout[3][0]
    tensor.dtype.bits = layout[3][1]
    tensor.dtype.lanes = 1
    tensor.shape = dims
    tensor.strides = dims + ndim
    tensor.byte_offset = 0
    buffer.hold()
    return 0


cdef void* block_for(Buffer buffer, size_t structure) except NULL:
    cdef void* block = PyMem_Malloc(structure + 2 * len(buffer._layout()[1]) * sizeof(int64_t))
    if block == NULL:
        raise MemoryError
    return block


cdef void release(void* manager_ctx) noexcept with gil:
    cdef Buffer buffer = <Buffer>manager_ctx
    buffer.let_go()
    Py_DECREF(buffer)


cdef void delete_old(DLManagedTensor* managed) noexcept nogil:
    if Py_IsInitialized():
        with gil:
            release(managed.manager_ctx)
            PyMem_Free(managed)


cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    if Py_IsInitialized():
        with gil:
            release(managed.manager_ctx)
            PyMem_Free(managed)


cdef void drop_old(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_old(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))


cdef void drop_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef object old_capsule(Buffer buffer, here):
    cdef DLManagedTensor* managed = <DLManagedTensor*>block_for(buffer, sizeof(DLManagedTensor))
    try:
        fill(&managed.dl_tensor, <int64_t*>(managed + 1), buffer, here)
    except BaseException:
        PyMem_Free(managed)
        raise
    managed.manager_ctx = <void*>buffer
    managed.deleter = delete_old
    Py_INCREF(buffer)
    return PyCapsule_New(managed, "dltensor", drop_old)


cdef object versioned_capsule(Buffer buffer, here):
    cdef DLManagedTensorVersioned* managed = <DLManagedTensorVersioned*>block_for(
        buffer, sizeof(DLManagedTensorVersioned))
    try:
        fill(&managed.dl_tensor, <int64_t*>(managed + 1), buffer, here)
    except BaseException:
        PyMem_Free(managed)
        raise
    managed.version.major = 1
    managed.version.minor = 0
    managed.flags = 0
    managed.manager_ctx = <void*>buffer
    managed.deleter = delete_versioned
    Py_INCREF(buffer)
    return PyCapsule_New(managed, "dltensor_versioned", drop_versioned)
