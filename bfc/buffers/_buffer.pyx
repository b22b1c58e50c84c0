"""Buffers: the life of an allocation, its use by the host and by other libraries, and views of it with a dtype and a
shape."""

import math

cimport cython
from cpython.buffer cimport PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc

from bfc.native.turns cimport TurnAt, count_by, counted, keep_for_ever, put
from bfc.buffers._arguments cimport array_address, shape_from
from bfc.buffers._exchange cimport (
    CPU, CUDA, CUDA_MANAGED, IS_COPIED, ONE_BYTE, OPENCL, READ_ONLY, _Layout, capsule_of, consumer_from, device_from,
    is_versioned, layout_of,
)

from bfc.devices import DLPACK_DEVICE_TYPES as _DEVICE_TYPES
from bfc.errors import ClosedError, never_set_up
from bfc.interpreter.stubs import SignatureOfStub

_GONE = "this buffer was freed, or its allocator closed: its memory belongs to others now"
_VIEW_OF_NONE = "this view has no buffer: its __init__ did not run, or failed"
#: The kinds of memory for __cuda_array_interface__: those that a CUDA device can reach.
_CUDA_KINDS = ("cuda", "cuda_managed", "cuda_host")
_HOST = (CPU, 0)


cdef class BufferOwner:
    """What a buffer belongs to: the base class of every allocator.

    Attributes
    ----------
    sub_allocator : SubAllocator
        Where the memory comes from.
    device : Device
        Where it lies.
    host_accessible : bool
        True if the host can read and write it at the same addresses.
    """
    __signature__ = SignatureOfStub()

    cdef int require_set_up(self) except -1:
        """Raises ClosedError if `__init__` has not finished: there is no sub-allocator then."""
        if self.sub_allocator is None:
            raise never_set_up()
        return 0

    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0:
        raise NotImplementedError

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        pass

    cdef int copy_bytes(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream) except -1:
        self.sub_allocator.copy(destination, source, nbytes, 0 if stream == HOST_STREAM else stream)
        return 0

    cdef tuple exchange_address(self, uint64_t address):
        return self.sub_allocator.exchange_address(address)

    cdef int wait_for(self, uint64_t stream) except -1:
        if stream != HOST_STREAM and self.sub_allocator.asynchronous:
            fence = self.sub_allocator.fence(stream)
            if fence is not None:
                fence.wait()
        return 0

    cdef Buffer another(self, Py_ssize_t nbytes, uint64_t stream):
        return (<object> self).allocate(nbytes, self.visible_stream(stream))  # of the subclass

    cdef object visible_stream(self, uint64_t stream):
        return None if stream == HOST_STREAM else stream

    cdef object interface_stream(self, uint64_t stream):
        source = self.sub_allocator
        if stream == HOST_STREAM or not source.asynchronous:
            return None
        # another thread may read it, with another per-thread stream: the default stream waits for all of them
        return source.default_stream_alias if stream == 0 or stream in source.thread_streams else stream

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        raise NotImplementedError

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        pass

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        return False

    cdef object why_not(self, ChunkHandle handle, int64_t allocation_id):
        return ClosedError(_GONE)

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        return False

    cdef void last_view_gone(self) noexcept:
        pass


#: The owner of a buffer that was never made by an allocator.
cdef BufferOwner NOBODY = BufferOwner()
keep_for_ever(NOBODY)


#: Format strings that live as long as the module, as the buffer protocol requires.
_FORMATS = {}


# The collector must not take a buffer's owner away before the buffer has given its chunk back.
@cython.freelist(256)
@cython.no_gc_clear
cdef class Buffer:
    """An allocation that frees itself, made by `Allocator.allocate`.

    It is freed when it is collected, by `free()`, or at the end of a `with` block. Other libraries
    use its memory without a copy: through the buffer protocol if the host can reach it, through
    `__cuda_array_interface__` if a CUDA device can, and through DLPack.

    Attributes
    ----------
    nbytes : int
        The size in bytes.
    read_only : bool
        True if other libraries may only read it; False except in a read-only `view`.

    Raises
    ------
    TypeError
        If called: an allocator makes buffers.

    Notes
    -----
    Views through the buffer protocol and DLPack are counted, and the memory is not freed while there
    are any. A reader of the address, or of `__cuda_array_interface__`, must keep the buffer alive.

    The host can read managed and pinned memory while work on it is still queued. Only `to_host`,
    `from_host` and DLPack to the host wait for that work.

    Examples
    --------
    >>> import bfc
    >>> with bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4) as buffer:
    ...     memoryview(buffer)[:] = b"abcd"
    ...     bytes(buffer)
    b'abcd'
    """

    __signature__ = SignatureOfStub()

    def __cinit__(self):        # any arguments, as a subclass's __init__ may take any
        self.owner = NOBODY

    def __init__(self):
        raise TypeError("buffers come from an allocator: bfc.BFCAllocator(...).allocate(nbytes)")

    def __dealloc__(self):
        if self.allocation_id:
            self.owner.free_handle_from_finaliser(self.handle, self.allocation_id)

    cdef uint64_t address(self) except? 0xFFFFFFFFFFFFFFFF:
        cdef int64_t allocation_id = counted(self.allocation_id)
        if self.nbytes and not (allocation_id and self.owner.is_live(self.handle, allocation_id)):
            raise self.owner.why_not(self.handle, allocation_id)
        return self.start

    cdef int hold(self) except -1:
        """Counts one more view of this memory. It is counted before the memory is looked up: a free or a close in
        between either sees the view, or the look-up sees the free or the close."""
        cdef int64_t allocation_id
        count_by(self.exports, <int64_t>1)
        count_by(self.owner.exports, <int64_t>1)
        allocation_id = counted(self.allocation_id)
        if self.nbytes and not self.owner.sync_exported(self.handle, allocation_id, &self.exports):
            self.let_go()
            raise self.owner.why_not(self.handle, allocation_id)
        return 0

    cdef void let_go(self) noexcept:
        count_by(self.exports, <int64_t>-1)
        count_by(self.owner.exports, <int64_t>-1)
        if counted(self.exports) == 0 and self.nbytes:
            self.owner.sync_exported(self.handle, counted(self.allocation_id), &self.exports)
        if counted(self.owner.exports) == 0:
            self.owner.last_view_gone()

    @property
    def device(self):
        """Where the memory lies: a `bfc.Device(kind, ordinal)`."""
        return self.owner.device

    @property
    def allocator(self):
        """The allocator that made the buffer."""
        return self.owner

    @property
    def ptr(self):
        """The address as an int; 0 for a buffer of 0 bytes.

        Raises
        ------
        ClosedError
            If the buffer was freed: the address may belong to another allocation by now.
        """
        if self.is_freed():
            raise ClosedError(_GONE)
        return self.start

    cdef bint is_freed(self) except -1:
        return counted(self.allocation_id) == 0 and self.nbytes > 0

    @property
    def stream(self):
        """The stream it was allocated for, as an int; None for pinned memory without a stream."""
        return self.owner.visible_stream(self.made_on)

    @property
    def freed(self):
        """True once `free()` has been called."""
        return self.is_freed()

    def free(self):
        """Free the memory now. Freeing twice does nothing.

        Raises
        ------
        BufferError
            If another object holds a view of it, through the buffer protocol or DLPack.
        InvalidPointerError
            If the memory was freed through its address.
        SubAllocatorError
            If another stream has used it, and the device fails when it is asked about it.

        Notes
        -----
        After an error the memory is still allocated. Cost: as `Allocator.deallocate_raw`.
        """
        cdef TurnAt turn      # of two threads one frees it
        turn.take(self)
        cdef int64_t allocation_id = self.allocation_id
        # A view that comes after this look is found under the lock: the free itself refuses then.
        if counted(self.exports):
            raise BufferError(f"{counted(self.exports)} view(s) of this buffer are in use: delete them first")
        if allocation_id:
            # Before the free, which may run Python: what that does with the buffer finds it freed.
            put(self.allocation_id, <int64_t>0)
            try:
                self.owner.free_handle(self.handle, allocation_id)
            except BaseException:
                put(self.allocation_id, allocation_id)
                if self.nbytes:     # a view may have gone meanwhile, and did not find the chunk
                    self.owner.sync_exported(self.handle, allocation_id, &self.exports)
                raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.free()

    def __len__(self):
        return self.nbytes

    def __repr__(self):
        state = ", freed" if self.is_freed() else ""
        return f"<bfc.Buffer {self.start:#x}, {self.nbytes} bytes on {self.device}{state}>"

    # -- the host ------------------------------------------------------------------------------------------------------

    cdef Buffer memory(self):
        """The buffer that the memory belongs to."""
        return self

    cdef _Layout items(self):
        return ONE_BYTE

    cdef tuple extents(self):
        return (self.nbytes,)

    cdef int require_host(self, what) except -1:
        if not self.owner.host_accessible:
            raise BufferError(f"{what}: this memory is on {self.device}, where the host cannot read it in place")
        return 0

    cdef int require_bytes(self, what) except -1:
        device = self.owner.device
        if device is None or device.kind == "simulated":
            raise BufferError(f"{what}: this memory is on {device}, where there are no bytes")
        return 0

    def __getbuffer__(self, Py_buffer* view, int flags):
        self.require_host("the buffer protocol")
        cdef _Layout items = self.items()
        cdef tuple shape = self.extents()
        if items.format is None:
            raise BufferError(f"the buffer protocol has no format for {items.typestr}")
        if flags & PyBUF_WRITABLE and self.read_only:
            raise BufferError("this view is read-only")
        # Memory of one dimension is contiguous in either order.
        if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and len(shape) > 1:
            raise BufferError("this memory lies row by row, not column by column")
        cdef Py_ssize_t ndim = len(shape), i, step = items.itemsize
        cdef bytes format = _FORMATS.get(items.format) or _FORMATS.setdefault(items.format, items.format.encode())
        cdef Py_ssize_t* dims = <Py_ssize_t*>PyMem_Malloc((2 * ndim + 1) * sizeof(Py_ssize_t))
        if dims == NULL:
            raise MemoryError
        for i in range(ndim - 1, -1, -1):
            dims[i] = shape[i]
            dims[ndim + i] = step
            step *= dims[i]
        try:
            view.buf = <void*>self.address()
            self.hold()     # the last step that may fail: from here on the view is counted, and will be released
        except BaseException:
            PyMem_Free(dims)
            raise
        view.obj = self
        view.len = self.nbytes
        view.itemsize = items.itemsize
        view.readonly = self.read_only
        view.ndim = <int>ndim
        view.shape = dims if flags & PyBUF_ND == PyBUF_ND else NULL
        view.strides = dims + ndim if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = dims
        view.format = PyBytes_AS_STRING(format) if flags & PyBUF_FORMAT else NULL

    def __releasebuffer__(self, Py_buffer* view):
        PyMem_Free(view.internal)
        self.let_go()

    def __array__(self, dtype=None, copy=None):
        """NumPy calls this if the buffer protocol fails: for a dtype that it has no format for, or to get the error."""
        import numpy

        self.require_host("NumPy (to_host() copies)")
        # By way of bytes, since NumPy reads no buffer of a dtype that has no format.
        array = numpy.frombuffer(self.view(numpy.uint8), numpy.uint8).view(self.items().dtype).reshape(self.extents())
        if dtype is not None and numpy.dtype(dtype) != array.dtype:
            if copy is not None and not copy:
                raise ValueError(f"{array.dtype} does not become {numpy.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    cdef int copy_bytes(self, uint64_t destination, uint64_t source) except -1:
        """Calls BufferOwner.copy_bytes with all of this memory as one side. The memory cannot be freed meanwhile."""
        self.address()
        if self.nbytes == 0:
            return 0
        self.hold()
        try:
            self.owner.copy_bytes(destination, source, self.nbytes, self.made_on)
        finally:
            self.let_go()
        return 0

    cdef object fitting(self, array):
        """`array` as a C-contiguous NumPy array of as many bytes as this buffer has."""
        import numpy

        array = numpy.frombuffer(array, numpy.uint8) if isinstance(array, bytes) else numpy.asarray(array, order="C")
        if array.dtype.hasobject:
            raise TypeError("an array of Python objects has no bytes that could be copied")
        if array.nbytes != self.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit a buffer of {self.nbytes} bytes: pass as many")
        return array

    def from_host(self, array):
        """Copy an array of the host into this memory.

        Parameters
        ----------
        array : array_like
            For a buffer: the bytes, exactly `nbytes` of them. For a view: an array of its shape, which
            is cast to its dtype if NumPy's "same_kind" rule allows it.

        Returns
        -------
        Buffer
            This one.

        Raises
        ------
        ValueError
            If the size or the shape differs, or if the view is read-only.
        TypeError
            If the dtype cannot be cast.
        BufferError
            If the memory is simulated.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        The copy comes after what is queued on the buffer's stream, and is complete on return. Cost: one
        copy, two if the array is not C-contiguous; it waits for the stream, without the GIL.

        Examples
        --------
        >>> import bfc, numpy
        >>> values = numpy.arange(3, dtype="f4")
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(values.nbytes).from_host(values)
        >>> buffer.view("f4").from_host([3, 4, 5]).to_host()
        array([3., 4., 5.], dtype=float32)
        """
        if self.read_only:
            raise ValueError("this view is read-only")
        self.require_bytes("from_host")
        array = self.fitting(array)
        self.copy_bytes(self.start, array_address(array))
        return self

    def to_host(self):
        """Copy this memory into a new NumPy array.

        Returns
        -------
        numpy.ndarray
            Of uint8 with shape (nbytes,) for a buffer, of its dtype and shape for a view.

        Raises
        ------
        BufferError
            If the memory is simulated.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        The copy comes after what is queued on the buffer's stream, and is complete on return. Cost: one
        copy; it waits for the stream, without the GIL.

        Examples
        --------
        >>> import bfc
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4).from_host(b"abcd")
        >>> buffer.to_host()
        array([ 97,  98,  99, 100], dtype=uint8)
        """
        import numpy

        self.require_bytes("to_host")
        array = numpy.empty(self.extents(), self.items().dtype)
        self.copy_bytes(array_address(array), self.start)
        return array

    # -- other libraries -----------------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self):
        """The CUDA Array Interface, version 3, as a new dict.

        The reader must keep this object alive: the interface does not, and such readers are not counted by `free()`.

        Raises
        ------
        AttributeError
            If a CUDA device cannot reach the memory.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        `stream` is the buffer's stream, which the reader has to wait for: 1 for the default stream, None
        for pinned memory without a stream and for 0 bytes. A dtype without a typestr of its own has the
        one that NumPy prints ("<V2" for bfloat16, as in PyTorch); use DLPack to tell such dtypes apart.

        Cost: no driver call. Source: numba-cuda's documentation, "CUDA Array Interface (Version 3)".

        Examples
        --------
        >>> import bfc
        >>> hasattr(bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4), "__cuda_array_interface__")
        False
        """
        device = self.owner.device
        if device is None or device.kind not in _CUDA_KINDS:
            raise AttributeError(f"no __cuda_array_interface__: memory on {device} cannot be reached by a CUDA device")
        cdef uint64_t start = self.address()
        cdef _Layout items = self.items()
        interface = {
            "shape": self.extents(),
            "typestr": items.typestr,
            # An empty buffer has no memory, whose address would be another's: the protocol wants 0 there.
            "data": (start if self.nbytes else 0, self.read_only),
            "strides": None,
            "version": 3,
            "stream": self.owner.interface_stream(self.made_on) if self.nbytes else None,
        }
        if items.descr is not None:
            interface["descr"] = list(items.descr)
        return interface

    def __dlpack_device__(self):
        """The device in DLPack's numbers.

        Returns
        -------
        tuple of (int, int)
            The device type and the device id. The id is 0 for memory of the host, and for managed memory.

        Raises
        ------
        BufferError
            If DLPack has no number for such memory.

        Notes
        -----
        Source: dlpack.h, `DLDevice`.
        """
        device = self.device
        if device is None or device.kind not in _DEVICE_TYPES:
            raise BufferError(f"DLPack has no number for memory on {device}")
        number = _DEVICE_TYPES[device.kind]
        return number, device.ordinal if number in (CUDA, OPENCL) else 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of this memory. It keeps the buffer alive until the consumer is done.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream: 1 (the legacy default stream, as None), 2 or a handle. It waits for
            the buffer's stream, and the memory is not reused before it has finished. With -1 nothing
            waits and nothing is recorded. Memory of the host takes None and -1 only, except that
            pinned memory takes streams too; with None it is handed to the host once the buffer's stream
            has finished.
        max_version : tuple of (int, int), optional
            The newest DLPack that the consumer knows. From (1, 0) on the capsule is versioned; older
            ones cannot say that memory is read-only or copied.
        dl_device : tuple of (int, int), optional
            Where the consumer wants it. Managed memory can be had as (2, ordinal), and what the host
            reaches as (1, 0), once the buffer's stream has finished; (1, 0) of other memory is a copy
            on the host.
        copy : bool, optional
            True copies within the same allocator; False never copies.

        Returns
        -------
        PyCapsule
            Named "dltensor_versioned", or "dltensor".

        Raises
        ------
        BufferError
            If the memory cannot be had in that way.
        ValueError
            If `stream` is 0, which is ambiguous.
        TypeError
            If `stream` is not an int.
        ClosedError
            If the memory was freed, or its allocator closed.
        DriverError
            If the driver does not know the stream.

        Notes
        -----
        PyTorch passes neither `dl_device` nor `copy`, but takes capsules:
        `torch.from_dlpack(pinned.__dlpack__(dl_device=(1, 0)))`.
        Source: the Python array API standard (2024.12), `__dlpack__`.

        Examples
        --------
        >>> import bfc, numpy
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(8).from_host(numpy.arange(2, dtype="i4"))
        >>> numpy.from_dlpack(buffer.view("i4"))
        array([0, 1], dtype=int32)
        """
        here = self.__dlpack_device__()
        cdef bint versioned = is_versioned(max_version)
        cdef tuple there = here if dl_device is None else device_from(dl_device)
        cdef object consumer = consumer_from(stream, self.device.kind in _CUDA_KINDS)
        cdef bint reachable = self.goes_as(there, here)
        if self.items().bits == 0:
            raise BufferError(f"DLPack has no code for {self.items().typestr}")
        if not reachable and there != _HOST:
            raise BufferError(f"the memory is on device {here}, and does not go to {there}")
        if not reachable and copy is not None and not copy:
            raise BufferError(f"the memory is on device {here}, and goes to {there} only as a copy")
        if not reachable:
            array = self.to_host()
            return capsule_of(array, array_address(array) if self.nbytes else 0, 0, self.extents(), self.items(), there,
                              versioned, IS_COPIED)
        if copy:
            return self.twin().exported(there, consumer, versioned, IS_COPIED)
        if self.read_only and not versioned:
            raise BufferError("read-only memory needs a consumer that takes DLPack 1.0, or a copy")
        return self.exported(there, consumer, versioned, READ_ONLY if self.read_only else 0)

    cdef bint goes_as(self, tuple there, tuple here) except -1:
        """Whether this memory can be exported for a DLPack device without a copy."""
        if there == _HOST:
            return there == here or self.owner.host_accessible
        return there == here or (self.device.kind == "cuda_managed" and there == (CUDA, self.device.ordinal))

    cdef Buffer twin(self):
        """A copy in new memory of the same allocator, for the same stream."""
        cdef Buffer copied = self.owner.another(self.nbytes, self.made_on)
        self.copy_bytes(copied.start, self.start)
        return copied.view(self.items().dtype, self.extents())

    cdef object exported(self, tuple there, consumer, bint versioned, uint64_t flags):
        """A capsule of this memory, which the consumer's stream, or the host, may use from now on."""
        cdef Buffer memory = self.memory()
        cdef _Share share = _Share.__new__(_Share)
        self.hold()
        share.shown = self
        if self.nbytes and consumer != -1:
            if there[0] == CPU or (consumer is None and there[0] not in (CUDA, CUDA_MANAGED)):
                self.owner.wait_for(self.made_on)
            else:
                share.consumer = self.owner.hand_to_stream(memory.handle, memory.allocation_id, self.made_on,
                                                           consumer or 0)
        data, offset = self.start if self.nbytes else 0, 0
        if there[0] == OPENCL and self.nbytes:
            data, offset = self.owner.exchange_address(self.start)
        return capsule_of(share, data, offset, self.extents(), self.items(), there, versioned, flags)

    def view(self, dtype, shape=None, *, read_only=False):
        """The same memory with a dtype and a shape.

        Parameters
        ----------
        dtype : dtype_like
            Anything that NumPy takes as a dtype.
        shape : int or sequence of int, optional
            One dimension may be -1. By default, as many items as the memory holds.
        read_only : bool, optional
            Offer the memory for reading only. NumPy and the host's arrays respect that; CuPy and
            PyTorch do not. A view of a read-only view is read-only.

        Returns
        -------
        BufferView
            It keeps the buffer alive.

        Raises
        ------
        ValueError
            If dtype and shape do not fit into the memory.
        TypeError
            If `dtype` or `shape` is not one.

        Notes
        -----
        Cost: no copy, no driver call.

        Examples
        --------
        >>> import bfc, numpy
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
        >>> view = buffer.view("f4", (2, -1))
        >>> numpy.asarray(view)[:] = 7
        >>> view.shape, view.view("f4", read_only=True).to_host()
        ((2, 3), array([7., 7., 7., 7., 7., 7.], dtype=float32))
        """
        return BufferView(self, dtype, shape, read_only=read_only)


@cython.no_gc_clear
cdef class BufferView(Buffer):
    """A buffer's memory with a dtype and a shape, made by `Buffer.view`.

    It keeps the buffer alive, and frees nothing itself.

    Parameters
    ----------
    base : Buffer
        The buffer that has the memory.
    dtype : dtype_like
        As in `Buffer.view`.
    shape : int or sequence of int, optional
        As in `Buffer.view`.
    read_only : bool, optional
        As in `Buffer.view`.

    Attributes
    ----------
    base : Buffer
        As given.
    shape : tuple of int
        Every dimension, none of them -1.

    Raises
    ------
    ValueError
        If dtype and shape do not fit into the memory.
    TypeError
        If `dtype` or `shape` is not one.
    RuntimeError
        If `__init__` is called twice.
    """

    def __init__(self, Buffer base not None, dtype, shape=None, *, read_only=False):
        import numpy

        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise ValueError("a view cannot hold Python objects")
        if dtype.itemsize == 0:
            raise ValueError(f"a view needs items of at least one byte, not {dtype}")
        if dtype.subdtype is not None:
            raise ValueError(f"{dtype} holds arrays: put their dimensions into the shape")
        if shape is None:
            if base.nbytes % dtype.itemsize:
                raise ValueError(f"{base.nbytes} bytes are not a whole number of {dtype}")
            shape = (base.nbytes // dtype.itemsize,)
        shape = shape_from(shape, base.nbytes // dtype.itemsize)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > base.nbytes:
            raise ValueError(f"{shape} of {dtype} needs {nbytes} bytes; there are {base.nbytes}")
        if math.prod(filter(None, shape)) * dtype.itemsize >= 2**63:
            raise ValueError(f"{shape} of {dtype} is not a shape: its strides are above 2**63 - 1 bytes")
        cdef _Layout layout = layout_of(dtype)
        cdef bint is_read_only = bool(read_only) or base.read_only
        cdef Py_ssize_t size = nbytes
        # Reading dtype and shape may run code of the caller, which may have called this __init__ a second time.
        if self.base is not None:
            raise RuntimeError("a view is made once: make another")
        self.layout = layout
        become(self, base.owner, base.handle, 0, base.start, size, base.made_on)
        self.read_only = is_read_only
        self.shape = shape
        self.base = base

    @property
    def dtype(self):
        """The NumPy dtype of its items."""
        return self.items().dtype

    cdef uint64_t address(self) except? 0xFFFFFFFFFFFFFFFF:
        if self.base is None:
            raise ClosedError(_VIEW_OF_NONE)
        return self.base.address()

    cdef int hold(self) except -1:
        if self.base is None:
            raise ClosedError(_VIEW_OF_NONE)
        return self.base.hold()

    cdef void let_go(self) noexcept:
        self.base.let_go()

    def free(self):
        """Do nothing: the memory belongs to the buffer under the view."""

    cdef Buffer memory(self):
        return self if self.base is None else self.base.memory()

    cdef _Layout items(self):
        return ONE_BYTE if self.layout is None else self.layout

    cdef tuple extents(self):
        return self.shape or ()

    cdef object fitting(self, array):
        import numpy

        array = numpy.asarray(array)
        if array.shape != self.shape:
            raise ValueError(f"an array of shape {array.shape} was given to a view of shape {self.shape}: they must "
                             f"be the same")
        return array.astype(self.dtype, order="C", casting="same_kind", copy=False)

    cdef bint is_freed(self) except -1:
        if self.base is None:
            raise ClosedError(_VIEW_OF_NONE)
        return self.base.is_freed()

    @property
    def freed(self):
        """True once the buffer under the view was freed."""
        return self.is_freed()

    def __repr__(self):
        state = ", read-only" if self.read_only else ""
        return f"<bfc.BufferView {self.dtype}{list(self.shape)} on {self.device}{state}>"


@cython.final
@cython.no_gc       # like the capsule that refers to it: the collector sees neither
@cython.freelist(16)
cdef class _Share:
    """What a DLPack capsule keeps alive: a buffer's memory, counted as a view as long as this object lives."""

    def __cinit__(self):
        self.consumer = NO_CONSUMER

    def __dealloc__(self):
        cdef Buffer memory
        if self.shown is None:
            return
        memory = self.shown.memory()
        if self.consumer != NO_CONSUMER:
            memory.owner.consumer_left(memory.allocation_id, self.consumer)
        self.shown.let_go()
