"""What users pass as sizes, streams, addresses and alignments, and what is none of those."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import bfc
from bfc.testing import Misbehaving

POLICIES = pytest.mark.parametrize("make", [bfc.BFCAllocator, bfc.CachingAllocator])


def made(make: type, **options: object) -> bfc.Allocator:
    allocator: bfc.Allocator = make(bfc.SimulatedSubAllocator("64 MiB"), **options)
    return allocator


# -- bools -----------------------------------------------------------------------------------------

CALLS: list[Callable[[bfc.Allocator], object]] = [
    lambda a: a.allocate(True),
    lambda a: a.allocate_raw(False),
    lambda a: a.allocate_raw(1000, True),
    lambda a: a.allocate(1000, False),
    lambda a: a.allocate(1000, alignment=True),
    lambda a: a.allocate_many([1000, True]),
    lambda a: a.allocate_many([1000], True),
    lambda a: a.allocate_many(np.array([True])),
    lambda a: a.deallocate_raw(False),
    lambda a: a.deallocate_many([False]),
    lambda a: a.record_stream(True, 7),
    lambda a: a.record_stream(0, True),
    lambda a: a.requested_size(True),
    lambda a: a.allocated_size(True),
    lambda a: a.allocation_id(True),
    lambda a: bfc.use_stream(True).__enter__(),
]


@POLICIES
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_bool_is_no_size_no_stream_and_no_address(make: type, number: int) -> None:
    allocator = made(make)
    with pytest.raises(TypeError):
        CALLS[number](allocator)
    assert allocator.stats().num_allocs == 0
    assert allocator.stats().bytes_reserved == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: bfc.SimulatedSubAllocator(True),
        lambda: bfc.SimulatedSubAllocator("1 MiB", max_bytes=True),
        lambda: bfc.HostSubAllocator(True),
        lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"), memory_limit=True),
        lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 MiB"), memory_limit=True),
        lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 MiB"), stream=True),
        lambda: bfc.CUDASubAllocator(True),
        lambda: bfc.pinned.is_pinned(True),
    ],
)
def test_nor_a_limit_nor_a_capacity(wrong: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        wrong()


def test_nor_is_it_one_of_pinned_memory() -> None:
    with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        live = allocator.allocate_raw(1000)
        for wrong in (
            lambda: allocator.allocate(True),
            lambda: allocator.allocate_raw(True),
            lambda: allocator.deallocate_raw(False),
            lambda: allocator.allocate(1000, True),
            lambda: allocator.record_stream(live, True),
            lambda: allocator.find(True),
        ):
            with pytest.raises(TypeError):
                wrong()
        assert allocator.host_memory_stats()["active_requests.current"] == 1


# -- alignment -------------------------------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("strict", [False, True])
def test_an_alignment_that_every_address_has_changes_nothing(make: type, strict: bool) -> None:
    allocator, plain = made(make, strict=strict), made(make, strict=strict)
    for alignment in (1, 2, 64, np.int64(256)):
        address = allocator.allocate_raw(1000, alignment=alignment)
        assert address == plain.allocate_raw(1000)
        assert address % int(alignment) == 0
        assert allocator.allocate(1000, alignment=alignment).ptr == plain.allocate(1000).ptr


@POLICIES
def test_an_alignment_beyond_the_limit_is_an_error(make: type) -> None:
    allocator = made(make)
    for allocate in (allocator.allocate, allocator.allocate_raw):
        with pytest.raises(ValueError, match="no address can be asked for that is a multiple of"):
            allocate(1000, alignment=1 << 62)
    assert allocator.stats().num_allocs == 0


@pytest.mark.parametrize("alignment", [1024, 4096, 1 << 62])
def test_what_strict_does_with_more_alignment_than_there_is(alignment: int) -> None:
    allocator = made(bfc.BFCAllocator, strict=True)  # TensorFlow 2.21 ignores it
    allocator.allocate_raw(256)
    assert allocator.allocate_raw(4096, alignment=alignment) % 4096 == 256
    caching = made(bfc.CachingAllocator, strict=True)  # PyTorch has none
    for allocate in (caching.allocate, caching.allocate_raw):
        with pytest.raises(ValueError, match=f"multiples of 512, .* {alignment} needs strict=Fal"):
            allocate(1000, alignment=alignment)
    assert caching.stats().num_allocs == 0


def test_a_coarser_source_gives_more_alignment() -> None:
    allocator = bfc.CachingAllocator(Misbehaving("8 MiB", granularity=4096), strict=True)
    allocator.allocate_raw(1)
    assert allocator.allocate_raw(1, alignment=4096) % 4096 == 0
    with pytest.raises(ValueError, match="multiples of 4096"):
        allocator.allocate_raw(1, alignment=8192)


@POLICIES
@pytest.mark.parametrize(
    ("alignment", "error"),
    [
        (0, ValueError),
        (3, ValueError),
        (-256, ValueError),
        (1 << 70, ValueError),
        ("256", TypeError),
        (256.0, TypeError),
        (True, TypeError),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_no_alignment(
    make: type, alignment: object, error: type[Exception], strict: bool
) -> None:
    with pytest.raises(error, match="alignment"):
        made(make, strict=strict).allocate_raw(1000, alignment=alignment)  # type: ignore[arg-type]


# -- the address of a buffer -----------------------------------------------------------------------


@POLICIES
def test_a_freed_buffer_has_no_address(make: type) -> None:
    buffer = made(make).allocate(1000)
    view = buffer.view("float32")
    assert buffer.ptr == view.ptr > 0
    buffer.free()
    for freed in (buffer, view):
        with pytest.raises(bfc.ClosedError, match="was freed"):
            print(freed.ptr)
        assert freed.nbytes == 1000
        assert "freed" in repr(buffer)
    nothing = made(make).allocate(0)
    nothing.free()
    assert nothing.ptr == 0


def test_nor_has_one_of_pinned_memory() -> None:
    with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        buffer = allocator.allocate(1000)
        buffer.free()
        with pytest.raises(bfc.ClosedError, match="was freed"):
            print(buffer.ptr)


@pytest.mark.parametrize("limit", [0, "0", "0 B", "0 GiB", 0.0])
@pytest.mark.parametrize(
    "make",
    [
        bfc.BFCAllocator,
        bfc.CachingAllocator,
        partial(bfc.BFCAllocator, virtual_memory=True),
        partial(bfc.CachingAllocator, stitch=True),
        partial(bfc.CachingAllocator, settings="expandable_segments:True"),
    ],
)
def test_a_limit_of_nothing_is_refused(make, limit):
    with pytest.raises(ValueError, match=r"limit of 0 bytes|must be above 0"):
        make(bfc.SimulatedSubAllocator("1 GiB"), memory_limit=limit)


def test_a_fraction_of_less_than_a_byte_is_a_limit_of_nothing():
    """But for PyTorch's policy, which takes any fraction, as PyTorch does."""
    with pytest.raises(ValueError, match="limit of 0 bytes"):
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), memory_limit=1e-15)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bfc.BFCAllocator(bfc.HostSubAllocator("1 MiB")),
        lambda: bfc.CachingAllocator(bfc.HostSubAllocator("30 MiB")),
        lambda: bfc.PinnedAllocator(bfc.HostSubAllocator()),
    ],
)
def test_a_freed_buffer_has_one_error(make):
    buffer = make().allocate(1000)
    buffer.free()
    for use in (lambda: buffer.ptr, lambda: memoryview(buffer), buffer.to_host, buffer.__dlpack__):
        with pytest.raises(bfc.ClosedError, match="this buffer was freed, or its allocator closed"):
            use()
