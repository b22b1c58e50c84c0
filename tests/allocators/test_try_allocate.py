"""`try_allocate`: None in place of an OutOfMemoryError, and otherwise what `allocate` does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20

KINDS: dict[str, Callable[[], Any]] = {
    "bfc": lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB")),
    "growing": lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), allow_growth=True),
    "pages": lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), virtual_memory=True),
    "caching": lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB")),
    "strict": lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"), strict=True),
    "expandable": lambda: bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("64 MiB"), settings="expandable_segments:True"
    ),
    "stitch": lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"), stitch=True),
    "pinned": lambda: bfc.PinnedAllocator(bfc.SimulatedSubAllocator("64 MiB")),
    "reserve": lambda: bfc.PinnedAllocator(
        bfc.SimulatedSubAllocator("1 MiB"), "pinned_reserve_segment_size_mb:4"
    ),
}
POOLS = [kind for kind in KINDS if kind not in ("pinned", "reserve")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_is_none_and_no_error_is_built(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = KINDS[kind]()
    built = []
    monkeypatch.setattr(bfc.errors.OutOfMemoryError, "_text", lambda _: built.append(1) or "text")
    assert allocator.try_allocate("100 MiB") is None
    assert allocator.try_allocate(2**63 - 1) is None
    assert bool(built) == (kind == "reserve"), "only the reserve's refusal is one inside"
    allocator.check()
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate("100 MiB")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reserve"])
def test_otherwise_it_is_allocate(kind: str) -> None:
    twins = KINDS[kind](), KINDS[kind]()
    for nbytes in (1000, "3 MiB", 0, 5 * MIB, 1000):
        ours, theirs = twins[0].try_allocate(nbytes), twins[1].allocate(nbytes)
        assert (ours.ptr, ours.nbytes, ours.stream) == (theirs.ptr, theirs.nbytes, theirs.stream)
    for wrong, error in (
        (-1, ValueError),
        ("much", ValueError),
        (2**63, ValueError),
        (1.5, TypeError),
    ):
        with pytest.raises(error):
            twins[0].try_allocate(wrong)
    with pytest.raises(TypeError):
        twins[0].try_allocate(1, "a stream")
    twins[0].close()
    with pytest.raises(bfc.ClosedError):
        twins[0].try_allocate(1000)


@pytest.mark.parametrize("kind", POOLS)
def test_streams_owners_and_tags_are_as_in_allocate(kind: str) -> None:
    allocator = KINDS[kind]()
    with bfc.owner("kv cache"), bfc.use_stream(7):
        kept = allocator.try_allocate(MIB)
        assert allocator.try_allocate(100 * MIB) is None
    assert kept.stream == 7
    assert allocator.stats().by_owner["kv cache"] == MIB
    other = allocator.try_allocate(MIB, 9)
    assert other.stream == 9
    with pytest.raises(ValueError, match="power of two"):
        allocator.try_allocate(MIB, alignment=3)
    other.free()
    kept.free()
    assert allocator.stats().by_owner == {}
    assert allocator.try_allocate(44 * MIB, stream=7) is not None


@pytest.mark.parametrize("kind", ["pages", "expandable", "stitch"])
def test_a_tag_has_what_was_allocated_so_and_a_sleeping_one_raises(kind: str) -> None:
    allocator = KINDS[kind]()
    with allocator.tag("weights"):
        weights = allocator.try_allocate(8 * MIB)
        assert allocator.try_allocate(100 * MIB) is None
    assert allocator.sleep(drop=["weights"]).released_bytes >= 8 * MIB
    with allocator.tag("weights"), pytest.raises(bfc.AsleepError):
        allocator.try_allocate(MIB)
    allocator.wake("weights")
    weights.free()


def test_contiguous_memory_is_asked_for_so() -> None:
    allocator = KINDS["pages"]()
    assert allocator.try_allocate("100 MiB", contiguous=True) is None
    assert allocator.try_allocate("8 MiB", contiguous=True).nbytes == 8 * MIB
    with allocator.tag("weights"), pytest.raises(ValueError, match="physical allocation"):
        allocator.try_allocate(MIB, contiguous=True)


def test_it_tries_all_that_allocate_tries() -> None:
    """Garbage in cycles is collected, and what waits for a stream is waited for."""

    class Node:
        pass

    device = bfc.SimulatedSubAllocator("64 MiB")
    allocator = bfc.CachingAllocator(device)
    node = Node()
    node.me, node.memory = node, allocator.allocate("40 MiB")  # type: ignore[attr-defined]
    gc.disable()
    try:
        del node
        assert allocator.try_allocate("44 MiB") is not None
    finally:
        gc.enable()


def test_a_refusal_counts_and_observers_hear_of_it() -> None:
    allocator = KINDS["caching"]()
    heard = []
    allocator.attach_oom_observer(lambda *what: heard.append(what))
    allocator.record_history()
    assert allocator.try_allocate("100 MiB") is None
    assert (len(heard), allocator.memory_stats()["num_ooms"]) == (1, 1)
    assert [entry.action for entry in allocator.history()] == ["oom"]


@pytest.mark.parametrize("kind", ["bfc", "caching"])
def test_a_failing_device_is_still_an_error(kind: str) -> None:
    source = Misbehaving("64 MiB")
    source.on("alloc", raises=RuntimeError("fell off the bus"))
    make = bfc.BFCAllocator if kind == "bfc" else bfc.CachingAllocator
    with pytest.raises(RuntimeError, match="fell off"):
        make(source).try_allocate(MIB)
