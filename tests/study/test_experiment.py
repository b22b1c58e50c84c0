"""One trace under several policies, without the command that prints the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import bfc
from bfc_tools.study.counting import CountedSimulated
from bfc_tools.study.experiment import Policy, at_its_fullest, compare, measure

MIB = 1 << 20
BOTH = [Policy("bfc", bfc.BFCAllocator), Policy("caching", bfc.CachingAllocator)]
#: 5 MiB twice, of which the first is freed, and 1000 bytes that stay.
TRACE = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [5 * MIB, 5 * MIB, 0, 1000])


def device() -> CountedSimulated:
    return CountedSimulated("64 MiB")


def test_each_policy_has_a_row_with_the_figures_of_one_replay() -> None:
    plain, caching = compare(TRACE, BOTH, device, name="three", passes=1)
    assert (plain.trace, plain.policy, caching.policy) == ("three", "bfc", "caching")
    for row in (plain, caching):
        assert (row.events, row.refused, row.peak_bytes_live) == (4, 0, 10 * MIB)
        assert row.peak_bytes_in_use == 10 * MIB
        assert row.ns_per_event > 0
    assert (plain.regions_taken, plain.peak_bytes_reserved) == (1, 64 * MIB)
    # A large segment, and a small one for the last.
    assert (caching.regions_taken, caching.peak_bytes_reserved) == (2, 22 * MIB)
    assert 0 < caching.fragmentation < 1


def test_a_policy_that_stitches_is_a_policy_like_others() -> None:
    """Of twelve chunks of 5 MiB every other one is freed: 30 MiB in pieces, for one of 20 MiB."""
    op = [0] * 12 + [1] * 6 + [0]
    ids = [*range(12), *range(0, 12, 2), 12]
    size = [5 * MIB] * 12 + [0] * 6 + [20 * MIB]
    policies = [
        Policy("plain", bfc.BFCAllocator),
        Policy("mapped", lambda source: bfc.BFCAllocator(source, virtual_memory=True)),
    ]
    plain, mapped = compare(bfc.Trace(op, ids, size), policies, device, passes=1)
    assert (plain.refused, mapped.refused) == (1, 0)
    assert (mapped.regions_taken, mapped.peak_bytes_reserved) == (0, 60 * MIB)
    made = mapped.driver_calls_by_kind
    # A page that is stitched is mapped a second time; views reserve addresses of their own.
    assert made["create"] == 30 < made["map"] == 40
    assert made["reserve"] == 2


def test_what_does_not_fit_is_counted() -> None:
    (row,) = compare(bfc.Trace([0, 0], [0, 1], [48 * MIB] * 2), BOTH[1:], device)
    assert (row.refused, row.peak_bytes_in_use) == (1, 48 * MIB)


def test_there_is_no_fragmentation_where_nothing_is_free() -> None:
    (row,) = compare(bfc.Trace([0], [0], [64 * MIB]), BOTH[:1], device)
    assert row.fragmentation is None


def test_progress_is_told_of_every_replay() -> None:
    totals: list[int] = []
    seen: list[list[int]] = []

    @contextlib.contextmanager
    def progress(events: int) -> Iterator[Callable[[], Callable[[int], None]]]:
        totals.append(events)

        def start() -> Callable[[int], None]:
            seen.append([])
            return seen[-1].append

        yield start

    measure(TRACE, BOTH[1], device, passes=2, progress=progress)
    closed = len(TRACE.closed())
    assert totals == [len(TRACE) + 2 * closed]
    assert [replay[-1] for replay in seen] == [len(TRACE), closed, closed]


def test_a_picture_is_of_the_moment_when_most_is_live() -> None:
    snapshot = at_its_fullest(TRACE, BOTH[1], device)
    chunks = [chunk for region in snapshot.regions for chunk in region.chunks if chunk.in_use]
    assert [chunk.size for chunk in chunks] == [5 * MIB, 5 * MIB]


def test_driver_calls_are_counted_by_kind() -> None:
    """Each segment is one call. With expandable segments, each chunk of 20 MiB is created and
    mapped, and each kind of segment has a reservation."""
    expandable = Policy(
        "expandable",
        lambda source: bfc.CachingAllocator(source, settings="expandable_segments:True"),
    )
    plain, mapped = compare(TRACE, [BOTH[1], expandable], device)
    assert (plain.driver_calls, plain.driver_calls_by_kind) == (2, {"alloc": 2})
    assert mapped.driver_calls_by_kind == {"reserve": 2, "create": 2, "map": 2, "access": 2}
    assert (mapped.driver_calls, mapped.regions_taken) == (8, 0)
    assert mapped.peak_bytes_reserved == plain.peak_bytes_reserved == 22 * MIB


def test_a_source_counts_what_it_gives_back_and_refuses_and_waits_for() -> None:
    source = device()
    with bfc.CachingAllocator(source, settings="expandable_segments:True") as allocator:
        kept = allocator.allocate(30 * MIB)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate(60 * MIB)  # the second page is refused
        kept.free()
        allocator.release_free_regions()
    counted = [name for name, *_ in source.calls]
    assert source.waits == counted.count("wait") > 0
    assert source.driver_calls == len(counted) - source.waits
    for kind, times in source.calls_by_kind.items():
        assert times == counted.count(kind), kind
    assert set(source.calls_by_kind) == set(counted) - {"wait"}
