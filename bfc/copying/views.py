"""What memory an object stands for: `view_of` reads every protocol that leads to memory."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bfc.buffers._arguments import array_address
from bfc.buffers._buffer import Buffer, BufferView
from bfc.buffers._exchange import read_capsule
from bfc.copying.layout import expanded_strides, is_packed, packed_strides, span
from bfc.devices import (
    DLPACK_CODES,
    DLPACK_DEVICE_TYPES,
    DLPACK_EXTRA_CODES,
)
from bfc.errors import ClosedError
from bfc.streams import stream_handle

HOST = ("cpu", "cuda_host")
CUDA = ("cuda", "cuda_managed")
BYTE = np.dtype(np.uint8)


@dataclass(slots=True, eq=False)
class View:
    """Items in some memory: `address` is where the first one lies, or in OpenCL buffers its offset
    in `memory`. Strides are in bytes."""

    kind: str  # "cpu", "cuda_host", "cuda", "cuda_managed" or "opencl"
    ordinal: int
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    readonly: bool = False
    array: np.ndarray[Any, Any] | None = None  # of the host's memory
    memory: Any = None  # the pyopencl.Buffer; None for shared virtual memory
    context: Any = None  # pyopencl's
    stream: Any = None  # what is queued there comes first: a handle, for OpenCL a queue
    buffer: Buffer | None = None  # whose allocator is to know which streams use it
    events: Any = None  # the pyopencl.Array that keeps a list of events
    owner: Any = None  # kept until the copy is done

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.items * self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        return self.kind in HOST

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two views if equal addresses in them mean the same memory."""
        if self.on_host or self.kind in CUDA:
            return ("unified",)
        return ("opencl", self.memory.int_ptr if self.memory is not None else None)

    @property
    def is_packed(self) -> bool:
        return is_packed(self.shape, self.strides, self.dtype.itemsize)

    def is_same(self, other: View) -> bool:
        """Whether both show the same items of the same memory."""
        return (
            self.address == other.address
            and self.shape == other.shape
            and self.strides == other.strides
            and self.dtype == other.dtype
            and self.place == other.place
        )

    def overlaps(self, other: View) -> bool:
        """Whether the ranges of memory that both reach have a byte in common."""
        if self.place != other.place:
            return False
        low, high = span(self.shape, self.strides, self.dtype.itemsize)
        first, last = span(other.shape, other.strides, other.dtype.itemsize)
        return self.address + low < other.address + last and other.address + first < (
            self.address + high
        )

    def expanded(self, shape: tuple[int, ...]) -> View:
        """This view, broadcast to a shape. Raises ValueError."""
        if shape == self.shape:
            return self
        strides = expanded_strides(self.shape, self.strides, shape)
        array = self.array
        if array is not None:
            array = array.reshape(array.shape[max(array.ndim - len(shape), 0) :])
            array = np.broadcast_to(array, shape)
        return replace(self, shape=shape, strides=strides, array=array)


def view_of(thing: Any, *, writes: bool = False, stream: int = 1) -> View:
    """The memory of an object. `stream` is told to a DLPack producer on CUDA.

    Raises TypeError for what has no memory that can be read (written), ClosedError for a buffer
    that was freed, InvalidPointerError for CUDA memory that the driver does not know.
    """
    if isinstance(thing, Buffer):
        return _of_buffer(thing)
    if isinstance(thing, np.ndarray):
        return of_array(np.asarray(thing))
    if isinstance(thing, np.generic):  # some export bytes that know nothing of their dtype
        return replace(of_array(np.asarray(thing)), readonly=True)
    if (view := _of_pyopencl(thing)) is not None:
        return view
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_cuda_interface(interface, thing)
    try:
        return of_array(np.asarray(memoryview(thing)), thing)
    except (TypeError, BufferError):
        pass
    if hasattr(thing, "__dlpack__") and hasattr(thing, "__dlpack_device__"):
        return _of_dlpack(thing, stream)
    if writes and not (hasattr(thing, "__array_interface__") or hasattr(thing, "__array_struct__")):
        raise TypeError(
            f"a {type(thing).__name__} has no memory to copy into: a destination is a NumPy array "
            "or speaks the buffer protocol, __cuda_array_interface__ or DLPack, or is OpenCL's"
        )
    array = np.asarray(thing)
    if array.dtype.hasobject and not writes:
        raise TypeError(
            f"no array of numbers can be made of this {type(thing).__name__}: NumPy makes one of "
            "Python objects, which are not copied"
        )
    return of_array(array, thing)


def of_array(array: np.ndarray[Any, Any], owner: Any = None) -> View:
    """The host's memory under an array."""
    return View(
        "cpu",
        0,
        array_address(array),
        array.dtype,
        array.shape,
        array.strides,
        not array.flags.writeable,
        array=array,
        owner=owner,
    )


def _of_memory(kind: str, ordinal: int, address: int, like: View) -> View:
    """Host memory at an address."""
    low, high = span(like.shape, like.strides, like.dtype.itemsize)
    memory: Any = (ctypes.c_char * (high - low if like.items else 0)).from_address(address + low)
    array = np.ndarray(like.shape, like.dtype, memory, -low if like.items else 0, like.strides)
    array.flags.writeable = not like.readonly
    return replace(like, kind=kind, ordinal=ordinal, address=address, array=array)


# -- ours ------------------------------------------------------------------------------------------


def _of_buffer(buffer: Buffer) -> View:
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
        memory: Any = root
        flat = np.frombuffer(memory, dtype, view.items) if root.nbytes else np.empty(0, dtype)
        view.array = flat.reshape(shape)
        if view.readonly:
            view.array.flags.writeable = False
        return view
    if device.kind != "opencl":
        raise TypeError(f"memory on {device} has no bytes that could be copied")
    if root.nbytes:
        _find_in_opencl(view, root)
    return view


def _find_in_opencl(view: View, root: Buffer) -> None:
    """Finds OpenCL's buffer, and the offset in it, for the invented address of a buffer of ours."""
    source = root.allocator.sub_allocator
    if source.svm:
        _refuse_gone(root)  # DLPack has no shared virtual memory: the buffer is held as it is
    else:
        view.owner = (view.owner, root.__dlpack__(stream=-1, max_version=(1, 0)))  # or ClosedError
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


# -- pyopencl --------------------------------------------------------------------------------------


def _of_pyopencl(thing: Any) -> View | None:
    """The view of an array or a buffer of pyopencl. If there is one, pyopencl is loaded."""
    cl = sys.modules.get("pyopencl")
    if cl is None:
        return None
    arrays = sys.modules.get("pyopencl.array")
    if arrays is not None and isinstance(thing, arrays.Array):
        memory = thing.base_data
        if memory is None:
            return View("opencl", 0, 0, thing.dtype, thing.shape, thing.strides)
        view = _of_cl_memory(memory, thing.dtype, thing.shape, thing.strides, thing.offset)
        view.context, view.stream = thing.context, thing.queue or view.stream
        view.events = view.owner = thing
        return view
    if isinstance(thing, (cl.MemoryObjectHolder, cl.SVMPointer)):
        if isinstance(thing, cl.Image):
            raise TypeError("an image of OpenCL's is not copied: its layout is the driver's own")
        return _of_cl_memory(thing, BYTE, (thing.size,), (1,), 0)
    return None


def _of_cl_memory(
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
        view.stream = getattr(memory, "_queue", None)  # behind which pyopencl frees it
        view.context = None if view.stream is None else view.stream.context
    else:
        import pyopencl as cl

        view.context = memory.context
        view.readonly = bool(memory.flags & cl.mem_flags.READ_ONLY)
        _find_whole(view, memory)
    return view


def _find_whole(view: View, memory: Any) -> None:
    """A sub-buffer is a part of its buffer: so two parts are seen to overlap, and PoCL 3 crashes
    where rows of a sub-buffer are copied."""
    import pyopencl as cl

    whole = memory.get_info(cl.mem_info.ASSOCIATED_MEMOBJECT)
    if whole is None:
        view.memory = memory
    else:
        view.memory, view.address = whole, view.address + memory.offset


# -- __cuda_array_interface__ ----------------------------------------------------------------------


def _of_cuda_interface(interface: dict[str, Any], thing: Any) -> View:
    from bfc.drivers.cuda import calls

    if not isinstance(interface, dict):
        raise TypeError(
            f"the __cuda_array_interface__ of a {type(thing).__name__} is not a dict but a "
            f"{type(interface).__name__}"
        )
    if interface.get("mask") is not None:
        raise TypeError("__cuda_array_interface__ with a mask is not copied: copy data and mask")
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
    if view.kind == "cuda_host":
        return _of_memory("cuda_host", view.ordinal, address, view)
    return view


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
    `stream` is of another device, that is the default stream, for which the other side then waits.
    The device of managed memory is asked of the driver: its producers always name device 0."""
    from bfc.drivers.cuda import calls

    if managed:
        unordered = _exported(thing, stream=-1)
        address = read_capsule(unordered)[0]
        ordinal = calls.kind_and_ordinal(address)[1] if address else ordinal
    if not calls.belongs(stream, calls.device(ordinal)):
        stream = 1
    return _exported(thing, stream=stream), ordinal, stream


def _of_dlpack(thing: Any, stream: int) -> View:
    """The view of a DLPack capsule. It is not consumed: its own destructor frees the memory."""
    device, ordinal = (int(number) for number in thing.__dlpack_device__())
    if device not in _KINDS:
        raise TypeError(f"memory on DLPack's device {device} cannot be copied")
    on_cuda = device in (_CUDA, _CUDA_MANAGED)
    if on_cuda:
        managed = device == _CUDA_MANAGED
        capsule, ordinal, stream = _exported_on_cuda(thing, ordinal, stream, managed)
    else:
        capsule = _exported(thing)
    data, start, shape, steps, numbers, readonly = read_capsule(capsule)
    dtype = _dtype_of(*numbers)
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
        return _of_memory(view.kind, ordinal, start, view)
    return view


def _dtype_of(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """NumPy's dtype by DLPack's numbers."""
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
