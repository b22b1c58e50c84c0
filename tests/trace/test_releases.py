"""Events that release what an allocator caches (`op` 2)."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import bfc
from bfc import testing
from bfc.testing import Misbehaving

MIB = 1 << 20


def device(size: str = "1 GiB") -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator(size)


MAKERS: dict[str, Callable[[], bfc.Allocator]] = {
    "bfc": lambda: bfc.BFCAllocator(device()),
    "bfc growing": lambda: bfc.BFCAllocator(device(), allow_growth=True),
    "bfc growing strict": lambda: bfc.BFCAllocator(device(), allow_growth=True, strict=True),
    "bfc virtual memory": lambda: bfc.BFCAllocator(device(), virtual_memory=True),
    "caching": lambda: bfc.CachingAllocator(device()),
    "caching strict": lambda: bfc.CachingAllocator(device(), strict=True),
    "expandable": lambda: bfc.CachingAllocator(device(), settings="expandable_segments:True"),
}


def some() -> bfc.Trace:
    """A block of 20 MiB is freed, and released, while a small one stays."""
    return bfc.Trace([0, 0, 1, 2, 0], [0, 1, 0, 0, 0], [10 * MIB, 100, 0, 0, 30 * MIB])


def call_one_by_one(trace: bfc.Trace, allocator: bfc.Allocator) -> list[int]:
    live: dict[int, int] = {}
    addresses = []
    rows = (trace.op, trace.id, trace.size, trace.stream)
    for op, number, size, stream in zip(*(row.tolist() for row in rows), strict=True):
        made = 0
        if op == 0:
            try:
                made = live[number] = allocator.allocate_raw(size, stream)
            except bfc.OutOfMemoryError:
                live[number] = 0
        elif op == 1:
            allocator.deallocate_raw(live.pop(number))
        else:
            allocator.release_free_regions()
        addresses.append(made)
    return addresses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_a_replay_with_releases_equals_the_same_calls(name: str, data: st.DataObject):
    has_lanes = "bfc" not in name or "virtual" in name
    streams = data.draw(st.integers(1, 2)) if has_lanes else 1
    trace = data.draw(testing.traces(max_events=40, streams=streams, releases=True))
    with MAKERS[name]() as played, MAKERS[name]() as called:
        result = trace.replay(played)
        assert result.addresses.tolist() == call_one_by_one(trace, called)
        assert played.snapshot() == called.snapshot()
        assert played.sub_allocator.calls == called.sub_allocator.calls
        played.check()


@pytest.mark.long
def test_releases_are_drawn_when_asked_for_and_not_otherwise():
    many = settings(max_examples=200)
    drawn = find(testing.traces(releases=True), lambda trace: 2 in trace.op, settings=many)
    assert drawn.op.tolist() == [2]
    with pytest.raises(NoSuchExample):
        find(testing.traces(max_events=3), lambda trace: 2 in trace.op, settings=many)


def test_a_release_gives_back_what_is_cached_and_lowers_the_peak():
    with_it = some().replay(bfc.CachingAllocator(device()))
    without = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 0], [10 * MIB, 100, 0, 30 * MIB]).replay(
        bfc.CachingAllocator(device())
    )
    assert with_it.peak_bytes_reserved == 32 * MIB
    assert without.peak_bytes_reserved == 42 * MIB
    assert with_it.addresses[3] == 0
    assert with_it.failed == 0
    assert with_it.events == 5


def test_a_trace_of_releases_alone_is_fine():
    trace = bfc.Trace([2, 2], [0, 0], [0, 0])
    assert trace.replay(bfc.BFCAllocator(device())).addresses.tolist() == [0, 0]
    assert trace.replay(bfc.CachingAllocator(device())).peak_bytes_live == 0
    assert trace.closed().op.tolist() == [2, 2]
    assert trace.fullest_event() == 0


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (([2], [1], [0]), "event 0: it releases what is cached, which has no id and no size"),
        (([0, 2], [0, 0], [1, 1]), "event 1: it releases what is cached"),
        (([0, 3], [0, 0], [1, 1]), "event 1: op is 3: 0 allocates, 1 frees, 2 releases"),
    ],
)
def test_a_release_names_no_allocation(columns, fault: str):
    with pytest.raises(bfc.TraceError, match=fault):
        bfc.Trace(*columns)


def test_a_release_is_no_free_of_id_0():
    """Id 0 stands at a release too: neither what is live nor the fullest moment may mind."""
    trace = bfc.Trace([0, 2, 0, 1, 2, 0], [0, 0, 5, 0, 0, 0], [500, 0, 100, 0, 0, 50])
    assert trace.fullest_event() == 2
    closed = trace.closed()
    assert closed.op.tolist() == [0, 2, 0, 1, 2, 0, 1, 1]
    assert closed.id.tolist()[-2:] == [5, 0]
    assert trace[:5].closed().id.tolist()[-1:] == [5]
    pool = bfc.CachingAllocator(device())
    assert closed.replay(pool).peak_bytes_live == 600
    assert pool.stats().bytes_in_use == 0


def test_a_release_with_ids_far_apart_names_none_of_them():
    trace = bfc.Trace([0, 2, 1], [2**32 - 1, 0, 2**32 - 1], [10, 0, 0])
    assert trace.replay(bfc.CachingAllocator(device())).failed == 0
    assert trace.fullest_event() in (0, 1)


def test_releases_survive_a_file_and_a_pickle(tmp_path: Path):
    some().save(tmp_path / "one.npz")
    for back in (bfc.Trace.load(tmp_path / "one.npz"), pickle.loads(pickle.dumps(some()))):
        assert back.op.tolist() == [0, 0, 1, 2, 0]
        assert back.replay(bfc.CachingAllocator(device())).peak_bytes_reserved == 32 * MIB


def test_a_device_that_fails_at_a_release_frees_what_the_replay_had():
    source = Misbehaving("1 GiB")
    source.on("free", raises=OSError("the driver went away"))
    pool = bfc.CachingAllocator(source)
    with pytest.raises(bfc.SubAllocatorError, match="the driver went away"):
        some().replay(pool)
    assert pool.stats().bytes_in_use == 0
    source.off()
    pool.release_free_regions()
    assert source.live_bytes == 0
    pool.check()


def test_a_ctrl_c_during_a_release_ends_the_replay():
    source = Misbehaving("1 GiB")
    source.on("free", 1, first=lambda: signal.raise_signal(signal.SIGINT))
    pool = bfc.CachingAllocator(source)
    with pytest.raises(KeyboardInterrupt):
        some().replay(pool)
    assert pool.stats().bytes_in_use == 0
    pool.check()


def test_an_allocator_that_is_closed_by_a_release_plays_no_more():
    source = Misbehaving("1 GiB")
    pool = bfc.CachingAllocator(source)
    source.on("free", 1, then=pool.close)
    with pytest.raises(bfc.ClosedError):
        some().replay(pool)
    with pytest.raises(bfc.ClosedError):
        bfc.Trace([2], [0], [0]).replay(pool)


def test_releases_among_many_live_blocks():
    """So many that the loop looks ahead to what later events free."""
    count = 60_000
    op = np.r_[np.zeros(count), np.tile([1, 2], count // 20), np.zeros(10)].astype(np.uint8)
    ids = np.r_[np.arange(count), np.ravel([[i, 0] for i in range(count // 20)]), range(10)]
    size = np.where(op == 0, 2 * MIB + 512, 0)
    pool = bfc.CachingAllocator(device("2 TiB"))
    result = bfc.Trace(op, ids, size).replay(pool)
    assert result.failed == 0
    assert not result.addresses[op != 0].any()
    pool.check()


def test_a_release_waits_for_streams_that_use_what_was_freed():
    source = device()
    pool = bfc.BFCAllocator(source, allow_growth=True)
    trace = bfc.Trace([0, 1, 2], [0, 0, 0], [MIB, 0, 0], stream=[7, 7, 0])
    trace.replay(pool)
    assert source.live_bytes == 0
