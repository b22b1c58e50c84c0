"""Copies through OpenCL's memory, on PoCL: the kernels are the ones that CUDA gets."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
import weakref
from string import Template

import numpy as np
import pytest
from copy_cases import CHANGES, DTYPES, PAIRS, Case, Side, case, seeds, switched
from dlpack_structures import DELETER, Versioned
from dlpack_structures import Tensor as DLTensor

import bfc
from bfc.copying import kernels, layout
from bfc.copying.layout import walk
from bfc.copying.readers import view_of
from bfc.integrations import pyopencl as in_arrays

cl = pytest.importorskip("pyopencl")
pytest.importorskip("pyopencl.array")
from bfc.copying import opencl_stream  # noqa: E402 - it imports pyopencl

pytestmark = pytest.mark.filterwarnings(
    "ignore:the imaginary part", "ignore:overflow encountered", "ignore:invalid value"
)


class OnDevice:
    """A side's block in a buffer, and the array of pyopencl's that shows its items."""

    def __init__(self, queue, side: Side) -> None:
        self.queue, self.side = queue, side
        self.memory = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, side.block.nbytes)
        cl.enqueue_copy(queue, self.memory, side.block)
        self.array = cl.array.Array(
            queue, side.shape, side.dtype, strides=side.strides, data=self.memory,
            offset=side.offset,
        )  # fmt: skip

    def block(self) -> np.ndarray:
        found = np.empty_like(self.side.block)
        cl.enqueue_copy(self.queue, found, self.memory)
        return found


def run(queue, made: Case, to_device: bool, from_device: bool, **options) -> np.ndarray:
    """The destination's block after a copy between those kinds of memory."""
    to, source = made.to.twin(), made.source.twin()
    target = OnDevice(queue, to) if to_device else to
    given = OnDevice(queue, source) if from_device else source
    bfc.copy(target.array, given.array, conj=made.conj, neg=made.neg, **options)
    if not to_device:
        queue.finish()
        return to.block
    return target.block()


PLACES = [(True, True), (True, False), (False, True)]


@seeds(60)
def test_random_copies_of_bytes(opencl, seed: int):
    """One dtype on both sides, any of those that NumPy has, wherever items lie."""
    rng = random.Random(seed)
    dtype = np.dtype(rng.choice([*DTYPES, "g", "M8[s]", "S3", "i4,f8", "V5", ">f4", "U2"]))
    made = case(f"bytes {seed}", dtype, dtype, (False, False), aligned=seed % 3 > 0)
    for places, non_blocking in itertools.product(PLACES, (False, True)):
        made.check(run(opencl, made, *places, non_blocking=non_blocking), (places, non_blocking))


@seeds(25)
def test_random_copies_with_casts(opencl, seed: int):
    made = case(f"casts {seed}", aligned=seed % 4 > 0)
    for places, non_blocking in itertools.product(PLACES, (False, True)):
        made.check(run(opencl, made, *places, non_blocking=non_blocking), (places, non_blocking))


@pytest.fixture(scope="module")
def every_conversion(opencl):
    text = kernels.HEADER + "".join(map(switched, kernels.CODES))
    return cl.Program(opencl.context, text).build("-DONE_AFTER_THE_OTHER")


def test_every_pair_of_dtypes_and_every_change(opencl, every_conversion):
    on_stream = opencl_stream.OpenCLCopyStream(
        opencl_stream.context_of(opencl.context, opencl.device), opencl
    )
    for source, to in PAIRS:
        number = kernels.CODES.index(kernels.code_of(source))
        kernel = cl.Kernel(every_conversion, f"to_{kernels.code_of(to)}")
        for change in CHANGES:
            made = case(f"pair {source} {to} {change}", source, to, change)
            target, given = OnDevice(opencl, made.to.twin()), OnDevice(opencl, made.source)
            view = view_of(target.array)
            other = view_of(given.array).expanded(view.shape)
            way = walk(view.shape, view.strides, other.strides)
            asked = kernels.CONJUGATE * change[0] | kernels.NEGATE * made.neg | number << 8
            on_stream._launch_piece(kernel, view, other, way, asked)
            made.check(target.block())


def test_every_half_becomes_the_same_number_and_comes_back(opencl):
    halves = np.arange(1 << 16, dtype=np.uint16).view("f2")
    there = bfc.copy(cl.array.empty(opencl, 1 << 16, "f4"), bfc.copy(empty(opencl, halves), halves))
    assert np.array_equal(there.get(), halves.astype("f4"), equal_nan=True)
    back = bfc.copy(empty(opencl, halves), there)
    assert np.array_equal(back.get(), halves, equal_nan=True)


def test_numbers_between_two_halves_go_to_the_nearest(opencl):
    """Each half, and what lies just below, on and above the middle to the next."""
    halves = np.arange(0x7C00, dtype=np.uint16).view("f2").astype("f8")
    with np.errstate(over="ignore"):
        middle = (halves[:-1] + halves[1:]) / 2
    near = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9)])
    near = np.concatenate([near, -near, [65519.99, 65520, 1e300, 2.0**-25, 2.0**-26]])
    for dtype in ("f8", "f4"):
        given = near.astype(dtype) if dtype == "f8" else near.clip(-1e30, 1e30).astype(dtype)
        there = bfc.copy(empty(opencl, given), given)
        with np.errstate(over="ignore"):
            wanted = given.astype("f2")
        found = bfc.copy(cl.array.empty(opencl, len(given), "f2"), there).get()
        assert np.array_equal(found.view("u2"), wanted.view("u2")), dtype


def empty(queue, like: np.ndarray):
    return cl.array.empty(queue, like.shape, like.dtype)


def on_device(queue, array: np.ndarray):
    return cl.array.to_device(queue, array)


def test_a_kernel_gets_items_at_multiples_of_their_size(opencl, monkeypatch):
    """A processor takes others too, a GPU does not. Dtypes of three sizes, since each pair is
    compiled."""
    pairs = list(itertools.product(map(np.dtype, ("f2", "i4", "c16")), repeat=2))
    launched = []

    def noted(on_stream, kernel, to, source, piece, change):
        for view, steps, offset in (
            (to, [dim.to for dim in piece.dims], piece.to),
            (source, [dim.source for dim in piece.dims], piece.source),
        ):
            size = kernels.component_size(kernels.code_of(view.dtype))
            if to.dtype == source.dtype and not change:
                size = int(kernel.function_name[-1])
            launched.append(all(at % size == 0 for at in (view.address + offset, *steps)))
        launch(on_stream, kernel, to, source, piece, change)

    launch = opencl_stream.OpenCLCopyStream._launch_piece
    monkeypatch.setattr(opencl_stream.OpenCLCopyStream, "_launch_piece", noted)
    for seed in range(40):
        made = case(f"aligned {seed}", *pairs[seed % len(pairs)], aligned=False)
        made.check(run(opencl, made, True, True), seed)
    assert len(launched) > 80
    assert all(launched)


def test_more_items_and_dimensions_than_a_launch_takes(opencl, monkeypatch):
    """Launches of at most 50 items: the same loop that serves more than 2**31."""
    monkeypatch.setattr(layout.pieces, "__defaults__", (3, 50))
    source = np.arange(2 * 3 * 4 * 2 * 3 * 2).reshape(2, 3, 4, 2, 3, 2).astype("i4")
    to = np.zeros((2, 3, 2, 2, 4, 3), "f8")
    given = source.transpose(0, 1, 5, 3, 2, 4)
    there = bfc.copy(empty(opencl, source), source).transpose((0, 1, 5, 3, 2, 4))
    out = bfc.copy(on_device(opencl, to), there, neg=True)
    assert np.array_equal(out.get(), -given)


def test_eight_dimensions(opencl):
    source = np.arange(3**8, dtype="i2").reshape((3,) * 8)
    order = (7, 2, 5, 0, 3, 6, 1, 4)
    out = bfc.copy(empty(opencl, source), on_device(opencl, source).transpose(order))
    assert np.array_equal(out.get(), source.transpose(order))


@pytest.mark.parametrize("svm", [False, True])
def test_views_that_overlap_are_copied_as_if_they_did_not(opencl, svm):
    base = np.arange(64, dtype="i4")
    with bfc.BFCAllocator(
        bfc.OpenCLSubAllocator(opencl.context, svm=svm, capacity="4 MiB"), stream=opencl
    ) as pool:
        make = bfc.integrations.pyopencl.allocator(pool)
        for to, source in (
            (slice(8, 40), slice(0, 32)),
            (slice(0, 32), slice(8, 40)),
            (slice(0, 32), slice(31, None, -1)),
            (slice(0, 64, 2), slice(16, 48)),
        ):
            there = cl.array.to_device(opencl, base, allocator=make)
            wanted = base.copy()
            wanted[to] = base[source][: len(wanted[to])]
            bfc.copy(there[to], there[source][: len(wanted[to])])
            assert np.array_equal(there.get(), wanted), (to, source)
    there = on_device(opencl, np.array([1 + 2j, 3j], "c8"))
    assert bfc.copy(there, there, conj=True).get().tolist() == [1 - 2j, -3j]


def test_rows_within_one_buffer(opencl):
    """They lie apart, in rows of other lengths or between each other: OpenCL copies neither."""
    there = on_device(opencl, np.arange(200, dtype="i4"))
    wanted = there.get()
    for to, source, columns in (
        (slice(100, 148), slice(0, 96), slice(0, 5)),
        (slice(1, 97), slice(0, 96), slice(0, None, 2)),
        (slice(0, 96), slice(100, 148), slice(0, 5)),
    ):
        ends, rows = (
            [array[part].reshape(8, -1)[:, columns] for part in (to, source)]
            for array in (there, wanted)
        )
        bfc.copy(*ends)
        rows[0][...] = rows[1]
        assert np.array_equal(there.get(), wanted), (to, source)


@pytest.mark.parametrize("parts", [(True, False), (False, True), (True, True)])
def test_rows_of_sub_buffers(opencl, parts):
    """Arrays in a pool lie in sub-buffers. PoCL 3 crashes where it is given one for its rows."""
    ends = []
    for is_part in parts:
        memory = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, 4096)
        cl.enqueue_fill_buffer(opencl, memory, np.uint8(0), 0, 4096)
        ends.append(memory.get_sub_region(1024, 2048) if is_part else memory)
    to = cl.array.Array(opencl, (3, 8, 8), "i4", strides=(512, 64, 4), data=ends[0], offset=256)
    source = cl.array.Array(opencl, (3, 8, 8), "i4", strides=(384, 32, 4), data=ends[1])
    values = np.arange(192, dtype="i4").reshape(3, 8, 8)
    bfc.copy(source, values)
    bfc.copy(to, source)
    assert np.array_equal(bfc.copy(np.zeros_like(values), to), values)
    bfc.copy(to, source[::-1, ::-1], neg=True)
    assert np.array_equal(bfc.copy(np.zeros_like(values), to), -values[::-1, ::-1])


def test_parts_of_one_buffer_that_overlap(opencl):
    at = opencl.device.mem_base_addr_align // 8
    base = np.arange(8 * at).astype("u1")
    whole = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, base.nbytes)
    parts = {start: whole.get_sub_region(start * at, 4 * at) for start in range(5)} | {None: whole}
    for (to, there), (source, given) in itertools.permutations(parts.items(), 2):
        if (to is None) != (source is None):
            there, given = (  # the whole buffer's own first bytes
                cl.array.Array(opencl, (4 * at,), "u1", data=memory) for memory in (there, given)
            )
        bfc.copy(whole, base)
        wanted = base.copy()
        start, first = (to or 0) * at, (source or 0) * at
        wanted[start : start + 4 * at] = base[first : first + 4 * at]
        bfc.copy(there, given)
        opencl.finish()
        assert np.array_equal(bfc.copy(np.zeros_like(base), whole), wanted), (to, source)


def test_a_block_of_pyopencls_pool_takes_part_and_an_image_does_not(opencl):
    block = cl.tools.MemoryPool(cl.tools.ImmediateAllocator(opencl)).allocate(64)
    source = np.arange(block.size, dtype="u1")
    bfc.copy(block, source, stream=opencl)
    assert np.array_equal(bfc.copy(np.zeros_like(source), block), source)
    if opencl.device.image_support:
        image = cl.image_from_array(opencl.context, np.zeros((4, 4, 4), "u1"), 4)
        with pytest.raises(TypeError, match="image"):
            bfc.copy(np.zeros(64, "u1"), image)


def unbind(memory) -> None:
    """So that it is freed at once: PoCL 3 crashes now and then where a free is queued."""
    memory._queue.finish()
    memory.unbind_from_queue()


def test_released_shared_virtual_memory(opencl):
    memory = cl.SVMAllocation(opencl.context, 64, 64, cl.svm_mem_flags.READ_WRITE, queue=opencl)
    memory.release()
    opencl.finish()
    for ends in ((memory, np.zeros(64, "u1")), (np.zeros(64, "u1"), memory)):
        with pytest.raises(bfc.ClosedError, match="released"):
            bfc.copy(*ends, stream=opencl)


def test_shared_virtual_memory_takes_part(opencl):
    if not opencl.device.svm_capabilities:
        pytest.skip("no shared virtual memory")
    memory = cl.SVMAllocation(
        opencl.context, 256, 64, cl.svm_mem_flags.READ_WRITE, queue=opencl
    )  # fmt: skip
    bfc.copy(memory, np.arange(256, dtype="u1"), stream=opencl)
    out = bfc.copy(np.zeros(256, "u1"), memory, stream=opencl)
    assert np.array_equal(out, np.arange(256))
    shown = cl.array.Array(opencl, (16,), np.int32, strides=(8,), data=memory, offset=64)
    doubles = bfc.copy(cl.array.empty(opencl, 16, "f8"), shown)
    wanted = np.arange(256, dtype="u1")[64:192].view("i4")[::2]
    assert np.array_equal(doubles.get(), wanted)
    bfc.copy(shown, doubles, neg=True)
    assert np.array_equal(bfc.copy(np.zeros(16, "i4"), shown), -wanted)
    assert np.array_equal(bfc.copy(empty(opencl, wanted[:4]), shown[:4]).get(), -wanted[:4])
    there = cl.array.zeros(opencl, 251, "u1")
    for at in (0, 3):  # runs of bytes, whose ends lie at multiples of 8 or do not
        for count in (240, 13):
            part = cl.array.Array(opencl, (count,), np.uint8, data=memory, offset=at)
            source = np.arange(at, at + count, dtype="u1")
            bfc.copy(part[::-1], source)
            bfc.copy(there[at : at + count][::-1], part[::-1])
            assert np.array_equal(there.get()[at : at + count], source[::-1])
            bfc.copy(part, there[at : at + count][::-1])
            assert np.array_equal(bfc.copy(np.zeros_like(source), part), source)
    unbind(memory)


def test_another_context_is_reached_by_way_of_the_host(opencl):
    other = cl.CommandQueue(cl.Context(opencl.context.devices))
    source = on_device(opencl, np.arange(6, dtype="i4"))
    to = cl.array.zeros(other, (2, 6), "f4")
    assert bfc.copy(to, source, neg=True).get().tolist() == [[0, -1, -2, -3, -4, -5]] * 2
    turned = bfc.copy(
        cl.array.zeros(other, 2, "c16"), on_device(opencl, np.array([1j, 2], "c8")), conj=True
    )
    assert turned.get().tolist() == [-1j, 2]
    with pytest.raises(ValueError, match="another OpenCL context"):
        bfc.copy(to, np.zeros(6, "f4"), stream=opencl)


def test_between_contexts_a_queue_is_that_of_the_side_in_its_context(opencl, monkeypatch):
    other = cl.CommandQueue(cl.Context(opencl.context.devices))
    source, to = on_device(opencl, np.arange(6.0)), cl.array.zeros(other, 6, "f8")
    used = []
    monkeypatch.setattr(
        opencl_stream.OpenCLCopyStream,
        "synchronize",
        lambda on_stream: used.append(on_stream.queue.finish() or on_stream.queue),
    )
    named = [cl.CommandQueue(queue.context) for queue in (opencl, other)]
    for number, queue in enumerate(named):
        assert bfc.copy(to, source, stream=queue).get().tolist() == list(range(6))
        assert used[number] == queue
        assert used[1 - number] == (other, opencl)[number]
        used.clear()


def test_queues_wait_for_each_other(opencl):
    """The destination's queue is held back by an event of the host's: the copy comes after what
    waits there, and what is queued there later comes after the copy."""
    other = cl.CommandQueue(opencl.context)
    gate = cl.UserEvent(opencl.context)
    source, to = on_device(opencl, np.full(8, 2.0)), cl.array.zeros(other, 8, "f8")
    other.finish()
    cl.enqueue_barrier(other, wait_for=[gate])
    cl.enqueue_fill_buffer(other, to.base_data, np.float64(1), 0, 64)
    bfc.copy(to, source)
    after = np.zeros(8)
    last = cl.enqueue_copy(other, after, to.base_data, is_blocking=False)
    other.flush()
    opencl.flush()
    assert to.events[-1].command_execution_status != cl.command_execution_status.COMPLETE
    gate.set_status(cl.command_execution_status.COMPLETE)
    last.wait()
    assert after.tolist() == [2.0] * 8


def test_events_of_an_array_come_first(opencl):
    gate = cl.UserEvent(opencl.context)
    out_of_order = cl.CommandQueue(
        opencl.context, properties=cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    )
    source = cl.array.zeros(out_of_order, 8, "i4")
    out_of_order.finish()
    filled = cl.enqueue_fill_buffer(
        out_of_order, source.base_data, np.int32(5), 0, 32, wait_for=[gate]
    )
    source.add_event(filled)
    out = np.zeros(8, "i2")
    to = cl.array.zeros(out_of_order, 8, "i2")
    out_of_order.flush()
    bfc.copy(to, source)
    gate.set_status(cl.command_execution_status.COMPLETE)
    bfc.copy(out, to)
    assert out.tolist() == [5] * 8


def sub_allocator(queue):
    return bfc.OpenCLSubAllocator(queue.context)


def test_buffers_of_an_allocator_take_part(opencl):
    with bfc.BFCAllocator(sub_allocator(opencl), memory_limit=1 << 22) as allocator:
        allocator.allocate(1000).free()
        keep = allocator.allocate(4096)
        view = allocator.allocate(96).view("f4", (4, 6))
        source = np.arange(24, dtype="i8").reshape(4, 6)
        bfc.copy(view, source)
        assert np.array_equal(bfc.copy(np.zeros((4, 6), "i2"), view), source)
        bfc.copy(keep.view("i4", (4, 6)), view, neg=True)
        assert np.array_equal(bfc.copy(np.zeros((4, 6)), keep.view("i4", (4, 6))), -source)
        part = keep.view("u1", (24,), read_only=True)
        with pytest.raises(ValueError, match="read-only"):
            bfc.copy(part, np.zeros(24))
        keep.free()
        with pytest.raises(bfc.ClosedError):
            bfc.copy(np.zeros(24), part)
        with pytest.raises(bfc.ClosedError):
            bfc.copy(keep, np.zeros(4096))


def test_a_buffer_without_a_queue_is_copied_when_the_call_returns(opencl):
    memory = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, 64)
    other = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, 64)
    bfc.copy(memory, np.arange(64, dtype="u1"), non_blocking=True)
    bfc.copy(other, memory)
    found = np.zeros(64, "u1")
    cl.enqueue_copy(opencl, found, other)
    assert found.tolist() == list(range(64))


def test_what_dlpack_calls_opencl_takes_part(opencl):
    """A capsule with a cl_mem and a byte offset, as no package but ours exports one."""
    memory = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, 64)
    cl.enqueue_copy(opencl, memory, np.arange(16, dtype="i4"))
    tensor = Tensor(memory, np.dtype("i4"), (2, 3), (4, 2), 8)
    out = bfc.copy(np.zeros((2, 3)), tensor)
    assert out.tolist() == [[2, 4, 6], [6, 8, 10]]


class Tensor:
    """DLPack of a cl_mem; strides count items."""

    def __init__(self, memory, dtype, shape, strides, offset) -> None:
        ndim = len(shape)
        self.memory, self.dims = memory, (ctypes.c_int64 * (2 * ndim))(*shape, *strides)
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.managed = Versioned(
            1, 0, None, DELETER(), 0,
            DLTensor(
                memory.int_ptr, (4, 0), ndim, 0, dtype.itemsize * 8, 1,
                ctypes.cast(self.dims, pointer),
                ctypes.cast(ctypes.addressof(self.dims) + 8 * ndim, pointer), offset,
            ),
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 4, 0

    def __dlpack__(self, *, max_version: tuple[int, int]) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), NAME, None)


NAME = b"dltensor_versioned"  # a capsule keeps its name's address


def test_a_device_without_room_for_the_temporary(opencl, monkeypatch):
    to = cl.array.zeros(opencl, (4, 4), "f4")
    source = np.ones((4, 4), "f8")
    make = cl.Buffer

    def refuse(context, flags, size, **options):
        return make(context, flags, 1 << 50)  # the driver's own error

    monkeypatch.setattr(cl, "Buffer", refuse)
    with pytest.raises(bfc.OutOfMemoryError, match="for a temporary") as caught:
        bfc.copy(to[:, ::2], source[:, ::2], non_blocking=True)
    assert caught.value.requested == 4 * 2 * 8
    monkeypatch.undo()
    assert not to.get().any(), "an error, and still written"


#: Copies that take every way there is: (destination's step, source's step, options), where an
#: array of the host has None.
WAYS = [
    ("f4", 1, "f4", None, {}),
    ("f4", None, "f4", 1, {"non_blocking": True}),
    ("f4", 1, "f8", None, {"non_blocking": True}),
    ("f8", None, "f4", 2, {}),
    ("f4", 2, "f4", None, {"neg": True}),
    ("f4", 1, "f4", 1, {}),
    ("f4", 1, "f4", 2, {}),
    ("f4", 2, "i4", 1, {"neg": True}),
    ("g", 1, "f4", 1, {}),
]


CALLS = [
    (cl, "enqueue_copy"), (cl, "enqueue_nd_range_kernel"), (cl, "enqueue_migrate_mem_objects"),
    (cl, "enqueue_marker"), (cl, "Buffer"), (cl, "Kernel"), (cl.CommandQueue, "finish"),
    (cl.CommandQueue, "flush"),
]  # fmt: skip


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_call_that_fails_is_told_as_our_error(opencl, monkeypatch, way: int):
    """Each call of pyopencl's in turn; the same copy works then."""
    *dtypes_and_steps, options = WAYS[way]
    ends = []
    for dtype, step in (dtypes_and_steps[:2], dtypes_and_steps[2:]):
        array = np.arange(48).astype(dtype)
        ends.append(array if step is None else on_device(opencl, array)[::step])
        ends[-1] = ends[-1][:16]
    bfc.copy(*ends, **options)
    for of, name in CALLS:
        faults = Faults(opencl.context, getattr(of, name))
        monkeypatch.setattr(
            of, name, lambda *given, faults=faults, **named: faults(*given, **named)
        )
        bfc.copy(*ends, **options)
        for at in range(1, faults.calls + 1):
            faults.calls, faults.at = 0, at
            with pytest.raises((bfc.DriverError, bfc.OutOfMemoryError)) as caught:
                bfc.copy(*ends, **options)
            assert getattr(caught.value, "name", "CL_").startswith("CL_")
        monkeypatch.setattr(of, name, faults.real)
        bfc.copy(*ends, **options)


class Faults:
    """A call of pyopencl's, of which the at-th fails."""

    def __init__(self, context, real) -> None:
        self.context, self.real, self.make = context, real, cl.Buffer
        self.calls, self.at = 0, None

    def __call__(self, *given, **named):
        self.calls += 1
        if self.calls == self.at:
            self.make(self.context, cl.mem_flags.READ_WRITE, 1 << 50)  # the driver's own error
        return self.real(*given, **named)


def test_bad_input(opencl):
    there = cl.array.zeros(opencl, 4, "f4")
    still = cl.array.Array(opencl, (3,), np.float32, strides=(0,), data=there.base_data)
    constant = cl.Buffer(opencl.context, cl.mem_flags.READ_ONLY, 16)
    for to, source, error, words in (
        (there, np.zeros(3), ValueError, "broadcast"),
        (still, np.zeros(3), ValueError, "share one place"),
        (there, np.array([None] * 4), TypeError, "Python objects"),
        (constant, np.zeros(16, "u1"), ValueError, "read-only"),
        (there, np.zeros(4, "S4"), ValueError, "could not convert"),
    ):
        with pytest.raises(error, match=words):
            bfc.copy(to, source)
    with pytest.raises(TypeError, match="stream"):
        bfc.copy(there, np.zeros(4), stream="fast")
    assert not there.get().any()


def test_94_the_same_view_is_not_touched_and_95_nothing_is_done_for_no_items(opencl, monkeypatch):
    there = cl.array.arange(opencl, 8, dtype=np.int32)
    nothing = cl.array.empty(opencl, (0, 3), np.float32)
    monkeypatch.setattr(opencl_stream, "stream_for", None)  # whoever asks for one fails
    bfc.copy(there, there)
    bfc.copy(there[2:4], there[2:4])
    bfc.copy(nothing, np.zeros((1, 3)))
    monkeypatch.undo()
    assert there.get().tolist() == list(range(8))


def test_98_a_copy_on_one_device_does_not_wait_for_it(opencl):
    gate = cl.UserEvent(opencl.context)
    source, to = cl.array.zeros(opencl, 8, "f4"), cl.array.zeros(opencl, 8, "i4")
    opencl.finish()
    cl.enqueue_barrier(opencl, wait_for=[gate])
    bfc.copy(to, source)
    assert to.events[-1].command_execution_status != cl.command_execution_status.COMPLETE
    gate.set_status(cl.command_execution_status.COMPLETE)
    opencl.finish()


def test_a_compiler_that_fails_is_named(opencl, monkeypatch):
    monkeypatch.setattr(kernels, "BODY", Template("$name $convert nonsense"))
    to = cl.array.zeros(cl.CommandQueue(cl.Context(opencl.context.devices)), 4, "i4")
    with pytest.raises(bfc.DeviceUnavailableError, match="does not take our kernels"):
        bfc.copy(to, np.ones(4), non_blocking=True)
    assert not to.get().any()


def test_buffers_of_an_allocator_used_on_another_queue_come_back_when_it_is_done(opencl):
    """record_stream is told of the queue, by the handle that sub-allocators take."""
    other = cl.CommandQueue(opencl.context)
    told = []

    class Fenced(bfc.OpenCLSubAllocator):
        def fence(self, stream: int) -> None:
            told.append(stream)

    with bfc.BFCAllocator(Fenced(opencl.context), memory_limit=1 << 22) as allocator:
        source = allocator.allocate(64)
        bfc.copy(source, np.arange(64, dtype="u1"))
        told.clear()
        out = bfc.copy(np.zeros(64, "u1"), source, stream=other)
        assert out.tolist() == list(range(64))
        source.free()
    assert told == [other.int_ptr]


@pytest.mark.parametrize("svm", [False, True])
def test_every_lane_of_opencl_memory_takes_part(svm):
    """Shared virtual memory has no cl_mem, and so no DLPack capsule to be held by."""
    items = np.arange(24, dtype="f8").reshape(4, 6)[:, ::-1]
    with bfc.CachingAllocator(bfc.OpenCLSubAllocator(svm=svm), memory_limit="64 MiB") as allocator:
        there, halves = (
            allocator.allocate(24 * size).view(dtype, (4, 6))
            for size, dtype in ((4, "f4"), (2, "f2"))
        )
        bfc.copy(there, items)
        bfc.copy(halves, there, neg=True)
        assert np.array_equal(bfc.copy(np.zeros((6, 4), "i4").T, halves), -items)
        buffer = allocator.allocate(8)
        buffer.free()
        with pytest.raises(bfc.ClosedError):
            bfc.copy(buffer, np.zeros(8, "u1"))
        del there, halves


def test_a_copy_whose_frames_a_profiler_keeps_holds_no_memory_afterwards(opencl):
    source = bfc.OpenCLSubAllocator(opencl.context, capacity=8 << 20)
    allocator, frames = bfc.CachingAllocator(source), []
    one, other = allocator.allocate(8), allocator.allocate(8)
    sys.setprofile(lambda frame, _event, _argument: frames.append(frame))
    try:
        bfc.copy(one, np.arange(8, dtype="u1"), non_blocking=True)
        bfc.copy(other, one)
        bfc.copy(np.zeros(8, "u1"), other)
    finally:
        sys.setprofile(None)
    one.free()
    other.free()
    allocator.close()
    assert source.live_bytes == 0


def test_a_buffer_of_the_host_can_be_freed_once_its_queue_is_done(opencl):
    with bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        source, there = allocator.allocate(64), cl.array.zeros(opencl, 64, "u1")
        bfc.copy(source, np.arange(64))
        bfc.copy(there, source, non_blocking=True)
        bfc.copy(source, there, non_blocking=True)
        opencl.finish()
        source.free()
        assert there.get().tolist() == list(range(64))


def test_memory_of_the_host_stays_until_a_transfer_is_done(opencl):
    gate = cl.UserEvent(opencl.context)
    there = cl.array.zeros(opencl, 64, "u1")
    opencl.finish()
    cl.enqueue_barrier(opencl, wait_for=[gate])
    gone = np.arange(64, dtype="u1")
    alive = weakref.ref(gone)
    bfc.copy(there, gone, non_blocking=True)
    bfc.copy(there[::2], gone[1::2].astype("i4"), non_blocking=True)
    del gone
    assert alive() is not None
    gate.set_status(cl.command_execution_status.COMPLETE)
    opencl.finish()
    wanted = np.arange(64)
    wanted[::2] += 1
    assert there.get().tolist() == wanted.tolist()
    bfc.copy(there, np.zeros(64, "u1"), non_blocking=True)
    assert alive() is None


@pytest.mark.parametrize("svm", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "i4"])  # packed or cast on the way
@pytest.mark.parametrize("to_device", [False, True])
def test_a_pinned_block_is_not_used_again_before_a_transfer_is_done(opencl, svm, dtype, to_device):
    nbytes = 4096
    there = bfc.OpenCLSubAllocator(opencl.context, svm=svm, capacity="4 MiB")
    with (
        bfc.BFCAllocator(there, stream=opencl) as pool,
        bfc.PinnedAllocator(bfc.HostSubAllocator("1 MiB")) as pinned,
    ):
        device = pool.allocate(nbytes).view("f4")
        bfc.copy(device, np.full(nbytes // 4, 3))
        address = pinned.allocate_raw(nbytes)
        host = np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)
        host[:] = 5
        gate = cl.UserEvent(opencl.context)
        cl.enqueue_barrier(opencl, wait_for=[gate])
        bfc.copy(*((device, host) if to_device else (host, device)), non_blocking=True)
        pinned.deallocate_raw(address)
        other = pinned.allocate_raw(nbytes)
        gate.set_status(cl.command_execution_status.COMPLETE)
        opencl.finish()
        assert other != address
        assert (bfc.copy(np.zeros(nbytes // 4), device) == (5 if to_device else 3)).all()
        assert (host == (5 if to_device else 3)).all()
        assert pinned.allocate_raw(nbytes) == address


def test_a_pinned_block_that_was_asked_for_on_a_queue_waits_for_it(opencl):
    """On CUDA, too, which does not know the queue."""
    for source in (bfc.HostSubAllocator("1 MiB"), bfc.CUDASubAllocator(kind="pinned")):
        with bfc.PinnedAllocator(source) as pinned:
            blocks = [pinned.allocate_raw(4096, opencl), pinned.allocate_raw(4096)]
            pinned.record_stream(blocks[1], opencl)
            with bfc.use_stream(opencl):
                buffer = pinned.allocate(4096)
            bfc.copy(cl.array.zeros(opencl, 4096, "u1"), buffer)
            gate = cl.UserEvent(opencl.context)
            cl.enqueue_barrier(opencl, wait_for=[gate])
            addresses = [*blocks, buffer.ptr]
            for address in blocks:
                pinned.deallocate_raw(address)
            buffer.free()
            others = [pinned.allocate_raw(4096) for _ in range(3)]
            gate.set_status(cl.command_execution_status.COMPLETE)
            opencl.finish()
            assert not set(addresses) & set(others)
            assert {pinned.allocate_raw(4096) for _ in range(3)} == set(addresses)


@pytest.mark.parametrize("to_device", [False, True])
def test_an_allocator_of_pinned_memory_closes_behind_transfers_of_live_blocks(opencl, to_device):
    nbytes = 1 << 22
    there = cl.array.zeros(opencl, nbytes, "u1")
    opencl.finish()
    pinned = bfc.PinnedAllocator(bfc.HostSubAllocator("8 MiB"))
    buffer = pinned.allocate(nbytes).from_host(b"5" * nbytes)
    gate = cl.UserEvent(opencl.context)
    cl.enqueue_barrier(opencl, wait_for=[gate])
    bfc.copy(*((there, buffer) if to_device else (buffer, there)), non_blocking=True)
    closing = threading.Thread(target=pinned.close)
    closing.start()
    closing.join(0.2)
    was_closed = pinned.closed
    gate.set_status(cl.command_execution_status.COMPLETE)
    closing.join()
    assert not was_closed
    assert pinned.closed
    opencl.finish()


def test_a_pinned_buffer_that_was_dropped_needs_no_further_copy_to_go(opencl):
    there = cl.array.zeros(opencl, 4096, "u1")
    with bfc.PinnedAllocator(bfc.HostSubAllocator("1 MiB")) as pinned:
        for dtype in ("u1", "i4"):  # as it is, or cast
            buffer = pinned.allocate(there.nbytes)
            array = np.frombuffer(buffer, dtype)
            array[:] = 7
            bfc.copy(there[: array.size], array, non_blocking=True)
            bfc.copy(there[: array.size], buffer.view(dtype), non_blocking=True)
            del buffer, array
            opencl.finish()
            pinned.empty_cache()
            assert pinned.host_memory_stats()["allocated_bytes.current"] == 0
    assert (there.get() == 7).all()


def is_queued(event) -> bool:
    return event.command_execution_status != cl.command_execution_status.COMPLETE


def test_a_queue_chosen_for_a_while_is_that_of_the_copy(opencl):
    chosen = cl.CommandQueue(opencl.context)
    gate = cl.UserEvent(opencl.context)
    there, elsewhere = cl.array.zeros(opencl, 8, "f4"), cl.array.zeros(opencl, 8, "f4")
    opencl.finish()
    cl.enqueue_barrier(chosen, wait_for=[gate])
    other = cl.CommandQueue(cl.Context(opencl.context.devices))
    foreign = cl.array.zeros(other, 8, "f4")
    with bfc.use_stream(chosen):
        bfc.copy(there, np.ones(8), non_blocking=True)
        assert is_queued(there.events[-1])
        bfc.copy(elsewhere, np.ones(8), stream=opencl, non_blocking=True)  # which is named
        # Memory that cannot be on that queue is copied as outside.
        assert bfc.copy(np.zeros(2), [1, 2]).tolist() == [1, 2]
        assert bfc.copy(foreign, np.full(8, 3.0)).get().tolist() == [3] * 8
    gate.set_status(cl.command_execution_status.COMPLETE)
    chosen.finish()
    assert there.get().tolist() == elsewhere.get().tolist() == [1] * 8
    with bfc.use_stream(chosen):
        assert bfc.copy(foreign, there, neg=True).get().tolist() == [-1] * 8
    with bfc.use_stream(7):  # CUDA's
        assert bfc.copy(there, elsewhere, neg=True).get().tolist() == [-1] * 8


def test_a_number_that_leads_to_no_queue_of_the_memorys_context_is_refused(opencl):
    there = cl.array.zeros(opencl, 4, "f4")
    other = cl.CommandQueue(cl.Context(opencl.context.devices))
    for number, words in (
        (5, "not a command queue"),
        (-1, "stream handle lies"),
        (1 << 63, "not a command queue"),
        (opencl.context.int_ptr, "not a command queue"),
        (other.int_ptr, "another context"),
    ):
        with pytest.raises(ValueError, match=words):
            bfc.copy(there, np.ones(4), stream=number)
    with pytest.raises(TypeError, match="not bool"):
        bfc.copy(there, np.ones(4), stream=True)
    assert not there.get().any()
    assert bfc.copy(there, np.ones(4), stream=opencl.int_ptr).get().all()


def virtual(queue, bound_to=None):
    """64 bytes of shared virtual memory."""
    if not queue.device.svm_capabilities:
        pytest.skip("no shared virtual memory")
    return cl.SVMAllocation(queue.context, 64, 64, cl.svm_mem_flags.READ_WRITE, queue=bound_to)


def test_nobody_waits_for_shared_virtual_memory(opencl):
    one, other = virtual(opencl), virtual(opencl)
    values, out = np.arange(64, dtype="u1"), np.zeros(64, "u1")
    gate = cl.UserEvent(opencl.context)
    cl.enqueue_barrier(opencl, wait_for=[gate])
    bfc.copy(one, values, stream=opencl, non_blocking=True)
    bfc.copy(other, one, stream=opencl)
    bfc.copy(out, other, stream=opencl, non_blocking=True)
    assert not out.any()
    gate.set_status(cl.command_execution_status.COMPLETE)
    opencl.finish()
    assert np.array_equal(out, values)


@pytest.mark.filterwarnings("ignore:Array has different queue")
def test_shared_virtual_memory_that_is_bound_to_no_queue_stays_until_a_copy_is_done(opencl):
    class Watched(cl.SVMPointer):
        """Which can be asked whether it is alive, as pyopencl's own cannot."""

        def __init__(self) -> None:
            self.memory = virtual(opencl)

        svm_ptr = property(lambda self: self.memory.svm_ptr)
        size = property(lambda self: self.memory.size)

    to, source = cl.array.zeros(opencl, 16, "f4"), Watched()
    bfc.copy(source, np.full(64, 1, "u1"), stream=opencl)
    alive = weakref.ref(source)
    gate = cl.UserEvent(opencl.context)
    cl.enqueue_barrier(opencl, wait_for=[gate])
    bfc.copy(to, cl.array.Array(opencl, (16,), np.int32, data=source))
    bfc.copy(cl.array.zeros(opencl, 64, "u1"), source, stream=opencl)
    del source
    assert alive() is not None
    gate.set_status(cl.command_execution_status.COMPLETE)
    opencl.finish()
    assert to.get().tolist() == [np.float32(0x01010101)] * 16
    bfc.copy(to, np.zeros(16), non_blocking=True)
    assert alive() is None


def test_an_array_in_a_pool_of_shared_virtual_memory_goes_when_it_is_dropped(opencl):
    virtual(opencl)
    source = bfc.OpenCLSubAllocator(opencl.context, svm=True, capacity="1 MiB")
    with bfc.BFCAllocator(source, stream=opencl) as pool:
        make = bfc.integrations.pyopencl.allocator(pool)
        array = cl.array.zeros(opencl, 16, "f4", allocator=make)
        bfc.copy(cl.array.zeros(opencl, 16, "i4"), array)
        del array
        assert pool.stats().bytes_in_use == 0


def test_shared_virtual_memory_names_its_queue_or_takes_that_of_the_other_side(opencl):
    values = np.arange(64, dtype="u1")
    bound, unbound = virtual(opencl, bound_to=opencl), virtual(opencl)
    assert np.array_equal(bfc.copy(np.zeros(64, "u1"), bfc.copy(bound, values)), values)
    buffer = cl.Buffer(opencl.context, cl.mem_flags.READ_WRITE, 64)
    array = cl.array.zeros(opencl, 64, "u1")
    for other in (bound, buffer, array):
        for options in ({}, {"stream": opencl}):
            bfc.copy(unbound, np.zeros(64, "u1"), stream=opencl)
            bfc.copy(other, values)
            bfc.copy(unbound, other, **options)
            opencl.finish()
            bfc.copy(other, np.zeros(64, "u1"))
            bfc.copy(other, unbound, **options)
            opencl.finish()
            assert np.array_equal(bfc.copy(np.zeros(64, "u1"), other), values)
    of_host = np.zeros(64, "u1")
    bfc.copy(cl.SVM(of_host), values, stream=opencl)  # the host's own, as a kernel gets it
    assert np.array_equal(of_host, values)
    with pytest.raises(TypeError, match="names no OpenCL context"):
        bfc.copy(unbound, values)
    unbind(bound)


@pytest.mark.parametrize("svm", [False, True])
def test_memory_without_events_is_copied_in_the_order_of_the_calls(opencl, svm):
    """On a queue that runs its work in any order."""
    out_of_order = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    queue = cl.CommandQueue(opencl.context, properties=out_of_order)
    items = 1 << 16
    with bfc.BFCAllocator(bfc.OpenCLSubAllocator(opencl.context, svm=svm)) as pool:
        first, second, third = (pool.allocate(4 * items, queue).view("f4") for _ in range(3))
        for buffer in (first, second, third):
            bfc.copy(buffer, np.zeros(items), non_blocking=True)
        queue.finish()
        gate = cl.UserEvent(opencl.context)
        there = cl.array.Array(queue, items, "f4", events=[gate])
        bfc.copy(there, np.full(items, 5, "f4"), non_blocking=True)
        bfc.copy(first, there)  # and so on, while nothing has run yet
        bfc.copy(second, first, neg=True)
        bfc.copy(third, second)
        arrived = np.zeros(items, "f4")
        bfc.copy(arrived, third, non_blocking=True)
        assert not arrived.any()
        gate.set_status(cl.command_execution_status.COMPLETE)
        queue.finish()
        assert (arrived == -5).all()


def test_many_copies_of_an_array_are_queued_without_waiting(opencl):
    """As many as are wanted: pyopencl itself waits where an array has 13 events."""
    there = cl.array.zeros(opencl, 64, "f4")
    gate = cl.UserEvent(opencl.context)
    there.add_event(cl.enqueue_barrier(opencl, wait_for=[gate]))
    part, events = there[32:], there.events  # which both have
    try:
        for number in range(40):
            assert len(events) < 4
            bfc.copy(there, np.full(64, number), non_blocking=True)
            bfc.copy(part, there[:32], neg=True, stream=cl.CommandQueue(opencl.context))
            assert is_queued(events[-1])
        before = list(events)
        bfc.copy(part.reshape(1, 32), part)  # onto itself
        assert events == before
    finally:
        gate.set_status(cl.command_execution_status.COMPLETE)
    assert part.get().tolist() == [-39] * 32
    assert there[:32].get().tolist() == [39] * 32


@pytest.mark.parametrize("svm", [False, True])
def test_a_pool_knows_which_queues_its_arrays_are_copied_on(opencl, svm):
    """Where the array names no queue, and the memory under it never does."""
    queue = cl.CommandQueue(opencl.context)
    gate = cl.UserEvent(opencl.context)
    with bfc.BFCAllocator(bfc.OpenCLSubAllocator(opencl.context, svm=svm)) as pool:
        own = pool.sub_allocator.queue
        take = in_arrays.allocator(pool)
        arrays = [cl.array.zeros(own, 1024, "f4", allocator=take) for _ in range(2)]
        own.finish()
        addresses = {array.base_data.block.ptr for array in arrays}
        cl.enqueue_barrier(queue, wait_for=[gate])
        try:
            values = np.full(1024, 7, "f4")
            bfc.copy(arrays[0].with_queue(None), values, stream=queue, non_blocking=True)
            bfc.copy(arrays[1].base_data, values.view("u1"), stream=queue, non_blocking=True)
            arrays.clear()
            others = [pool.allocate(4096) for _ in range(2)]
            assert not addresses & {other.ptr for other in others}
        finally:
            gate.set_status(cl.command_execution_status.COMPLETE)
        queue.finish()
        assert addresses == {pool.allocate_raw(4096) for _ in range(2)}


@pytest.mark.parametrize("svm", [False, True])
def test_an_array_whose_block_was_released_is_refused(opencl, svm):
    pool = bfc.BFCAllocator(bfc.OpenCLSubAllocator(opencl.context, svm=svm), stream=opencl)
    arrays = [
        cl.array.zeros(opencl, 16, "f4", allocator=in_arrays.allocator(pool)) for _ in range(3)
    ]
    others = [array[::-1] for array in arrays]
    buffer = pool.allocate(16)
    opencl.finish()
    arrays[0].base_data.release()
    arrays[1].base_data.block.free()
    pool.close()
    for array, other in zip([*arrays, buffer], [*others, arrays[2]], strict=True):
        for ends in ((array, np.zeros(16)), (np.zeros(16), array), (array, other)):
            with pytest.raises(bfc.ClosedError, match="its allocator closed"):
                bfc.copy(*ends)
