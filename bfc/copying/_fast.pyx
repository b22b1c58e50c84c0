"""`bfc.copy`, and a fast path between two NumPy arrays, which calls no Python function.

NumPy's function is found in its table when the first copy is made, so that neither building nor importing this needs
NumPy; the layout of an array is part of NumPy's ABI.
"""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.string cimport memmove

from bfc.native.turns cimport TurnAt, counted, put

cdef extern from *:
    """
    typedef struct {
        PyObject_HEAD
        char *data;
        int nd;
        Py_ssize_t *shape, *strides;
        PyObject *base, *dtype;
        int flags;
    } bfc_array;
    typedef struct {
        PyObject_HEAD
        PyObject *type;
        char kind, letter, byteorder, old_flags;
        int number;
    } bfc_dtype;
    typedef int (*bfc_copy_into)(PyObject *, PyObject *);
    """
    ctypedef struct Array "bfc_array":
        char* data
        int nd
        Py_ssize_t* shape
        Py_ssize_t* strides
        PyObject* dtype
        int flags
    ctypedef struct Dtype "bfc_dtype":
        char kind
        int number
    ctypedef int (*CopyInto "bfc_copy_into")(PyObject*, PyObject*) except -1

cdef enum:
    CONTIGUOUS = 1              # an array's flags
    WRITEABLE = 0x400
    COPY_INTO = 50              # PyArray_CopyInto in NumPy's table
    NUMBERS = 24                # of the built-in dtypes, up to half
    LONG_COPY = 1 << 16         # bytes; above this the GIL is released

#: The bytes of an item, by the number of its dtype; 0 if the dtype is not a plain number.
cdef int[NUMBERS] SIZES = [1, 1, 1, 2, 2, 4, 4, sizeof(long), sizeof(long), 8, 8, 4, 8, sizeof(long double),
                           8, 16, 2 * sizeof(long double), 0, 0, 0, 0, 0, 0, 2]

cdef object array_type = None
cdef object run_any = None
cdef CopyInto copy_into = NULL
cdef int is_loaded = 0          # which all others are before
cdef object loading = object()  # a turn at it is needed to set them


cdef int load() except -1:
    global array_type, run_any, copy_into
    import numpy

    # With the first copy, as NumPy is: many programs never make one.
    from bfc.copying import engine

    try:
        from numpy._core import _multiarray_umath
    except ImportError:
        from numpy.core import _multiarray_umath    # before NumPy 2
    cdef void** table = <void**>PyCapsule_GetPointer(_multiarray_umath._ARRAY_API, NULL)
    cdef TurnAt turn
    turn.take(loading)
    if is_loaded:
        return 0
    copy_into = <CopyInto>table[COPY_INTO]
    run_any = engine.run
    array_type = numpy.ndarray
    put(is_loaded, <int>1)
    return 0


cdef bint are_equal(const Py_ssize_t* one, const Py_ssize_t* other, int count) noexcept:
    cdef int i
    for i in range(count):
        if one[i] != other[i]:
            return False
    return True


cdef bint may_mix(const Array* to, Py_ssize_t size, const Array* source, Py_ssize_t source_size) noexcept:
    """Whether writing to a destination of one dimension may overwrite items of the source that are still to be read.
    NumPy itself handles more dimensions, and equal steps."""
    if to.nd != 1:
        return False
    cdef int last = source.nd - 1
    cdef Py_ssize_t step = to.strides[0]
    cdef Py_ssize_t read = source.strides[last] if last >= 0 and source.shape[last] != 1 else 0
    if step == read:
        return False
    cdef Py_ssize_t way = (to.shape[0] - 1) * step
    cdef Py_ssize_t source_way = (to.shape[0] - 1) * read
    return to.data + min(way, 0) < source.data + max(source_way, 0) + source_size and \
        source.data + min(source_way, 0) < to.data + max(way, 0) + size


cdef bint copy_arrays(PyObject* first, PyObject* second) except -1:
    """Copies between two arrays of numbers. Returns False if they are not, or if anything is wrong: the engine then
    does the copy or raises the error."""
    cdef Array* to = <Array*>first
    cdef Array* source = <Array*>second
    cdef Dtype* kind = <Dtype*>to.dtype
    cdef Dtype* given = <Dtype*>source.dtype
    cdef bint alike = to.dtype == source.dtype
    cdef int i
    if not 0 <= kind.number < NUMBERS or not 0 <= given.number < NUMBERS:
        return False
    if SIZES[kind.number] == 0 or SIZES[given.number] == 0:
        return False
    cdef bint same_shape = to.nd == source.nd and are_equal(to.shape, source.shape, to.nd)
    if alike and same_shape and to.data == source.data and are_equal(to.strides, source.strides, to.nd):
        return True
    if not to.flags & WRITEABLE or (given.kind == c'c' and kind.kind != c'c'):
        return False
    # NumPy mixes items up where two arrays overlap with different steps. The engine copies by way of a temporary then.
    if may_mix(to, SIZES[kind.number], source, SIZES[given.number]):
        return False
    cdef Py_ssize_t nbytes = SIZES[kind.number]
    for i in range(to.nd):
        nbytes *= to.shape[i]
        # Several items of the destination share memory, which is refused, by the engine's text.
        if to.strides[i] == 0 and to.shape[i] > 1:
            return False
    if alike and same_shape and to.flags & source.flags & CONTIGUOUS:
        if nbytes == 0:
            return True
        # For fewer bytes, giving the GIL away and taking it back would cost more than the copy.
        if nbytes < LONG_COPY:
            memmove(to.data, source.data, nbytes)
        else:
            move_long(to.data, source.data, nbytes)
        return True
    copy_into(first, second)
    return True


cdef void move_long(char* to, const char* source, Py_ssize_t nbytes) noexcept:
    with nogil:
        memmove(to, source, nbytes)


def copy(dst, src, *, non_blocking=False, stream=None, conj=False, neg=False):
    """Copy `src` into `dst`, cast to its dtype and broadcast to its shape.

    Parameters
    ----------
    dst : array
        A NumPy array, a `bfc.Buffer` or a view of one, an array or a buffer of pyopencl, or an
        object with the buffer protocol, `__cuda_array_interface__` or DLPack.
    src : array or array_like
        The same, or anything that NumPy can convert to an array.
    non_blocking : bool, optional
        Between the host and a device, return when the copy is queued. Do not change the host's
        memory before the stream has finished.
    stream : int or stream object, optional
        The stream that the copy is queued on: a CUDA stream or a `pyopencl.CommandQueue`. None is
        the stream of the enclosing `bfc.use_stream` if the memory can be on it, or else the one
        that the device's side names (between devices, the source), or else the default stream.
    conj : bool, optional
        Conjugate the values that were read, before the cast.
    neg : bool, optional
        Negate the values that were read, before the cast.

    Returns
    -------
    array
        `dst`.

    Raises
    ------
    ValueError
        If the shapes do not broadcast, a text is not a number, `dst` is read-only, items of `dst`
        share memory by a stride of 0, or `stream` belongs to a device that is not part of the copy.
    TypeError
        If a side is not memory, or holds Python objects.
    ClosedError
        If a buffer was freed, or its allocator closed.
    InvalidPointerError
        If memory of another library was freed. (For a released `Buffer`, pyopencl cannot tell, and
        may crash.)
    OutOfMemoryError
        If a device has no room for a temporary.
    DeviceUnavailableError
        If a package is missing.
    DriverError
        If the driver fails.

    Notes
    -----
    Between the host and a device the copy is complete on return, unless `non_blocking`. Between
    devices it is queued. Work on another stream is waited for only if the memory names that stream;
    in a copy within the host, only if it does so by `__cuda_array_interface__`. If neither the call
    nor the memory names an OpenCL queue, an OpenCL copy is complete on return. A CUDA graph can
    capture a transfer of pinned memory if the host does nothing else in it. The graph uses that
    memory each time it runs: keep it for as long.

    On error `dst` is unchanged, except after a DriverError. If `numpy.errstate` or a warnings
    filter turns something into an error, it is raised after the write, as by `numpy.copyto`.

    As in C, a float that does not fit into an integer gives an arbitrary one. A complex value loses
    its imaginary part in a real `dst`, with one `ComplexWarning` per copy. `src` and `dst` may overlap
    on the host; elsewhere the result of an overlap is undefined.

    Cost: one pass over the memory. Two, with a temporary, between host and device if the dtypes
    differ or one side is not contiguous, and between devices without peer access. The first copy
    that casts a pair of dtypes on a device compiles a kernel, in about a tenth of a second. Source:
    PyTorch's `Tensor.copy_`.

    Examples
    --------
    >>> import bfc, numpy
    >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
    >>> doubled = bfc.copy(buffer.view("f4", (2, 3)), numpy.arange(3))
    >>> bfc.copy(numpy.zeros((3, 2), "i2").T, doubled, neg=True)
    array([[ 0, -1, -2],
           [ 0, -1, -2]], dtype=int16)
    """
    if not counted(is_loaded):
        load()
    if not conj and not neg:
        if dst is src:
            return dst
        # Not subclasses: a masked array, say, has more to copy than its items.
        if type(dst) is array_type and type(src) is array_type and copy_arrays(<PyObject*>dst, <PyObject*>src):
            return dst
    run_any(dst, src, non_blocking, stream, conj, neg)
    return dst
