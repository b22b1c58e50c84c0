"""Buffers: their life, and the protocols by which other libraries take their memory."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from dlpack_structures import KINDS

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
READ_ONLY, IS_COPIED = 1, 2  # DLPack's flags
PYTHON = ctypes.pythonapi
PYTHON.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
PYTHON.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p


@pytest.fixture
def host(make_allocator) -> bfc.BFCAllocator:
    return make_allocator(bfc.HostSubAllocator("8 MiB"))


def counting(host: bfc.BFCAllocator, nbytes: int = 64) -> bfc.Buffer:
    """A buffer whose bytes are 0, 1, 2, ..."""
    buffer = host.allocate(nbytes)
    memoryview(buffer)[:] = bytes(i % 256 for i in range(nbytes))
    return buffer


def unheld(buffer: bfc.Buffer) -> bool:
    """Whether nothing views the memory any more. It is freed."""
    buffer.free()
    return buffer.freed


# -- its life --------------------------------------------------------------------------------------


def test_a_buffer_knows_where_it_is(make_allocator) -> None:
    buffer = make_allocator().allocate(1000)
    assert (buffer.ptr, buffer.nbytes, len(buffer), buffer.stream) == (1 << 40, 1000, 1000, 0)
    assert buffer.device == bfc.Device("simulated", 0)
    assert repr(buffer) == "<bfc.Buffer 0x10000000000, 1000 bytes on simulated:0>"
    buffer.free()
    assert repr(buffer) == "<bfc.Buffer 0x10000000000, 1000 bytes on simulated:0, freed>"


def test_a_buffer_frees_itself_when_dropped(make_allocator) -> None:
    allocator = make_allocator()
    buffer = allocator.allocate(1000)
    assert allocator.stats().bytes_in_use == 1024
    del buffer
    assert allocator.stats().bytes_in_use == 0


def test_a_buffer_is_freed_at_the_end_of_with(make_allocator) -> None:
    allocator = make_allocator()
    buffer = allocator.allocate(1000)

    def fail() -> None:
        with buffer as same:
            assert same is buffer
            assert not buffer.freed
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert buffer.freed
    assert allocator.stats().bytes_in_use == 0


def test_freeing_twice_does_nothing_to_who_came_after(make_allocator) -> None:
    allocator = make_allocator()
    buffer = allocator.allocate(1000)
    address = buffer.ptr
    buffer.free()
    other = allocator.allocate(1000)
    assert other.ptr == address
    buffer.free()
    del buffer
    gc.collect()
    assert allocator.requested_size(other.ptr) == 1000


def test_a_buffer_whose_address_was_freed_harms_nobody(make_allocator) -> None:
    allocator = make_allocator()
    buffer = allocator.allocate(1000)
    allocator.deallocate_raw(buffer.ptr)
    other = allocator.allocate_raw(1000)
    assert other == buffer.ptr
    with pytest.raises(bfc.InvalidPointerError, match="already"):
        buffer.free()
    del buffer
    assert allocator.requested_size(other) == 1000


def test_a_buffer_outlives_its_allocators_name(simulated) -> None:
    device = simulated()
    buffer = bfc.BFCAllocator(device).allocate(1000)
    gc.collect()
    assert device.live_bytes == 64 * MIB
    del buffer
    gc.collect()
    assert device.live_bytes == 0


def test_a_buffer_of_a_closed_allocator_is_worthless_but_safe(host) -> None:
    buffer = counting(host)
    view = buffer.view("f4")
    host.close()
    for take in (
        memoryview,
        np.from_dlpack,
        lambda b: b.__dlpack__(),
        lambda b: np.frombuffer(b, "u1"),
    ):
        for which in (buffer, view):
            with pytest.raises(bfc.ClosedError):
                take(which)
    buffer.free()


def test_buffers_come_from_allocators_only() -> None:
    for make in (bfc.Buffer, lambda: bfc.Buffer(8)):
        with pytest.raises(TypeError):
            make()


def free_by_address(host: bfc.Allocator, buffer: bfc.Buffer) -> None:
    """And another allocation takes its place."""
    host.deallocate_raw(buffer.ptr)
    host.allocate_raw(64)


ENDS: dict[str, Callable[[bfc.Allocator, bfc.Buffer], object]] = {
    "freed": lambda host, buffer: buffer.free(),
    "freed by address": free_by_address,
    "closed": lambda host, buffer: host.close(),
}


@pytest.mark.parametrize("dead", ENDS)
def test_memory_that_is_gone_is_not_exported(host, dead: str) -> None:
    buffer = counting(host)
    ENDS[dead](host, buffer)
    for take in (memoryview, np.from_dlpack, bytes, lambda b: memoryview(b.view("f4"))):
        with pytest.raises(bfc.ClosedError):
            take(buffer)


#: What a dead buffer still says, or does: none of it touches the memory.
HARMLESS = {
    *("allocator", "base", "device", "dtype", "free", "freed", "nbytes", "read_only", "shape"),
    *("stream", "view"),
}
USES: dict[str, Callable[[bfc.Allocator, bfc.Buffer], object]] = {
    "ptr": lambda host, buffer: buffer.ptr,
    "to_host": lambda host, buffer: buffer.to_host(),
    "from_host": lambda host, buffer: buffer.from_host(np.zeros(64, np.uint8)),
    "record_stream": lambda host, buffer: host.record_stream(buffer, 7),
    "try_extend": lambda host, buffer: host.try_extend(buffer, 128),
}


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_freed_buffer_raises_the_same(host, use: str, is_view: bool) -> None:
    """`record_stream` and `try_extend` raised another error than all others."""
    buffer = host.allocate(64)
    used = buffer.view("u1") if is_view else buffer
    public = {name for name in dir(used) if not name.startswith("_")}
    assert public <= HARMLESS | USES.keys(), "a member that nobody has thought of"
    buffer.free()
    with pytest.raises(bfc.ClosedError, match="this buffer was freed, or its allocator closed"):
        USES[use](host, used)


def test_asarray_of_memory_that_is_gone_is_an_error_and_no_object_array(host) -> None:
    buffer = counting(host)
    buffer.free()
    with pytest.raises((bfc.ClosedError, BufferError)):
        np.asarray(buffer)


def test_a_buffer_can_be_weighed_hashed_and_compared_by_identity(host) -> None:
    a, b = host.allocate(64), host.allocate(64)
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2
    assert sys.getsizeof(a) < 200


# -- the buffer protocol ---------------------------------------------------------------------------


def test_host_memory_is_read_and_written(host) -> None:
    buffer = host.allocate(6)
    view = memoryview(buffer)
    assert (view.format, view.itemsize, view.shape, view.strides) == ("B", 1, (6,), (1,))
    assert (view.readonly, view.contiguous, view.nbytes) == (False, True, 6)
    view[:] = b"abcdef"
    view[0] = 65
    assert bytes(buffer) == b"Abcdef"
    assert ctypes.string_at(buffer.ptr, 6) == b"Abcdef"


def test_numpy_shares_the_memory(host) -> None:
    buffer = counting(host)
    for array in (np.asarray(buffer), np.frombuffer(buffer, np.uint8), np.from_dlpack(buffer)):
        assert (array.ctypes.data, array.dtype, array.shape) == (buffer.ptr, np.uint8, (64,))
        assert array.flags.writeable
        array[3] = 99
        assert memoryview(buffer)[3] == 99
        array[3] = 3


def test_a_view_with_a_dtype_and_a_shape_shares_the_memory(host) -> None:
    buffer = counting(host)
    view = buffer.view(np.float32, (4, 4))
    assert (view.ptr, view.nbytes, view.shape, view.dtype) == (buffer.ptr, 64, (4, 4), np.float32)
    np.asarray(view)[:] = np.arange(16).reshape(4, 4)
    assert np.frombuffer(buffer, "f4").tolist() == list(range(16))
    assert memoryview(view)[2, 3] == 11.0


def test_an_export_keeps_the_memory_alive(host) -> None:
    for take in (np.asarray, memoryview, np.from_dlpack, lambda b: np.asarray(b.view("u1"))):
        export = take(counting(host))
        gc.collect()
        assert host.stats().bytes_in_use == 256
        assert bytes(export) == bytes(range(64))
        del export
        assert host.stats().bytes_in_use == 0


def test_nothing_is_freed_or_closed_under_an_export(host) -> None:
    for take in (np.asarray, memoryview, np.from_dlpack, lambda b: np.asarray(b.view("f4"))):
        buffer = counting(host)
        export = take(buffer)
        with pytest.raises(BufferError, match="in use"):
            buffer.free()
        with pytest.raises(BufferError, match="in use"):
            host.close()
        assert not host.closed
        assert bytes(export) == bytes(range(64))
        del export
        buffer.free()


def test_two_exports_must_both_go(host) -> None:
    buffer = counting(host)
    first, second = np.asarray(buffer), memoryview(buffer)
    del first
    with pytest.raises(BufferError, match="1 view"):
        buffer.free()
    second.release()
    buffer.free()


def test_a_slice_of_an_export_counts_as_one(host) -> None:
    buffer = counting(host)
    part = memoryview(buffer)[4:8][1:]
    with pytest.raises(BufferError):
        buffer.free()
    assert bytes(part) == b"\5\6\7"
    del part
    buffer.free()


def test_ctypes_takes_it_too(host) -> None:
    buffer = counting(host)
    array = (ctypes.c_uint8 * 64).from_buffer(buffer)
    array[5] = 77
    assert memoryview(buffer)[5] == 77
    with pytest.raises(BufferError):
        buffer.free()
    del array


def test_simulated_memory_is_not_exported(make_allocator) -> None:
    buffer = make_allocator().allocate(64)
    view = buffer.view("f4")
    for which in (buffer, view):
        for take in (
            memoryview,
            bytes,
            np.from_dlpack,
            lambda b: b.__dlpack__(),
            lambda b: np.frombuffer(b),
        ):
            with pytest.raises(BufferError, match="simulated"):
                take(which)
        with pytest.raises(BufferError):
            which.__dlpack_device__()
    buffer.free()


def test_asarray_of_memory_off_the_host_is_an_error_and_no_object_array(make_allocator) -> None:
    buffer = make_allocator().allocate(64)
    with pytest.raises((BufferError, TypeError)):
        np.asarray(buffer)


def test_zero_bytes_can_be_exported_as_nothing(host) -> None:
    buffer = host.allocate(0)
    assert bytes(buffer) == b""
    assert np.asarray(buffer).shape == np.from_dlpack(buffer).shape == (0,)
    assert np.asarray(buffer.view("f4", (0, 3))).shape == (0, 3)
    assert np.from_dlpack(buffer.view("f4", (5, 0))).shape == (5, 0)
    buffer.free()
    assert not buffer.freed


PyBUF_F_CONTIGUOUS, PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE = 0x58, 0x98, 0, 1


def get_buffer(which: object, flags: int) -> tuple[int, int]:
    """(pointer, length) of an export with just these flags, given back at once."""
    view = (ctypes.c_ssize_t * 16)()
    get = PYTHON.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    get(which, ctypes.addressof(view), flags)
    found = view[0], view[2]
    PYTHON.PyBuffer_Release(ctypes.byref(view))
    return found


def test_a_plain_request_gets_plain_bytes(host) -> None:
    buffer = counting(host)
    for flags in (PyBUF_SIMPLE, PyBUF_ANY_CONTIGUOUS):
        assert get_buffer(buffer.view("f4", (4, 4)), flags) == (buffer.ptr, 64)
    buffer.free()


def test_rows_are_not_passed_off_as_columns(host) -> None:
    buffer = counting(host)
    with pytest.raises(BufferError):
        get_buffer(buffer.view("f4", (4, 4)), PyBUF_F_CONTIGUOUS)
    assert get_buffer(buffer.view("f4", (16,)), PyBUF_F_CONTIGUOUS) == (buffer.ptr, 64)
    buffer.free()


# -- dtypes ----------------------------------------------------------------------------------------


SHARED = [
    "u1",
    "i1",
    "u2",
    "i2",
    "f2",
    "u4",
    "i4",
    "f4",
    "u8",
    "i8",
    "f8",
    "c8",
    "c16",
    "?",
    "q",
    "L",
]
BUFFER_ONLY = [">i4", ">f8", "S4", "U2", [("a", "<i4"), ("b", "<f4")], "V4"]
NO_PROTOCOL = ["M8[s]", "m8[us]"]


def same(array: np.ndarray, expected: np.ndarray) -> bool:
    """The same dtype, and the same bytes: a NaN equals itself here."""
    return (array.dtype, array.shape, array.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


@pytest.mark.parametrize("dtype", SHARED + BUFFER_ONLY, ids=str)
def test_numpy_reads_a_view_through_the_buffer_protocol(host, dtype: object) -> None:
    expected = np.frombuffer(bytes(range(64)), np.dtype(dtype))
    assert same(np.asarray(counting(host).view(dtype)), expected)


@pytest.mark.parametrize("dtype", SHARED)
def test_numpy_reads_a_view_through_dlpack(host, dtype: str) -> None:
    assert same(np.from_dlpack(counting(host).view(dtype)), np.frombuffer(bytes(range(64)), dtype))


@pytest.mark.parametrize("dtype", BUFFER_ONLY + NO_PROTOCOL, ids=str)
def test_dlpack_refuses_what_it_has_no_code_for(host, dtype: object) -> None:
    buffer = counting(host)
    for version in (None, (1, 0)):
        with pytest.raises(BufferError):
            buffer.view(dtype).__dlpack__(max_version=version)
    buffer.free()


@pytest.mark.parametrize("dtype", NO_PROTOCOL)
def test_a_dtype_that_no_protocol_carries_is_never_misread(host, dtype: str) -> None:
    view = counting(host).view(dtype)
    try:
        array = np.asarray(view)
    except (ValueError, TypeError, BufferError):
        return
    assert same(array, np.frombuffer(bytes(range(64)), dtype))


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("f4", None, (16,)),
        ("f4", 16, (16,)),
        ("f4", (), ()),
        ("f4", -1, (16,)),
        ("f4", (4, -1), (4, 4)),
        ("f4", [2, 2], (2, 2)),
        ("f4", np.array([4, 4]), (4, 4)),
        ("f4", (0,), (0,)),
        ("u1", (1,) * 64, (1,) * 64),
        (np.dtype("i2"), (2, 4, 4), (2, 4, 4)),
        (float, 3, (3,)),
    ],
)
def test_shapes_that_fit(host, dtype: object, shape: object, expected: tuple) -> None:
    view = counting(host).view(dtype, shape)
    assert view.shape == expected
    assert view.nbytes == int(np.prod(expected)) * np.dtype(dtype).itemsize
    assert np.from_dlpack(view).shape == expected


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("f4", 17),
        ("f4", (4, 5)),
        ("f4", -2),
        ("f4", (-1, -1)),
        ("f4", (-1, 3)),
        ("f4", (0, -1)),
        ("f4", 2**62),
        ("f4", (2**32, 2**32)),
        ("u1", (0, 2**70)),
        ("u1", (1,) * 65),
        (np.dtype("V12"), None),
        (object, None),
        ([("a", object)], None),
        ("V0", None),
        ("S0", 4),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_value_errors(
    host, dtype: object, shape: object
) -> None:
    with pytest.raises(ValueError, match=r"shape|fill|whole|needs|hold|items"):
        counting(host).view(dtype, shape)


@pytest.mark.parametrize(
    "shape", [(0, 2**62, 2**62), (2**62, 2**62, 0), (2**62, 0, 3), (0, 2**61)], ids=str
)
def test_strides_that_no_int_holds_are_value_errors(host, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"its strides are above 2\*\*63 - 1 bytes"):
        counting(host).view("f4", shape)


def test_a_view_that_is_made_while_it_is_made_stays_whole(host) -> None:
    first, second = host.allocate(4096), host.allocate(4096)
    view = bfc.BufferView.__new__(bfc.BufferView)
    held = []

    class Reenters:
        @property
        def dtype(self) -> np.dtype:
            view.__init__(first, "u1")
            held.append(memoryview(view))
            return np.dtype("u1")

    with pytest.raises(RuntimeError, match="made once"):
        view.__init__(second, Reenters())
    assert view.base is first
    held.pop().release()
    held.append(memoryview(view))
    with pytest.raises(BufferError, match="1 view"):
        first.free()
    held.clear()
    assert unheld(first)
    assert unheld(second)


@pytest.mark.parametrize("shape", ["44", 4.0, (4, None), {"a": 1}, object()])
def test_what_is_no_shape_is_a_type_error(host, shape: object) -> None:
    with pytest.raises(TypeError):
        counting(host).view("f4", shape)


def test_a_view_keeps_its_buffer_alive_and_frees_nothing(host) -> None:
    view = counting(host).view("u1").view("f4", (2, 2))
    gc.collect()
    assert host.stats().bytes_in_use == 256
    view.free()
    with view:
        pass
    assert not view.freed
    assert bytes(view) == bytes(range(16))
    assert isinstance(view.base, bfc.Buffer)
    del view
    assert host.stats().bytes_in_use == 0


def test_a_view_of_a_freed_buffer_says_so(host) -> None:
    buffer = counting(host)
    view = buffer.view("f4")
    buffer.free()
    assert view.freed
    with pytest.raises(bfc.ClosedError):
        memoryview(view)
    with pytest.raises(bfc.ClosedError):
        view.__dlpack__()


def test_a_view_names_its_dtype_and_shape(host) -> None:
    assert repr(counting(host).view("f4", (4, 4))) == "<bfc.BufferView float32[4, 4] on cpu:0>"


# -- DLPack ----------------------------------------------------------------------------------------

#: A capsule keeps the pointer to its name, not a copy.
USED = {version: b"used_" + name for version, (name, _kind) in KINDS.items()}
EITHER_KIND = pytest.mark.parametrize("version", list(KINDS))


def opened(capsule: object, version: object) -> ctypes.Structure:
    name, kind = KINDS[version]
    assert PYTHON.PyCapsule_IsValid(capsule, name)
    return kind.from_address(PYTHON.PyCapsule_GetPointer(capsule, name))


def consume(capsule: object, version: object) -> ctypes.Structure:
    """Takes the capsule over, as a library does: from now on the deleter is ours to call."""
    managed = opened(capsule, version)
    PYTHON.PyCapsule_SetName(capsule, USED[version])
    return managed


@EITHER_KIND
def test_a_capsule_describes_the_memory(host, version: object) -> None:
    buffer = counting(host)
    capsule = buffer.view("i2", (2, 4, 3)).__dlpack__(max_version=version)
    tensor = opened(capsule, version).tensor
    assert (tensor.data, tensor.byte_offset, tensor.ndim) == (buffer.ptr, 0, 3)
    assert (
        (tensor.device.device_type, tensor.device.device_id) == (1, 0) == buffer.__dlpack_device__()
    )
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 16, 1)
    assert tensor.shape[:3] == [2, 4, 3]
    assert tensor.strides[:3] == [12, 3, 1]


def test_a_versioned_capsule_is_version_one_and_writable(host) -> None:
    buffer = counting(host)
    for asked in ((1, 0), (1, 3), (2, 0)):
        capsule = buffer.__dlpack__(max_version=asked)
        managed = opened(capsule, (1, 0))
        assert (managed.major, managed.flags) == (1, 0)
    for asked in ((0, 8), None):
        assert PYTHON.PyCapsule_IsValid(buffer.__dlpack__(max_version=asked), b"dltensor")


@EITHER_KIND
def test_a_capsule_dropped_unused_lets_go(host, version: object) -> None:
    buffer = counting(host)
    before = sys.getrefcount(buffer)
    capsules = [buffer.__dlpack__(max_version=version) for _ in range(100)]
    assert sys.getrefcount(buffer) == before + 100
    with pytest.raises(BufferError, match="100 view"):
        buffer.free()
    capsules.clear()
    assert sys.getrefcount(buffer) == before
    buffer.free()


@EITHER_KIND
def test_a_consumed_capsule_lets_go_when_its_deleter_is_called(host, version: object) -> None:
    buffer = counting(host)
    before = sys.getrefcount(buffer)
    capsule = buffer.__dlpack__(max_version=version)
    managed = consume(capsule, version)
    del capsule
    assert sys.getrefcount(buffer) == before + 1
    with pytest.raises(BufferError):
        buffer.free()
    managed.deleter(ctypes.addressof(managed))
    assert sys.getrefcount(buffer) == before
    buffer.free()


@EITHER_KIND
def test_a_consumed_capsule_keeps_the_memory_alive_alone(host, version: object) -> None:
    buffer = counting(host)
    capsule = buffer.__dlpack__(max_version=version)
    managed = consume(capsule, version)
    del capsule, buffer
    gc.collect()
    assert host.stats().bytes_in_use == 256
    assert ctypes.string_at(managed.tensor.data, 64) == bytes(range(64))
    managed.deleter(ctypes.addressof(managed))
    assert host.stats().bytes_in_use == 0


@EITHER_KIND
def test_a_capsule_dropped_while_an_error_flies_does_not_swallow_it(host, version: object) -> None:
    def fail_with_a_capsule() -> None:
        capsule = counting(host).__dlpack__(max_version=version)
        raise KeyError(PYTHON.PyCapsule_IsValid(capsule, b"dltensor"))

    with pytest.raises(KeyError):
        fail_with_a_capsule()
    gc.collect()
    assert host.stats().bytes_in_use == 0


@EITHER_KIND
@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [
        ("i1", 0, 8),
        ("u8", 1, 64),
        ("f2", 2, 16),
        ("f8", 2, 64),
        ("c8", 5, 64),
        ("c16", 5, 128),
        ("?", 6, 8),
    ],
)
def test_dtypes_have_dlpacks_codes(host, version, dtype: str, code: int, bits: int) -> None:
    capsule = counting(host).view(dtype).__dlpack__(max_version=version)
    tensor = opened(capsule, version).tensor
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)


@EITHER_KIND
def test_nothing_is_an_empty_tensor(host, version: object) -> None:
    capsule = host.allocate(0).__dlpack__(max_version=version)
    tensor = opened(capsule, version).tensor
    assert (tensor.data, tensor.ndim, tensor.shape[0]) == (None, 1, 0)


@pytest.mark.parametrize(
    "options",
    [{"stream": 1}, {"stream": 0}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}],
)
def test_what_dlpack_cannot_do_is_a_buffer_error(host, options: dict) -> None:
    buffer = counting(host)
    with pytest.raises(BufferError):
        buffer.__dlpack__(**options)
    buffer.free()


@pytest.mark.parametrize(
    "options",
    [{"dl_device": (1, 0)}, {"copy": False}, {"stream": None}, {"copy": None}, {"stream": -1}],
)
def test_what_dlpack_can_do(host, options: dict) -> None:
    buffer = counting(host)
    capsule = buffer.__dlpack__(max_version=(1, 0), **options)
    assert opened(capsule, (1, 0)).tensor.data == buffer.ptr


def test_odd_arguments_to_dlpack_leave_nothing_held(host) -> None:
    buffer = counting(host)
    for options in (
        {"max_version": "x"},
        {"dl_device": 5},
        {"dl_device": (1, 0, 0)},
        {"dl_device": ("cpu", 0)},
        {"max_version": 1},
        {"stream": True},
        {"stream": 1.0},
    ):
        with pytest.raises((TypeError, IndexError, ValueError, BufferError)):
            buffer.__dlpack__(**options)
    with pytest.raises(TypeError):
        buffer.__dlpack__(None)
    buffer.free()


def test_numpy_copies_on_request_only(host) -> None:
    buffer = counting(host)
    shared = np.from_dlpack(buffer, copy=False)
    copied = np.from_dlpack(buffer, copy=True)
    assert shared.ctypes.data == buffer.ptr != copied.ctypes.data
    assert copied.tobytes() == bytes(range(64))
    copied[:] = 0
    assert bytes(buffer) == bytes(range(64))


def test_a_copy_belongs_to_the_allocator_and_goes_with_its_consumer(host) -> None:
    view = counting(host).view("i2", (4, 8))
    capsule = view.__dlpack__(max_version=(1, 0), copy=True)
    managed = opened(capsule, (1, 0))
    assert managed.flags == IS_COPIED
    assert managed.tensor.data != view.ptr
    assert host.requested_size(managed.tensor.data) == 64
    assert ctypes.string_at(managed.tensor.data, 64) == bytes(range(64))
    assert unheld(view.base)
    del capsule
    assert host.stats().bytes_in_use == 0


def test_a_copy_of_nothing_is_nothing(host) -> None:
    capsule = host.allocate(0).__dlpack__(copy=True)
    assert opened(capsule, None).tensor.data is None


def test_a_copy_without_room_holds_nothing(make_allocator) -> None:
    host = make_allocator(bfc.HostSubAllocator("1 MiB"))
    buffer = host.allocate(MIB * 3 // 4)
    with pytest.raises(bfc.OutOfMemoryError):
        buffer.__dlpack__(copy=True)
    assert unheld(buffer)


@pytest.mark.usefixtures("quiet_collector")
@EITHER_KIND
@pytest.mark.parametrize("copy", [None, True])
def test_a_capsule_that_cannot_be_made_leaves_nothing_held(host, version, copy) -> None:
    """Memory runs out at each place where some is asked for in turn."""
    tools = pytest.importorskip("_testcapi")
    buffer = counting(host)
    references = sys.getrefcount(buffer)
    failures = 0
    for place in range(60):
        tools.set_nomemory(place, place + 1)
        try:
            capsule = buffer.__dlpack__(max_version=version, copy=copy)
        except (MemoryError, ctypes.ArgumentError):
            capsule = None
            failures += 1
        finally:
            tools.remove_mem_hooks()
        del capsule
        assert sys.getrefcount(buffer) == references
        assert host.stats().bytes_in_use == 256
    assert failures >= 2
    assert unheld(buffer)


def test_dlpack_knows_the_small_floats(host) -> None:
    small = pytest.importorskip("ml_dtypes")
    for name, code, bits in (
        ("bfloat16", 4, 16),
        ("float8_e4m3fn", 10, 8),
        ("float8_e5m2", 12, 8),
        ("float8_e8m0fnu", 14, 8),
    ):
        view = counting(host).view(getattr(small, name))
        tensor = opened(view.__dlpack__(), None).tensor
        assert (tensor.code, tensor.bits, tensor.shape[0]) == (code, bits, 512 // bits)
        assert view.to_host().dtype == np.asarray(view).dtype == view.dtype
        assert np.asarray(view).tobytes() == view.to_host().tobytes() == bytes(range(64))
    with pytest.raises(BufferError):
        counting(host).view(small.int4).__dlpack__()


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_dlpack_has_no_long_double(host, dtype: type) -> None:
    view = host.allocate(64).view(dtype)
    with pytest.raises(BufferError):
        view.__dlpack__()
    assert np.asarray(view).dtype == dtype


# -- read-only views -------------------------------------------------------------------------------


def test_a_view_says_whether_it_is_read_only(host) -> None:
    buffer = counting(host)
    view = buffer.view("f4", read_only=True)
    assert (buffer.read_only, buffer.view("f4").read_only) == (False, False)
    assert view.read_only
    assert view.view("u1").read_only
    assert view.view("u1", read_only=False).read_only
    assert repr(view) == "<bfc.BufferView float32[16] on cpu:0, read-only>"


@pytest.mark.parametrize("dtype", ["f4", "M8[s]", "u1"])
def test_a_read_only_view_gives_arrays_that_stay_read_only(host, dtype: str) -> None:
    view = counting(host).view(dtype, read_only=True)
    arrays = [np.asarray(view), view.__array__()]
    arrays += [np.from_dlpack(view)] if dtype != "M8[s]" else []
    for array in arrays:
        assert array.tobytes() == bytes(range(64))
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_who_wants_to_write_gets_no_read_only_memory(host) -> None:
    buffer = counting(host)
    view = buffer.view("u1", read_only=True)
    assert memoryview(view).readonly
    assert not memoryview(buffer).readonly
    for take in (
        (ctypes.c_uint8 * 64).from_buffer,
        lambda which: get_buffer(which, PyBUF_WRITABLE),
        lambda which: io.BytesIO(bytes(64)).readinto(which),
    ):
        take(buffer)
        with pytest.raises((BufferError, TypeError), match=r"read-only|read-write|writable"):
            take(view)
    gc.collect()
    assert unheld(buffer)


def test_an_old_capsule_does_not_hide_that_memory_is_read_only(host) -> None:
    buffer = counting(host)
    view = buffer.view("u1", read_only=True)
    for version in (None, (0, 8)):
        with pytest.raises(BufferError, match="read-only"):
            view.__dlpack__(max_version=version)
    assert opened(view.__dlpack__(max_version=(1, 0)), (1, 0)).flags == READ_ONLY
    assert unheld(buffer)


@EITHER_KIND
def test_a_copy_of_read_only_memory_may_be_written(host, version: object) -> None:
    view = counting(host).view("u1", read_only=True)
    managed = opened(view.__dlpack__(max_version=version, copy=True), version)
    assert getattr(managed, "flags", IS_COPIED) == IS_COPIED


def test_nothing_is_copied_into_a_read_only_view(host) -> None:
    view = counting(host).view("u1", read_only=True)
    with pytest.raises(ValueError, match="read-only"):
        view.from_host(bytes(64))
    copied = view.to_host()
    assert copied.flags.writeable
    assert copied.tobytes() == bytes(range(64))


# -- from the host, and to it ----------------------------------------------------------------------

NUMBERS = np.arange(24, dtype="f4").reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [
        NUMBERS,
        NUMBERS.T,
        NUMBERS[::-2, 1::2],
        np.asfortranarray(NUMBERS),
        np.array(3.5),
        np.array([1, 2], ">i4"),
        np.array([(1, 2.5)], [("a", "u1"), ("b", "<f8")]),
        np.array(["2026-11-21"], "M8[D]"),
        bytearray(b"abcd"),
        memoryview(b"abcdefgh")[::2],
        [1, 2, 3],
        7,
        [[], []],
    ],
    ids=lambda array: str(type(array).__name__),
)
def test_a_buffer_takes_the_bytes_of_an_array(host, array: object) -> None:
    expected = np.asarray(array).tobytes()
    buffer = host.allocate(len(expected))
    assert buffer.from_host(array) is buffer
    assert same(buffer.to_host(), np.frombuffer(expected, "u1"))


def test_bytes_are_taken_as_they_are(host) -> None:
    for data in (b"", b"a", b"\0\0", bytes(range(256))):
        assert host.allocate(len(data)).from_host(data).to_host().tobytes() == data


def test_an_array_goes_in_and_comes_out(host) -> None:
    buffer = host.allocate(NUMBERS.nbytes).from_host(NUMBERS)
    view = buffer.view("f4", (4, 6))
    out = view.to_host()
    assert same(out, NUMBERS)
    out[:] = 0
    assert same(view.to_host(), NUMBERS)
    assert view.from_host(NUMBERS[::-1]) is view
    assert same(view.to_host(), NUMBERS[::-1])


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("f4", np.array([1.5, 2.5])),
        ("f4", np.array([1, 2])),
        ("f4", [1.5, 2.5]),
        ("f8", np.array([1.5, 2.5], "f2")),
        (">i4", np.array([1, 2], "<i4")),
        ("i4", np.array([1, 2], "i8")),
        ("c8", np.array([1.5, 2.5])),
        ("?", [True, False]),
        ("U3", ["ab", "abc"]),
    ],
)
def test_a_view_casts_within_a_kind(host, dtype: str, given: object) -> None:
    view = host.allocate(2 * np.dtype(dtype).itemsize).view(dtype)
    assert same(view.from_host(given).to_host(), np.asarray(given).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("i4", [1.5, 2.5]), ("u1", [1, 2]), ("f4", [1j, 2]), ("f4", ["a", "b"]), ("f4", [None, 1])],
)
def test_a_view_refuses_another_kind(host, dtype: str, given: object) -> None:
    buffer = counting(host)
    with pytest.raises(TypeError, match="same_kind"):
        buffer.view(dtype, 2).from_host(given)
    assert bytes(buffer) == bytes(range(64))


def test_a_size_or_a_shape_that_differs_is_named(host) -> None:
    buffer = counting(host)
    with pytest.raises(ValueError, match=r"63 bytes .* of 64"):
        buffer.from_host(bytes(63))
    with pytest.raises(ValueError, match=r"128 bytes .* of 64"):
        buffer.from_host(np.zeros(16))
    for shape in ((16,), (8, 2), (4, 4, 1), ()):
        with pytest.raises(ValueError, match=r"shape \(.*\) .* of shape \(4, 4\)"):
            buffer.view("f4", (4, 4)).from_host(np.zeros(shape, "f4"))
    assert bytes(buffer) == bytes(range(64))


def test_python_objects_have_no_bytes(host) -> None:
    for array in (np.array([None]), np.array([(None,)], [("a", object)]), object()):
        with pytest.raises(TypeError, match="objects"):
            host.allocate(8).from_host(array)


def test_nothing_is_copied_from_and_to_nothing(host) -> None:
    buffer = host.allocate(0)
    assert same(buffer.from_host([]).to_host(), np.empty(0, "u1"))
    view = counting(host).view("f4", (0, 3))
    assert same(view.from_host(np.empty((0, 3))).to_host(), np.empty((0, 3), "f4"))
    assert same(counting(host).view("i2", ()).to_host(), np.array(256, "i2"))


def test_a_copy_touches_no_neighbour(host) -> None:
    buffers = [counting(host, 256) for _ in range(3)]
    buffers[1].from_host(bytes(256))
    buffers[1].view("u1", 100).from_host(np.ones(100, "u1"))
    assert [bytes(buffers[0]), bytes(buffers[2])] == [bytes(range(256))] * 2
    assert bytes(buffers[1]) == bytes([1]) * 100 + bytes(156)


@pytest.mark.parametrize("dead", ENDS)
def test_memory_that_is_gone_is_not_copied(host, dead: str) -> None:
    buffer = counting(host)
    view = buffer.view("u1", 8)
    ENDS[dead](host, buffer)
    for use in (
        buffer.to_host,
        view.to_host,
        lambda: buffer.from_host(bytes(64)),
        lambda: view.from_host(np.zeros(8, "u1")),
    ):
        with pytest.raises(bfc.ClosedError):
            use()


def test_simulated_memory_is_not_copied(make_allocator) -> None:
    buffer = make_allocator().allocate(64)
    for which in (buffer, buffer.view("f4")):
        for use in (which.to_host, lambda which=which: which.from_host(bytes(64))):
            with pytest.raises(BufferError, match="simulated:0, where there are no bytes"):
                use()
    assert unheld(buffer)


def test_nothing_is_freed_under_a_copy(make_allocator) -> None:
    source = Misbehaving(bfc.HostSubAllocator("8 MiB"))
    host = make_allocator(source)
    buffer = counting(host)
    refused = []

    def meddle() -> None:
        for end in (buffer.free, host.close, lambda: host.deallocate_raw(buffer.ptr)):
            with pytest.raises(BufferError):
                end()
            refused.append(end)

    source.on("copy", first=meddle)
    assert buffer.to_host().tobytes() == bytes(range(64))
    assert bytes(buffer.from_host(bytes(64))) == bytes(64)
    assert len(refused) == 6
    assert unheld(buffer)


@pytest.mark.parametrize(
    "use", [bfc.Buffer.to_host, lambda b: b.from_host(bytes(64)), lambda b: b.__dlpack__(copy=True)]
)
def test_a_copy_that_fails_holds_nothing(make_allocator, use: Callable) -> None:
    source = Misbehaving(bfc.HostSubAllocator("8 MiB"))

    source.on("copy", raises=bfc.SubAllocatorError("the cable was cut"))
    buffer = make_allocator(source).allocate(64)
    with pytest.raises(bfc.SubAllocatorError, match="cable"):
        use(buffer)
    assert unheld(buffer)


def test_an_array_of_another_dtype_is_a_copy(host) -> None:
    view = counting(host).view("M8[s]")
    with pytest.raises(ValueError, match="copy"):
        view.__array__("M8[D]", copy=False)
    assert same(view.__array__("M8[D]"), view.to_host().astype("M8[D]"))
    assert view.__array__("M8[s]", copy=False).ctypes.data == view.ptr
    assert view.__array__(copy=True).ctypes.data != view.ptr


# -- CUDA's memory, without CUDA -------------------------------------------------------------------


def pretended(kind: str = "cuda", ordinal: int = 0, *, on_host: bool = False) -> Misbehaving:
    """Host memory that passes for CUDA's. `told` has who waits for whom."""
    device = Misbehaving(
        bfc.HostSubAllocator("8 MiB"),
        asynchronous=True,
        default_stream_alias=1,
        device=bfc.Device(kind, ordinal),
        host_accessible=on_host or kind == "cuda_host",
        stream_ordered=kind != "cuda_host",
        thread_streams=frozenset({2}),
    )
    device.told = []

    def fence(ask: object, stream: int) -> Fence:
        device.told.append(("fence", stream))
        return Fence(device, stream)

    def copy(ask: object, destination: int, source: int, nbytes: int, stream: int) -> None:
        device.told.append(("copy", stream))
        ctypes.memmove(destination, source, nbytes)

    device.on("order", instead=lambda ask, *streams: device.told.append(("order", *streams)))
    device.on("fence", instead=fence)
    device.on("copy", instead=copy)
    return device


class Fence:
    def __init__(self, device: Misbehaving, stream: int) -> None:
        self.device, self.stream = device, stream

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self.device.told.append(("wait", self.stream))


Pretend = Callable[..., tuple[bfc.BFCAllocator, Misbehaving]]


@pytest.fixture
def pretend(make_allocator) -> Pretend:
    def make(*arguments: object, **options: object) -> tuple[bfc.BFCAllocator, Misbehaving]:
        device = pretended(*arguments, **options)
        return make_allocator(device), device

    return make


@contextmanager
def hearing(device: Misbehaving, *expected: tuple) -> Iterator[None]:
    """Just this is told to the device meanwhile."""
    device.told.clear()
    yield
    assert device.told == list(expected)


CUDA_KINDS = ["cuda", "cuda_managed", "cuda_host"]


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_the_interface_describes_the_memory(pretend, kind: str) -> None:
    allocator, device = pretend(kind)
    buffer = allocator.allocate(24)
    with hearing(device):
        found = buffer.__cuda_array_interface__
        in_view = buffer.view("i2", (3, 4), read_only=True).__cuda_array_interface__
    assert found == {
        "shape": (24,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "strides": None,
        "version": 3,
        "stream": None if kind == "cuda_host" else 1,
    }
    assert in_view == {**found, "shape": (3, 4), "typestr": "<i2", "data": (buffer.ptr, True)}
    assert type(in_view["data"][1]) is bool
    found["shape"] = None
    assert buffer.__cuda_array_interface__["shape"] == (24,)


@pytest.mark.parametrize("kind", CUDA_KINDS)
@pytest.mark.parametrize(("stream", "said"), [(1, 1), (2, 1), (7, 7), (2**64 - 2, 2**64 - 2)])
def test_the_interface_names_the_stream(pretend, kind: str, stream: int, said: int) -> None:
    allocator, _device = pretend(kind)
    buffer = allocator.allocate(24, stream)
    assert buffer.__cuda_array_interface__["stream"] == said
    assert buffer.view("f4").__cuda_array_interface__["stream"] == said


def test_the_interface_of_nothing_has_no_address_and_no_stream(pretend) -> None:
    allocator, _device = pretend()
    for which in (allocator.allocate(0, 7), allocator.allocate(8, 7).view("f4", (0, 2))):
        found = which.__cuda_array_interface__
        assert (found["data"], found["stream"], 0 in found["shape"]) == ((0, False), None, True)


@pytest.mark.parametrize("kind", ["cpu", "opencl", "simulated", "else"])
def test_other_memory_has_no_interface(pretend, kind: str) -> None:
    allocator, _device = pretend(kind)
    buffer = allocator.allocate(24)
    for which in (buffer, buffer.view("f4"), bfc.BufferView.__new__(bfc.BufferView)):
        assert not hasattr(which, "__cuda_array_interface__")
        with pytest.raises(AttributeError, match=r"no __cuda_array_interface__: memory on .*CUDA"):
            _ = which.__cuda_array_interface__


@pytest.mark.parametrize("dead", ["freed", "closed"])
def test_memory_that_is_gone_has_no_interface(pretend, dead: str) -> None:
    allocator, _device = pretend()
    buffer = allocator.allocate(24)
    views = [buffer.view("f4"), buffer.view("f4", (0,))]
    buffer.free() if dead == "freed" else allocator.close()
    for which in (buffer, *views):
        with pytest.raises(bfc.ClosedError):
            _ = which.__cuda_array_interface__


def test_the_interface_holds_nothing(pretend) -> None:
    """It is an address and no more, as the protocol has it: its reader must keep the buffer."""
    allocator, _device = pretend()
    buffer = allocator.allocate(24)
    kept, address = buffer.__cuda_array_interface__, buffer.ptr
    buffer.free()
    assert kept["data"][0] == address


def test_a_structured_dtype_is_described(pretend) -> None:
    allocator, _device = pretend()
    buffer = allocator.allocate(48)
    fields = np.dtype([("a", "<i4"), ("b", "<f8", (2,))], align=True)
    view = buffer.view(fields)
    found = view.__cuda_array_interface__
    assert (found["typestr"], np.dtype(found["descr"]).itemsize) == ("|V24", 24)
    assert found["descr"] == fields.descr
    found["descr"].clear()
    assert view.__cuda_array_interface__["descr"] == fields.descr
    overlapping = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})
    for dtype in (overlapping, "f4", "M8[s]"):
        assert "descr" not in buffer.view(dtype).__cuda_array_interface__


def test_a_dtype_that_numpy_cannot_name_is_never_taken_for_another(pretend) -> None:
    small = pytest.importorskip("ml_dtypes")
    allocator, _device = pretend()
    buffer = allocator.allocate(64)
    assert buffer.view(small.bfloat16).__cuda_array_interface__["typestr"] == "<V2"
    for dtype in (small.bfloat16, small.float8_e4m3fn, small.float8_e5m2):
        typestr = buffer.view(dtype).__cuda_array_interface__["typestr"]
        try:
            read = np.dtype(typestr)
        except TypeError:
            continue
        assert read.kind == "V"


@pytest.mark.parametrize(
    ("kind", "ordinal", "expected"),
    [
        ("cuda", 0, (2, 0)),
        ("cuda", 3, (2, 3)),
        ("cuda_host", 3, (3, 0)),
        ("cuda_managed", 3, (13, 0)),
        ("opencl", 3, (4, 3)),
        ("cpu", 0, (1, 0)),
    ],
)
def test_devices_have_dlpacks_numbers(pretend, kind: str, ordinal: int, expected: tuple) -> None:
    allocator, _device = pretend(kind, ordinal)
    view = allocator.allocate(64).view("f4")
    assert view.__dlpack_device__() == expected
    device = opened(view.__dlpack__(), None).tensor.device
    assert (device.device_type, device.device_id) == expected


class Index:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("kind", ["cuda", "cuda_managed"])
@pytest.mark.parametrize(
    ("made_on", "consumer", "told"),
    [
        (0, None, []),
        (0, 1, []),
        (0, -1, []),
        (0, 2, [("order", 0, 2)]),
        (0, 7, [("order", 0, 7)]),
        (0, Index(), [("order", 0, 7)]),
        (0, np.int64(7), [("order", 0, 7)]),
        (0, 2**64 - 2, [("order", 0, 2**64 - 2)]),
        (7, None, [("order", 7, 0)]),
        (7, 1, [("order", 7, 0)]),
        (7, 7, []),
        (7, -1, []),
        (7, 8, [("order", 7, 8)]),
    ],
)
def test_the_consumers_stream_waits_and_is_remembered(
    pretend, kind: str, made_on: int, consumer: object, told: list
) -> None:
    allocator, device = pretend(kind)
    buffer = allocator.allocate(64, made_on)
    with hearing(device, *told):
        capsule = buffer.view("f4").__dlpack__(stream=consumer)
    with hearing(device, *[("fence", stream) for _order, _first, stream in told]):
        del capsule
    with hearing(device, *[("fence", stream) for stream in {made_on} - {0}]):
        buffer.free()


@pytest.mark.parametrize(
    ("made_on", "consumer", "told"),
    [
        (None, None, []),
        (None, -1, []),
        (None, 1, []),
        (None, 7, []),
        (7, None, [("fence", 7), ("wait", 7)]),
        (7, -1, []),
        (7, 7, []),
        (7, 8, [("order", 7, 8)]),
    ],
)
def test_pinned_memory_is_the_hosts_unless_a_stream_asks(
    pretend, made_on: object, consumer: object, told: list
) -> None:
    allocator, device = pretend("cuda_host")
    buffer = allocator.allocate(64, made_on)
    with hearing(device, *told):
        capsule = buffer.__dlpack__(stream=consumer)
    left = {0 if consumer == 1 else consumer} - {None, -1, made_on}
    with hearing(device, *[("fence", stream) for stream in left]):
        del capsule
    with hearing(device, *[("fence", stream) for stream in {made_on} - {None}]):
        buffer.free()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (2**64, ValueError),
        (True, TypeError),
        (False, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (object(), TypeError),
        (np.float64(1), TypeError),
    ],
)
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_what_is_no_stream_is_refused(pretend, kind: str, stream: object, error: type) -> None:
    allocator, device = pretend(kind)
    buffer = allocator.allocate(64)
    with hearing(device), pytest.raises(error, match="stream"):
        buffer.__dlpack__(stream=stream)
    assert unheld(buffer)


def test_a_stream_that_the_device_does_not_know_holds_nothing(pretend) -> None:
    allocator, device = pretend()
    buffer = allocator.allocate(64)
    device.on("order", raises=bfc.SubAllocatorError("no such stream"))
    with pytest.raises(bfc.SubAllocatorError, match="no such stream"):
        buffer.__dlpack__(stream=7)
    assert unheld(buffer)


SHARED_MEMORY, HOST_COPY, REFUSED = "shared", "host copy", "refused"
WHERE = [
    ("cuda", False, (2, 3), SHARED_MEMORY),
    ("cuda", False, (2, 0), REFUSED),
    ("cuda", False, (1, 0), HOST_COPY),
    ("cuda", False, (1, 1), REFUSED),
    ("cuda", False, (3, 0), REFUSED),
    ("cuda", False, (13, 0), REFUSED),
    ("cuda", False, (13, 3), REFUSED),
    ("cuda_managed", False, (13, 0), SHARED_MEMORY),
    ("cuda_managed", False, (2, 3), SHARED_MEMORY),
    ("cuda_managed", False, (2, 0), REFUSED),
    ("cuda_managed", False, (1, 0), HOST_COPY),
    ("cuda_managed", True, (1, 0), SHARED_MEMORY),
    ("cuda_managed", True, (3, 0), REFUSED),
    ("cuda_host", True, (3, 0), SHARED_MEMORY),
    ("cuda_host", True, (1, 0), SHARED_MEMORY),
    ("cuda_host", True, (2, 3), REFUSED),
]


@pytest.mark.parametrize("copy", [None, False, True])
@pytest.mark.parametrize(("kind", "on_host", "asked", "outcome"), WHERE)
def test_a_device_is_honoured_or_refused(
    pretend, kind: str, on_host: bool, asked: tuple, outcome: str, copy: object
) -> None:
    allocator, _device = pretend(kind, 3, on_host=on_host)
    view = allocator.allocate(64).from_host(bytes(range(64))).view("i2", (4, 8))
    if outcome == REFUSED or (outcome == HOST_COPY and copy is False):
        with pytest.raises(BufferError, match=r"go(es)? to"):
            view.__dlpack__(max_version=(1, 0), dl_device=asked, copy=copy)
        assert unheld(view.base)
        return
    capsule = view.__dlpack__(max_version=(1, 0), dl_device=np.array(asked), copy=copy)
    managed = opened(capsule, (1, 0))
    tensor = managed.tensor
    assert (tensor.device.device_type, tensor.device.device_id) == asked
    assert (tensor.shape[:2], tensor.strides[:2]) == ([4, 8], [8, 1])
    assert ctypes.string_at(tensor.data, 64) == bytes(range(64))
    is_copy = outcome == HOST_COPY or bool(copy)
    assert managed.flags == (IS_COPIED if is_copy else 0)
    assert (tensor.data != view.ptr) == is_copy
    assert allocator.stats().bytes_in_use == (512 if outcome == SHARED_MEMORY and copy else 256)
    if is_copy:
        assert unheld(view.base)
    del capsule
    del view
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("kind", ["cuda_managed", "cuda_host"])
def test_the_host_gets_memory_that_its_stream_has_finished_with(pretend, kind: str) -> None:
    allocator, device = pretend(kind, on_host=True)
    buffer = allocator.allocate(64, 7)
    for stream in (None, 1, 8):
        with hearing(device, ("fence", 7), ("wait", 7)):
            buffer.__dlpack__(dl_device=(1, 0), stream=stream)
    with hearing(device):
        buffer.__dlpack__(dl_device=(1, 0), stream=-1)


def test_where_there_are_no_streams_the_queue_is_waited_for(pretend) -> None:
    allocator, device = pretend("opencl")
    buffer = allocator.allocate(64, 7)
    with hearing(device, ("fence", 7), ("wait", 7)):
        buffer.__dlpack__()
    with pytest.raises(BufferError, match="stream=None"):
        buffer.__dlpack__(stream=7)


def test_copies_run_behind_the_buffers_stream(pretend) -> None:
    allocator, device = pretend()
    buffer = allocator.allocate(64, 7)
    with hearing(device, ("copy", 7)):
        buffer.from_host(bytes(64))
    with hearing(device, ("copy", 7)):
        buffer.view("f4").to_host()
    with hearing(device, ("copy", 7)):
        buffer.__dlpack__(dl_device=(1, 0), stream=8)
    with hearing(device, ("copy", 7), ("order", 7, 8)):
        copied = buffer.__dlpack__(copy=True, stream=8)
    with hearing(device, ("fence", 8), ("fence", 7)):
        del copied
        allocator.release_free_regions()


def test_nothing_waits_for_nothing(pretend) -> None:
    allocator, device = pretend(on_host=True)
    freed = allocator.allocate(64)
    freed.free()
    for which in (allocator.allocate(0), allocator.allocate(64).view("f4", (0, 2))):
        with hearing(device):
            which.from_host(which.to_host())
            for options in ({"stream": 7}, {"copy": True, "stream": 7}, {"dl_device": (1, 0)}):
                assert opened(which.__dlpack__(**options), None).tensor.data is None
    allocator.check()


def test_nothing_is_freed_under_a_consumer_on_a_device(pretend) -> None:
    allocator, _device = pretend()
    buffer = allocator.allocate(64)
    capsules = [
        which.__dlpack__(max_version=version, stream=7)
        for which in (buffer, buffer.view("f4"))
        for version in KINDS
    ]
    for end in (buffer.free, allocator.close, lambda: allocator.deallocate_raw(buffer.ptr)):
        with pytest.raises(BufferError, match=r"in use|view"):
            end()
    capsules.pop()
    with pytest.raises(BufferError, match="3 view"):
        buffer.free()
    capsules.clear()
    assert unheld(buffer)


def test_memory_of_a_device_is_not_read_in_place(pretend) -> None:
    for kind in ("cuda", "cuda_managed"):
        buffer = pretend(kind)[0].allocate(64)
        for which in (buffer, buffer.view("f4")):
            for take in (memoryview, np.asarray, np.frombuffer, bytes):
                with pytest.raises(BufferError, match=f"{kind}:0, where the host cannot"):
                    take(which)
    for on_host in ("cuda_managed", "cuda_host"):
        buffer = pretend(on_host, on_host=True)[0].allocate(64)
        np.asarray(buffer.view("f4"))[:] = 3
        assert set(buffer.view("f4").to_host()) == {3}


# -- contents --------------------------------------------------------------------------------------


def test_writing_a_buffer_touches_no_neighbour(host) -> None:
    buffers = [host.allocate(256) for _ in range(9)]
    for number, buffer in enumerate(buffers):
        memoryview(buffer)[:] = bytes([number]) * 256
    np.asarray(buffers[4])[:] = 255
    for number, buffer in enumerate(buffers):
        assert set(bytes(buffer)) == {255 if number == 4 else number}


def test_random_data_survives_many_allocations_and_frees(host, dice) -> None:
    live: list[tuple[bfc.Buffer, bytes]] = []
    for _ in range(1500):
        if len(live) > 60 or (live and dice.random() < 0.5):
            buffer, digest = live.pop(dice.randrange(len(live)))
            assert hashlib.sha256(buffer).digest() == digest
            if dice.random() < 0.5:
                buffer.free()
        else:
            buffer = host.allocate(dice.choice([1, 100, 256, 1000, 5000, 60000]))
            data = dice.randbytes(buffer.nbytes)
            memoryview(buffer)[:] = data
            live.append((buffer, hashlib.sha256(data).digest()))
    host.check()
    for buffer, digest in live:
        assert hashlib.sha256(buffer).digest() == digest


def test_live_buffers_never_overlap(host, dice) -> None:
    live = [host.allocate(dice.randrange(1, 5000)) for _ in range(300)]
    del live[::3]
    live += [host.allocate(dice.randrange(1, 5000)) for _ in range(100)]
    spans = sorted((buffer.ptr, buffer.ptr + buffer.nbytes) for buffer in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % 256 == 0 for start, _ in spans)


@pytest.mark.parametrize("many", [1000])
def test_buffers_are_recycled_without_losing_one(make_allocator, many: int) -> None:
    allocator = make_allocator("1 GiB")
    for _ in range(3):
        buffers = [allocator.allocate(256) for _ in range(many)]
        assert len({buffer.ptr for buffer in buffers}) == many
        assert allocator.stats().bytes_in_use == 256 * many
        buffers.clear()
        assert allocator.stats().bytes_in_use == 0


def test_a_buffer_kept_by_nothing_but_numpy_is_freed_with_it(host) -> None:
    arrays: list[np.ndarray] = [np.asarray(host.allocate(4096).view("f4"))[::2] for _ in range(10)]
    assert host.stats().bytes_in_use == 40960
    arrays.clear()
    gc.collect()
    assert host.stats().bytes_in_use == 0


BAD_USES: list[Callable[[bfc.Buffer], object]] = [
    lambda buffer: buffer[0],
    lambda buffer: setattr(buffer, "nbytes", 5),
    lambda buffer: setattr(buffer, "ptr", 5),
    lambda buffer: buffer.view(),
    lambda buffer: buffer.view("no such dtype"),
]


@pytest.mark.parametrize("use", BAD_USES)
def test_a_buffer_does_nothing_that_it_does_not_say(host, use: Callable) -> None:
    buffer = counting(host)
    with pytest.raises((TypeError, AttributeError)):
        use(buffer)
    assert bytes(buffer) == bytes(range(64))
