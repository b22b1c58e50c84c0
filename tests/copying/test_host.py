"""Copies between arrays of the host, held to NumPy's answer."""

from __future__ import annotations

import array
import itertools
import sys
import warnings

import numpy as np
import pytest
from copy_cases import CHANGES, PAIRS, case, same, seeds
from numpy.exceptions import ComplexWarning

import bfc

pytestmark = pytest.mark.filterwarnings(
    "ignore:the imaginary part", "ignore:overflow encountered", "ignore:invalid value"
)


def test_every_pair_of_dtypes_and_every_change():
    for (source, to), change in itertools.product(PAIRS, CHANGES):
        made = case(f"host {source} {to} {change}", source, to, change)
        wanted = made.expected
        result = bfc.copy(made.to.array, made.source.array, conj=change[0], neg=made.neg)
        assert result.dtype == to
        check(made, wanted)


def check(made, wanted) -> None:
    assert same(made.to, made.to.block, wanted), f"case({made.seed!r})"


@seeds(400)
def test_random_copies(seed: int):
    made = case(f"host {seed}", aligned=seed % 3 > 0)
    wanted = made.expected
    bfc.copy(made.to.array, made.source.array, conj=made.conj, neg=made.neg, non_blocking=True)
    check(made, wanted)


@seeds(300)
def test_views_of_one_array_are_copied_as_if_they_did_not_overlap(seed: int):
    """Of one dimension or two, with steps of any length in both directions, cast or not."""
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 100, 400, dtype="u1")
    dtypes = ["i4" if rng.integers(2) else "u1", "i4" if rng.integers(2) else "i2"]
    views, wanted = [], block.copy()
    count = int(rng.integers(1, 9))
    shape = (count,) if rng.integers(3) else (count, 2)
    for dtype in map(np.dtype, dtypes):
        step, offset = dtype.itemsize * int(rng.integers(1, 4)), 100 + int(rng.integers(0, 40))
        step, inner = (-step if rng.integers(3) == 0 else step), int(rng.integers(40, 44))
        views.append((shape, dtype, offset, (step, inner)[: len(shape)]))
    first, second = (np.ndarray(s, d, wanted, at, steps) for s, d, at, steps in views)
    neg = bool(rng.integers(2))
    first[...] = -second if neg else second.copy()
    ends = [np.ndarray(s, d, block, at, steps) for s, d, at, steps in views]
    bfc.copy(*ends, neg=neg)
    assert np.array_equal(block, wanted)


def test_different_steps_through_the_same_memory():
    for dtype, conj in itertools.product(("i1", "i4", "f8", "M8[s]", ">i4"), (False, True)):
        base = np.arange(20).astype(dtype)
        for to, source in ((slice(0, 10, 2), slice(0, 5)), (slice(5, 10), slice(0, 10, 2))):
            wanted, found = base.copy(), base.copy()
            wanted[to] = wanted[source].copy()
            bfc.copy(found[to], found[source], conj=conj)
            assert (found == wanted).all(), (dtype, to, source)
    base = np.arange(4, dtype="i4")
    wanted = base.copy()
    wanted[...] = int(base.view("i2")[2])
    bfc.copy(base, base.view("i2")[2:3].reshape(()))
    assert np.array_equal(base, wanted)


def test_whatever_has_memory_of_the_host_takes_part():
    source = np.arange(4, dtype="i4")
    buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(16)
    raw, items = bytearray(16), array.array("i", [0] * 4)
    for to in (buffer.view("i4"), memoryview(raw).cast("i"), items, OnlyDLPack(np.zeros(4, "i4"))):
        assert bfc.copy(to, source) is to
        assert np.array_equal(bfc.copy(np.zeros(4, "i8"), to), source)
    assert raw == source.tobytes()
    assert buffer.to_host().tobytes() == source.tobytes()
    assert bfc.copy(np.zeros((2, 2)), [[1, 2], [3, 4.5]]).tolist() == [[1, 2], [3, 4.5]]
    assert bfc.copy(np.zeros(3), 7).tolist() == [7, 7, 7]
    assert bfc.copy(np.zeros(2, "u1"), b"ab").tolist() == [97, 98]


class OnlyDLPack:
    """Speaks DLPack and nothing else; with `old` no version of it that has flags."""

    def __init__(self, array: np.ndarray, *, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: object) -> object:
        if self.old and "max_version" in options:
            raise TypeError("max_version")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_of_either_kind_with_strides_both_ways(old: bool):
    base = np.arange(24, dtype="f4").reshape(4, 6)
    to = np.zeros((3, 4), "f8")
    bfc.copy(OnlyDLPack(to.T, old=old), OnlyDLPack(base[::-1, ::2], old=old))
    assert np.array_equal(to.T, base[::-1, ::2])


def test_dlpack_that_is_read_only_is_no_destination():
    array = np.arange(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        bfc.copy(OnlyDLPack(array), [1, 2, 3])


def test_dtypes_without_arithmetic():
    for source, to in (
        (np.array([1.5, 2.5], "g"), np.zeros(2, "f4")),
        (np.array(["2024-01-01", "NaT"], "M8[D]"), np.zeros(2, "M8[s]")),
        (np.array([(1, 2.5)], "i4,f8"), np.zeros(1, "i8,f4")),
        (np.array([b"abc", b"d"]), np.zeros(2, "S2")),
        (np.array([1, 2], ">i4"), np.zeros(2, "<i2")),
    ):
        wanted = to.copy()
        np.copyto(wanted, source, casting="unsafe")
        assert np.array_equal(bfc.copy(to, source), wanted, equal_nan=source.dtype.kind in "Mm")


@pytest.mark.parametrize(
    "scalar",
    [
        np.datetime64("2024-01-01", "s"),
        np.timedelta64(5, "ms"),
        np.bytes_(b"abc"),
        np.str_("abc"),
        np.array([(1, 2.5)], "i4,f8")[0],
        np.float16(1.5),
    ],
)
def test_a_scalar_of_numpys_is_one_item_of_its_dtype(scalar):
    to = np.zeros(8, scalar.dtype)
    assert (bfc.copy(to, scalar) == scalar).all()
    with pytest.raises(ValueError, match="read-only"):
        bfc.copy(scalar, to[0])


def test_complex_to_real_warns_once_a_copy_where_it_was_called():
    source = np.array([1 + 2j, 3 - 4j])
    for options in ({}, {"neg": True}, {"conj": True}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            to = bfc.copy(np.zeros(2, "f4"), source, **options)
        assert [(w.category, w.filename) for w in caught] == [(ComplexWarning, __file__)], options
        assert to.tolist() == ([-1, -3] if "neg" in options else [1, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to = np.full(2, 9.0)
        with pytest.raises(ComplexWarning):
            bfc.copy(to, source)
        assert to.tolist() == [9, 9], "an error, and still written"
        assert bfc.copy(np.zeros(2, bool), np.array([1j, 0])).tolist() == [True, False]


def test_94_the_same_object_or_view_is_not_touched():
    array = np.arange(6.0)
    array.flags.writeable = False  # a write would raise
    assert bfc.copy(array, array) is array
    view = array[::2]
    assert bfc.copy(view, array[::2]) is view
    memory = memoryview(bytes(8))
    assert bfc.copy(memory, memory) is memory
    changed = np.array([1 + 1j])
    assert bfc.copy(changed, changed, conj=True).tolist() == [1 - 1j]


def test_95_nothing_is_done_for_no_items():
    to = np.empty((0, 3))
    assert bfc.copy(to, np.ones((1, 3), "c16")) is to
    assert bfc.copy(to, np.ones(3)) is to
    with pytest.raises(ValueError, match="broadcast"):
        bfc.copy(to, np.ones((2, 3)))


class Cheat:
    """An object that says of itself what a test wants."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("to", "source", "error", "words"),
    [
        (np.zeros(3), np.zeros(2), ValueError, "broadcast"),
        (np.zeros((2, 3)), np.zeros((3, 2)), ValueError, "broadcast"),
        (np.zeros(3), np.array([1, "a", None], object), TypeError, "Python objects"),
        (np.empty(3, object), np.zeros(3), TypeError, "Python objects"),
        (np.empty(3, object), np.empty(3, object), TypeError, "Python objects"),
        (np.zeros(3), [None], TypeError, "of this list: .*Python objects"),
        (np.zeros(3), iter([1, 2, 3]), TypeError, "of this list_iterator"),
        (np.zeros(3), 10**30, TypeError, "of this int"),
        (np.broadcast_to(np.zeros(1), 3), np.zeros(3), ValueError, "share one place|read-only"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)),
            np.zeros(3),
            ValueError,
            "share one place",
        ),
        (b"abc", np.zeros(3, "u1"), ValueError, "read-only"),
        ([0, 0], np.zeros(2), TypeError, "no memory to copy into"),
        (7, np.zeros(()), TypeError, "no memory to copy into"),
        (np.zeros(2), Cheat(__cuda_array_interface__={"mask": 1}), TypeError, "mask"),
    ],
)
def test_bad_input(to, source, error, words):
    before = np.array(to, copy=True)
    with pytest.raises(error, match=words):
        bfc.copy(to, source)
    assert np.array_equal(np.asarray(to), before), "an error, and still written"


def test_changes_are_asked_for_by_whatever_is_true():
    there, source = np.zeros(2, "c8"), np.array([1 + 2j, 3])
    for conj, neg in ((None, 2), (2, None), ("", [1]), (np.True_, 0)):
        wanted = np.conjugate(source) if conj else -source
        assert np.array_equal(bfc.copy(there, source, conj=conj, neg=neg), wanted), (conj, neg)


@pytest.mark.parametrize(
    ("to", "source"),
    [
        (np.full(4, 9.0), np.array(["1", "2", "x", "4"])),
        (np.full(4, 9), np.array([b"1", b"2", b"x", b"4"])),
        (np.full(4, "1999", "M8[D]"), np.array(["2000", "2001", "x", "2003"])),
        (np.full(2, 9, "i4,f8"), np.array([("1", "2"), ("3", "x")], "U1,U1")),
    ],
)
def test_an_item_that_cannot_be_cast_leaves_those_before_it_as_they_were(to, source):
    before = to.copy()
    with pytest.raises(ValueError, match="x"):
        bfc.copy(to, source)
    assert (to == before).all()


def test_what_numpys_settings_make_an_error_of_is_raised_as_by_copyto():
    """A number that does not fit: NumPy tells of it once all is written."""
    source, to = np.array([1, 1e300, 3]), np.zeros(3, "f2")
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        bfc.copy(to, source)
    assert to.tolist() == [1, np.inf, 3]


def test_bad_changes():
    with pytest.raises(TypeError, match="cannot negate bool"):
        bfc.copy(np.zeros(2), np.array([True, False]), neg=True)
    with pytest.raises(TypeError, match="cannot negate"):
        bfc.copy(np.zeros(2, "S1"), np.zeros(2, "S1"), neg=True)


def test_memory_that_was_freed():
    allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
    freed = allocator.allocate(8)
    view = freed.view("f4")
    freed.free()
    for gone in (freed, view):
        with pytest.raises(bfc.ClosedError):
            bfc.copy(gone, np.zeros(2, "f4"))
        with pytest.raises(bfc.ClosedError):
            bfc.copy(np.zeros(2, "f4"), gone)
    closed = allocator.allocate(8)
    allocator.close()
    with pytest.raises(bfc.ClosedError):
        bfc.copy(np.zeros(8, "u1"), closed)
    with pytest.raises(TypeError, match="no bytes"):
        bfc.copy(
            np.zeros(8, "u1"), bfc.BFCAllocator(bfc.SimulatedSubAllocator(1 << 20)).allocate(8)
        )


def test_a_copy_holds_no_memory_afterwards():
    allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
    buffer = allocator.allocate(8)
    bfc.copy(buffer, np.arange(8, dtype="u1"))
    bfc.copy(np.zeros(8, "u1"), buffer)
    buffer.free()  # a view of it would be a BufferError
    assert allocator.stats().bytes_in_use == 0


def test_a_copy_whose_frames_a_profiler_keeps_holds_no_memory_afterwards():
    """A sampler of stacks, as in each worker of Dask, has frames alive when they have returned."""
    allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
    buffer, frames = allocator.allocate(8), []
    sys.setprofile(lambda frame, _event, _argument: frames.append(frame))
    try:
        bfc.copy(buffer, np.arange(8, dtype="u1"))
        bfc.copy(buffer, np.arange(8, dtype="f4"))
        with pytest.raises(ValueError, match="shape"):
            bfc.copy(buffer, np.zeros((2, 3), "u1"))
    finally:
        sys.setprofile(None)
    assert any(frame.f_code.co_name == "run" for frame in frames)
    buffer.free()
    assert allocator.stats().bytes_in_use == 0
