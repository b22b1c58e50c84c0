"""The figures of a replay over time: each row is true, and no peak is lost."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bfc
import bfc.testing
from bfc_tools.study.counting import CountedSimulated

MIB = 1 << 20
NAMES = ["event", "live", "in_use", "reserved", "largest_free", "refused", "driver_calls"]
POLICIES = {
    "bfc": lambda source: bfc.BFCAllocator(source, allow_growth=True),
    "fixed": bfc.BFCAllocator,
    "stitching": lambda source: bfc.BFCAllocator(source, virtual_memory=True),
    "caching": bfc.CachingAllocator,
    "expandable": lambda source: bfc.CachingAllocator(source, settings="expandable_segments:True"),
    "collecting": lambda source: bfc.CachingAllocator(
        source, settings="garbage_collection_threshold:0.6,max_split_size_mb:21"
    ),
}


def truth(trace: bfc.Trace, policy: str, capacity: int) -> list[tuple[int, ...]]:
    """What is true after each event, of a replay of one event at a time."""
    source = CountedSimulated(capacity)
    rows = []
    with POLICIES[policy](source) as allocator:
        # Streams are the same where all events are on stream 0.
        before, refused, live = source.driver_calls, 0, 0
        where: dict[int, tuple[int, int]] = {}
        for event, (op, number, size) in enumerate(
            zip(trace.op, trace.id, trace.size, strict=True)
        ):
            one = int(number)
            if op == 2:
                allocator.release_free_regions()
            elif op == 1:
                address, asked = where.pop(one)
                live -= asked
                allocator.deallocate_raw(address)
            else:
                try:
                    where[one] = allocator.allocate_raw(int(size)), int(size)
                except bfc.OutOfMemoryError:
                    where[one] = 0, 0
                    refused += 1
                live += where[one][1]
            stats = allocator.stats()
            figures = stats.bytes_in_use, stats.pool_bytes, stats.largest_free_block_bytes
            rows.append((event, live, *figures, refused, source.driver_calls - before))
    return rows


def rows_of(timeline: bfc.Timeline) -> list[tuple[int, ...]]:
    columns = [getattr(timeline, name).tolist() for name in NAMES]
    return list(zip(*columns, strict=True))


def assert_true(trace: bfc.Trace, policy: str, capacity: int, samples: int) -> bfc.Timeline:
    with POLICIES[policy](bfc.SimulatedSubAllocator(capacity)) as allocator:
        result = trace.replay(allocator, samples=samples)
    timeline = result.timeline
    expected = truth(trace, policy, capacity)
    rows = rows_of(timeline)
    assert len(timeline) == len(rows) <= max(samples, 7)
    if not expected:
        assert rows == []
        return timeline
    for number, row in enumerate(rows):
        inside = number + 1 < len(rows) and rows[number + 1][0] == row[0]
        if inside:  # more, in the middle of an event
            assert row[2] > rows[number + 1][2] or row[3] > rows[number + 1][3]
        else:
            assert row == expected[row[0]]
    assert timeline.event.tolist() == sorted(timeline.event.tolist())
    assert rows[-1] == expected[-1]
    assert timeline.live.max() == result.peak_bytes_live
    assert timeline.in_use.max() == result.peak_bytes_in_use
    assert timeline.reserved.max() == result.peak_bytes_reserved
    for column in (1, 2, 3):
        assert min(row[column] for row in rows) == min(row[column] for row in expected)
    assert timeline.refused[-1] == result.failed
    return timeline


@given(
    bfc.testing.traces(releases=True),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 40),
    st.sampled_from([24 * MIB, 64 * MIB, 1 << 30]),
)
def test_every_row_is_true_and_no_extreme_is_lost(trace, policy, samples, capacity) -> None:
    assert_true(trace, policy, capacity, samples)


def churned(seed: int, events: int, most: int) -> bfc.Trace:
    """Sizes of all kinds; about a hundred blocks live."""
    dice = np.random.default_rng(seed)
    op, number, size, live = [], [], [], []
    for event in range(events):
        if live and (dice.random() < 0.5 or len(live) > 100):
            op.append(1)
            number.append(live.pop(dice.integers(len(live))))
            size.append(0)
        else:
            op.append(0)
            number.append(event)
            size.append(int(most ** dice.random()))
            live.append(event)
    return bfc.Trace(op, number, size)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("samples", [1, 40, 333])
def test_long_runs_with_refusals(policy: str, samples: int) -> None:
    trace = churned(5, 3000, 30 * MIB)
    timeline = assert_true(trace, policy, 48 * MIB, samples)
    assert timeline.refused[-1] > 0
    assert len(timeline) > samples // 3


def test_a_short_trace_has_a_row_for_each_event() -> None:
    trace = churned(1, 50, MIB)
    timeline = assert_true(trace, "caching", 1 << 30, 400)
    assert timeline.event.tolist() == list(range(50))


def test_a_peak_before_the_first_event_and_one_in_the_middle_of_an_event_are_seen() -> None:
    """What an allocator held before the replay counts in the replay's peak, and is given back by
    its first event."""
    trace = bfc.Trace([2, 0], [0, 1], [0, 1000])
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        allocator.allocate(100 * MIB).free()
        result = trace.replay(allocator, samples=10)
    assert result.peak_bytes_reserved == 100 * MIB
    assert rows_of(result.timeline) == [
        (0, 0, 0, 100 * MIB, 0, 0, 1),
        (0, 0, 0, 0, 0, 0, 1),
        (1, 1000, 1024, 2 * MIB, 2 * MIB - 1024, 0, 2),
    ]


def test_calls_and_refusals_are_those_of_this_replay() -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [3 * MIB, 1 << 40, 0]).closed()
    source = bfc.SimulatedSubAllocator("1 GiB")
    with bfc.CachingAllocator(source) as allocator:
        first = trace.replay(allocator, samples=9).timeline
        again = trace.replay(allocator, samples=9).timeline
    assert first.driver_calls.tolist() == [1, 3, 3, 3]
    assert first.refused.tolist() == again.refused.tolist() == [0, 1, 1, 1]
    assert again.driver_calls.tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize("streams", [1, 3])
def test_streams_that_must_be_looked_at_one_by_one(streams: int) -> None:
    base = churned(3, 600, 4 * MIB)
    order = np.arange(len(base)) % streams
    stream = np.zeros(len(base), np.uint16)
    allocations = base.op == 0
    stream[allocations] = order[allocations]
    trace = bfc.Trace(base.op, base.id, base.size, stream)
    for policy in ("bfc", "caching"):
        source = bfc.SimulatedSubAllocator("2 GiB")
        source.hold(2)
        with POLICIES[policy](source) as allocator:
            result = trace.replay(allocator, samples=50)
            source.finish(2)
        assert result.timeline.in_use.max() == result.peak_bytes_in_use
        assert result.timeline.reserved.max() == result.peak_bytes_reserved
        assert result.timeline.event[-1] == len(trace) - 1


def test_a_timeline_is_kept_only_where_it_is_asked_for() -> None:
    trace = churned(2, 300, MIB)
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        assert trace.replay(allocator).timeline is None
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        with_one = trace.replay(allocator, samples=20)
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        without = trace.replay(allocator)
    assert np.array_equal(with_one.addresses, without.addresses)
    assert with_one.peak_bytes_reserved == without.peak_bytes_reserved


def test_a_timeline_of_nothing_is_empty() -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        timeline = bfc.Trace([], [], []).replay(allocator, samples=5).timeline
    assert len(timeline) == 0
    assert all(getattr(timeline, name).dtype == np.uint64 for name in NAMES)


@pytest.mark.parametrize(
    ("samples", "error"), [(0, ValueError), (-3, ValueError), ("9", TypeError)]
)
def test_a_number_of_samples_is_a_count(samples, error) -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        with pytest.raises(error):
            churned(2, 10, MIB).replay(allocator, samples=samples)
        assert allocator.stats().num_allocs == 0


def test_more_samples_than_memory_could_hold_are_as_many_as_events() -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        assert len(churned(2, 10, MIB).replay(allocator, samples=1 << 80).timeline) == 10


def test_a_timeline_is_a_value() -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        timeline = churned(2, 100, MIB).replay(allocator, samples=30).timeline
    again = pickle.loads(pickle.dumps(timeline))
    assert [field.name for field in dataclasses.fields(timeline)] == NAMES
    assert all(np.array_equal(getattr(again, name), getattr(timeline, name)) for name in NAMES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timeline.live = timeline.in_use


@pytest.mark.parametrize("options", ["", "expandable_segments:True", "max_split_size_mb:21"])
def test_the_history_of_a_living_allocator_gives_the_same(tmp_path, options: str) -> None:
    """The row of its last event is the allocator's own figures, and so are the peaks."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings=options) as living:
        living.record_history(context=None)
        recorded = churned(8, 800, 9 * MIB)
        recorded.replay(living)
        living.dump(tmp_path / "run.pickle")
        stats = living.stats()
    run = bfc.Trace.from_torch(tmp_path / "run.pickle")
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings=options) as again:
        timeline = run.replay(again, samples=100).timeline
    assert timeline.in_use[-1] == stats.bytes_in_use
    assert timeline.in_use.max() == stats.peak_bytes_in_use
    assert timeline.reserved[-1] == stats.pool_bytes
    assert timeline.reserved.max() == stats.peak_pool_bytes
    assert timeline.largest_free[-1] == stats.largest_free_block_bytes
    assert timeline.live.max() <= timeline.in_use.max()
