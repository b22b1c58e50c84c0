"""Buffers: their life, and the protocols by which other libraries take their memory."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest

import bfc

MIB = 1 << 20
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
    buffer.free()
    other = allocator.allocate(1000)
    assert other.ptr == buffer.ptr
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


@pytest.mark.parametrize("dead", ["freed", "freed by address", "closed"])
def test_memory_that_is_gone_is_not_exported(host, dead: str) -> None:
    buffer = counting(host)
    if dead == "freed":
        buffer.free()
    elif dead == "closed":
        host.close()
    else:
        host.deallocate_raw(buffer.ptr)
        host.allocate_raw(64)
    for take in (memoryview, np.from_dlpack, bytes, lambda b: memoryview(b.view("f4"))):
        with pytest.raises(bfc.ClosedError):
            take(buffer)


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


PyBUF_F_CONTIGUOUS, PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE = 0x58, 0x98, 0


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


class Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Old(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


KINDS = {None: (b"dltensor", Old), (1, 0): (b"dltensor_versioned", Versioned)}
EITHER_KIND = pytest.mark.parametrize("version", list(KINDS))


def opened(capsule: object, version: object) -> ctypes.Structure:
    name, kind = KINDS[version]
    assert PYTHON.PyCapsule_IsValid(capsule, name)
    return kind.from_address(PYTHON.PyCapsule_GetPointer(capsule, name))


def consume(capsule: object, version: object) -> ctypes.Structure:
    """Takes the capsule over, as a library does: from now on the deleter is ours to call."""
    managed = opened(capsule, version)
    PYTHON.PyCapsule_SetName(capsule, b"used_" + KINDS[version][0])
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
    [
        {"stream": 1},
        {"stream": 0},
        {"stream": -1},
        {"dl_device": (2, 0)},
        {"dl_device": (1, 1)},
        {"copy": True},
    ],
)
def test_what_dlpack_cannot_do_is_a_buffer_error(host, options: dict) -> None:
    buffer = counting(host)
    with pytest.raises(BufferError):
        buffer.__dlpack__(**options)
    buffer.free()


@pytest.mark.parametrize(
    "options", [{"dl_device": (1, 0)}, {"copy": False}, {"stream": None}, {"copy": None}]
)
def test_what_dlpack_can_do(host, options: dict) -> None:
    capsule = counting(host).__dlpack__(max_version=(1, 0), **options)
    assert opened(capsule, (1, 0)).tensor.ndim == 1


def test_odd_arguments_to_dlpack_leave_nothing_held(host) -> None:
    buffer = counting(host)
    for options in ({"max_version": "x"}, {"dl_device": 5}, {"max_version": 1}):
        with pytest.raises((TypeError, IndexError, ValueError, BufferError)):
            buffer.__dlpack__(**options)
    with pytest.raises(TypeError):
        buffer.__dlpack__(None)
    buffer.free()


def test_numpy_copies_on_request_only(host) -> None:
    buffer = counting(host)
    shared = np.from_dlpack(buffer, copy=False)
    assert shared.ctypes.data == buffer.ptr
    assert buffer.__dlpack_device__() == (1, 0)


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
