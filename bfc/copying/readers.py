"""The protocols through which memory is found, and how each is read: `view_of`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bfc.buffers._buffer import Buffer, BufferView
from bfc.buffers._exchange import read_capsule
from bfc.copying.layout import packed_strides
from bfc.copying.view import CUDA, HOST, View, of_array, with_array
from bfc.devices import DLPACK_CODES, DLPACK_DEVICE_TYPES, DLPACK_EXTRA_CODES
from bfc.errors import ClosedError
from bfc.streams import stream_handle

BYTE = np.dtype(np.uint8)


# -- bfc's own -------------------------------------------------------------------------------------


def _buffer(buffer: Any, _stream: int) -> View | None:
    if not isinstance(buffer, Buffer):
        return None
    root = buffer
    while isinstance(root, BufferView):
        root = root.base
    if root.freed:
        raise ClosedError("this buffer was freed: its memory belongs to others now")
    if isinstance(buffer, BufferView):
        dtype, shape = buffer.dtype, buffer.shape
    else:
        dtype, shape = BYTE, (buffer.nbytes,)
    device = buffer.device
    view = View(
        device.kind,
        device.ordinal,
        buffer.ptr,
        dtype,
        shape,
        packed_strides(shape, dtype.itemsize),
        buffer.read_only,
        stream=buffer.stream,
        buffer=root if root.nbytes else None,
        owner=buffer,
    )
    if device.kind in CUDA:
        return view
    if device.kind in HOST:
        if root.nbytes:
            memory: Any = root
            view.held.append(memoryview(memory))
        return with_array(view)
    if device.kind != "opencl":
        raise TypeError(f"memory on {device} has no bytes to copy")
    if root.nbytes:
        _find_in_opencl(view, root)
    return view


def _find_in_opencl(view: View, root: Buffer) -> None:
    """Finds the OpenCL buffer, and the offset in it, for the made-up address of a `bfc.Buffer`."""
    source = root.allocator.sub_allocator
    if source.svm:
        _refuse_gone(root)  # DLPack has no shared virtual memory, so there is no capsule to hold
    else:
        view.held.append(root.__dlpack__(stream=-1, max_version=(1, 0)))  # or ClosedError
    view.context = source.context
    if not source.svm:
        view.memory, view.address = source.locate(view.address)
    view.stream = source.queue
    if root.stream:
        import pyopencl

        view.stream = pyopencl.CommandQueue.from_int_ptr(root.stream, True)


def _refuse_gone(block: Buffer | None) -> None:
    if block is None or block.freed or block.allocator.closed:
        raise ClosedError(
            "this memory was released, or its allocator closed: it belongs to others now"
        )


def _view(thing: Any, _stream: int) -> View | None:
    """A `View` that another part of bfc has made."""
    return thing if isinstance(thing, View) else None


# -- the host --------------------------------------------------------------------------------------


def _numpy(thing: Any, _stream: int) -> View | None:
    if not isinstance(thing, (np.ndarray, np.generic)):
        return None
    view = of_array(np.asarray(thing))
    if isinstance(thing, np.generic):
        view.readonly = True
    return view


def _buffer_protocol(thing: Any, _stream: int) -> View | None:
    try:
        array = np.asarray(memoryview(thing))
    except (TypeError, BufferError):  # BufferError: not possible for this memory or dtype
        return None
    return of_array(array, thing)


def _array_interface(thing: Any, _stream: int) -> View | None:
    known = hasattr(thing, "__array_interface__") or hasattr(thing, "__array_struct__")
    return of_array(np.asarray(thing), thing) if known else None


def _of_items(thing: Any) -> View:
    """A new array from something that is not memory, such as a number or a list of numbers."""
    array = np.asarray(thing)
    if array.dtype.hasobject:
        raise TypeError(
            f"no array of numbers can be made of this {type(thing).__name__}: NumPy makes one of "
            "Python objects, which are not copied"
        )
    return of_array(array, thing)


# -- pyopencl --------------------------------------------------------------------------------------


def _cl_array(array: Any, _stream: int) -> View | None:
    """An array of pyopencl. If there is one, pyopencl is imported already."""
    arrays = sys.modules.get("pyopencl.array")
    if arrays is None or not isinstance(array, arrays.Array):
        return None
    if array.base_data is None:
        return View("opencl", 0, 0, array.dtype, array.shape, array.strides)
    view = _in_opencl(array.base_data, array.dtype, array.shape, array.strides, array.offset)
    view.context, view.stream = array.context, array.queue or view.stream
    view.events = view.owner = array
    return view


def _cl_memory(memory: Any, _stream: int) -> View | None:
    """A buffer, an image or shared virtual memory of pyopencl."""
    cl = sys.modules.get("pyopencl")
    if cl is None or not isinstance(memory, (cl.MemoryObjectHolder, cl.SVMPointer)):
        return None
    if isinstance(memory, cl.Image):
        raise TypeError("bfc.copy does not copy OpenCL images: their layout is the driver's own")
    return _in_opencl(memory, BYTE, (memory.size,), (1,), 0)


def _in_opencl(
    memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> View:
    view = View("opencl", 0, offset, dtype, shape, strides, owner=memory)
    if hasattr(memory, "block"):  # it is of bfc.integrations.pyopencl
        view.buffer = memory.block
        _refuse_gone(memory.block)
    if hasattr(memory, "svm_ptr"):
        if not memory.svm_ptr and view.items:
            raise ClosedError("this shared virtual memory was released")
        view.address += memory.svm_ptr
        view.stream = getattr(memory, "_queue", None)  # pyopencl frees it after its work
        view.context = None if view.stream is None else view.stream.context
    else:
        import pyopencl as cl

        view.context = memory.context
        view.readonly = bool(memory.flags & cl.mem_flags.READ_ONLY)
        _find_whole(view, memory)
    return view


def _find_whole(view: View, memory: Any) -> None:
    """Replaces a sub-buffer by its buffer and an offset: otherwise an overlap of two parts would
    not be noticed, and PoCL 3 would crash when rows of a sub-buffer are copied."""
    import pyopencl as cl

    whole = memory.get_info(cl.mem_info.ASSOCIATED_MEMOBJECT)
    if whole is None:
        view.memory = memory
    else:
        view.memory, view.address = whole, view.address + memory.offset


# -- __cuda_array_interface__ ----------------------------------------------------------------------


def _cuda_interface(thing: Any, _stream: int) -> View | None:
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is None:
        return None
    from bfc.drivers.cuda import calls

    if not isinstance(interface, dict):
        raise TypeError(
            f"the __cuda_array_interface__ of a {type(thing).__name__} is not a dict but a "
            f"{type(interface).__name__}"
        )
    if interface.get("mask") is not None:
        raise TypeError(
            "bfc.copy does not copy a __cuda_array_interface__ with a mask: copy data and mask "
            "separately"
        )
    stream = interface.get("stream")
    if stream == 0:
        raise ValueError("__cuda_array_interface__ names stream 0, which could mean two streams")
    try:
        address, readonly, dtype, shape, strides = _read_interface(interface)
    except (KeyError, TypeError, ValueError) as error:
        raise TypeError(
            f"the __cuda_array_interface__ of a {type(thing).__name__} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    view = View("cuda", 0, address, dtype, shape, strides, readonly, owner=thing)
    if not view.items:
        return view
    view.kind, view.ordinal = calls.kind_and_ordinal(address)
    view.stream = None if stream is None else stream_handle(stream)
    return with_array(view) if view.on_host else view


def _read_interface(
    interface: dict[str, Any],
) -> tuple[int, bool, np.dtype[Any], tuple[int, ...], tuple[int, ...]]:
    """(address, whether it may only be read, dtype, shape, strides in bytes)."""
    address, readonly = interface["data"]
    typestr, shape = interface["typestr"], tuple(map(operator.index, interface["shape"]))
    plain = typestr[1:2] != "V" or not interface.get("descr")
    dtype = np.dtype(typestr if plain else [tuple(field) for field in interface["descr"]])
    strides = interface.get("strides")
    if strides is None:
        strides = packed_strides(shape, dtype.itemsize)
    strides = tuple(map(operator.index, strides))
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape} is negative")
    if 0 not in shape and not 0 <= operator.index(address) < 1 << 64:
        raise ValueError(f"{address} is not an address")
    return address or 0, bool(readonly), dtype, shape, strides


# -- DLPack ----------------------------------------------------------------------------------------


_CUDA, _OPENCL = DLPACK_DEVICE_TYPES["cuda"], DLPACK_DEVICE_TYPES["opencl"]
_CUDA_MANAGED = DLPACK_DEVICE_TYPES["cuda_managed"]
_KINDS = {number: kind for kind, number in DLPACK_DEVICE_TYPES.items()}
#: NumPy's kind by DLPack's code, and the dtypes that need ml_dtypes.
_CODES = {code: kind for kind, code in DLPACK_CODES.items()}
_EXTRA = {code: name for name, code in DLPACK_EXTRA_CODES.items()}


def _exported(thing: Any, **extra: int) -> Any:
    try:
        return thing.__dlpack__(max_version=(1, 0), **extra)
    except TypeError:
        return thing.__dlpack__(**extra)


def _exported_on_cuda(thing: Any, ordinal: int, stream: int, managed: bool) -> tuple[Any, int, int]:
    """The capsule, its device, and the stream of that device that its producer was given. If
    `stream` belongs to another device, the producer gets the default stream, and the other side
    waits for that. The driver is asked for the device of managed memory, since producers always
    name device 0."""
    from bfc.drivers.cuda import calls

    if managed:
        unordered = _exported(thing, stream=-1)
        address = read_capsule(unordered)[0]
        ordinal = calls.kind_and_ordinal(address)[1] if address else ordinal
    if not calls.belongs(stream, calls.device(ordinal)):
        stream = 1
    return _exported(thing, stream=stream), ordinal, stream


def _dlpack(thing: Any, stream: int) -> View | None:
    """The view of a DLPack capsule. It is not consumed: its own destructor frees the memory."""
    if not hasattr(thing, "__dlpack__") or not hasattr(thing, "__dlpack_device__"):
        return None
    device, ordinal = map(int, thing.__dlpack_device__())
    if device not in _KINDS:
        raise TypeError(f"memory on DLPack's device {device} cannot be copied")
    on_cuda = device in (_CUDA, _CUDA_MANAGED)
    if on_cuda:
        managed = device == _CUDA_MANAGED
        capsule, ordinal, stream = _exported_on_cuda(thing, ordinal, stream, managed)
    else:
        capsule = _exported(thing)
    data, start, shape, steps, codes, readonly = read_capsule(capsule)
    dtype = _dtype_of(*codes)
    strides = packed_strides(shape, dtype.itemsize)
    if steps is not None:
        strides = tuple(step * dtype.itemsize for step in steps)
    if device != _OPENCL:
        start += data
    view = View(_KINDS[device], ordinal, start, dtype, shape, strides, readonly)
    view.owner = (thing, capsule)
    if on_cuda:
        view.stream = stream
    elif not view.items:
        view.array = np.empty(shape, dtype) if view.on_host else None
    elif device == _OPENCL:
        import pyopencl as cl

        memory: Any = cl.Buffer.from_int_ptr(data, True)
        view.context = memory.context
        _find_whole(view, memory)
    else:
        with_array(view)
    return view


def _dtype_of(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """NumPy's dtype for DLPack's numbers."""
    if lanes != 1 or bits % 8:
        raise TypeError(f"items of {lanes} times {bits} bits are not copied")
    if code in _CODES:
        return np.dtype(f"{_CODES[code]}{bits // 8}")
    name = _EXTRA.get(code)
    if name is None:
        raise TypeError(f"NumPy has no dtype for DLPack's code {code}")
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(f"copies of {name} need the package ml_dtypes ({error})") from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


# -- the table of protocols ------------------------------------------------------------------------


#: Each returns None for an object that does not support its protocol; `stream` is for a DLPack
#: producer on CUDA. The first that an object supports is used: many arrays support several of the
#: last four.
PROTOCOLS: tuple[Callable[[Any, int], View | None], ...] = (
    *(_buffer, _view, _numpy, _cl_array, _cl_memory),
    *(_cuda_interface, _buffer_protocol, _dlpack, _array_interface),
)


def view_of(thing: Any, *, writes: bool = False, stream: int = 1) -> View:
    """The memory of an object. `stream` is passed to a DLPack producer on CUDA.

    Raises TypeError if the object has no memory to read (or, if `writes`, to write), ClosedError
    for a buffer that was freed, and InvalidPointerError for CUDA memory that the driver does not
    know.
    """
    for read in PROTOCOLS:
        view = read(thing, stream)
        if view is not None:
            return view
    if writes:
        raise TypeError(
            f"a {type(thing).__name__} has no memory to copy into: use a NumPy or pyopencl "
            "array, or an object with the buffer protocol, __cuda_array_interface__ or DLPack"
        )
    return _of_items(thing)
