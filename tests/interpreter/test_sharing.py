"""Four threads do the same with objects that they share, one kind of use at a time: what the table
of what-is-safe.md allows. `make tsan-freethreaded` runs this under ThreadSanitizer, where nothing
else of the same pool could hide a race by the locks that it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from faulty_sources import on_threads
from soak_native import MAPPED, POLICIES
from soak_turns import iterate, recorded

import bfc

TIMES = 100
HOST, DEVICE = bfc.HostSubAllocator, bfc.SimulatedSubAllocator

#: What one thread does, by its number, with what all of them share.
Use = Callable[[int], None]


def blocks(pool: Any) -> Use:
    """Each frees what another has allocated."""
    handed: deque[int] = deque()

    def use(number: int) -> None:
        handed.append(pool.allocate_raw(1000 * (number + 1)))
        pool.deallocate_raw(handed.popleft())

    return use


def buffers(pool: Any) -> Use:
    """Each Buffer is freed by several threads, and dropped by the last one."""
    handed: deque[bfc.Buffer] = deque()

    def use(number: int) -> None:
        handed.extend([pool.allocate(1000)] * 2)
        taken = handed.popleft()
        assert taken.nbytes == 1000
        if number:
            taken.free()
            assert taken.freed
        del taken
        handed.popleft()

    return use


def views(pool: Any) -> Use:
    """Who has a view keeps the memory, whoever else lets theirs go."""
    buffer = pool.allocate(4096)
    buffer.from_host(np.arange(1024, dtype=np.int32))
    view = buffer.view("i4")
    makers: list[Callable[[], Any]] = [
        lambda: np.asarray(view),
        lambda: np.from_dlpack(view),
        lambda: memoryview(buffer).cast("i"),
        lambda: view.to_host(),
    ]

    def use(number: int) -> None:
        array = makers[number]()
        assert array[1023] == 1023
        if number < 3:
            with pytest.raises(BufferError):
                buffer.free()

    return use


def copies(pool: Any) -> Use:
    """All copy from one buffer, each to one of its own."""
    wanted = np.arange(5000, dtype=np.uint16)
    source = pool.allocate(wanted.nbytes).from_host(wanted)

    def use(number: int) -> None:
        own = pool.allocate(source.nbytes)
        bfc.copy(own, source)
        assert (own.to_host().view(np.uint16) == wanted).all()

    return use


def snapshots(pool: Any) -> Use:
    """Two look at what two others change, with a history that is bounded."""
    pool.record_history(max_entries=50)

    def use(number: int) -> None:
        if number < 2:
            pool.allocate(70_000 * (number + 1)).free()
            return
        snapshot = pool.snapshot()
        for region in snapshot.regions:
            assert sum(chunk.size for chunk in region.chunks) == region.size
        assert len(pool.history()) <= 50
        assert pool.stats().bytes_in_use >= 0

    return use


def traces(pool: Any) -> Use:
    """A trace is replayed by two at once, on a pool that others use."""
    trace = bfc.Trace([0, 0, 1, 2, 0], [0, 1, 0, 0, 2], [3 << 20, 1000, 0, 0, 5 << 20]).closed()

    def use(number: int) -> None:
        if number < 2:
            run = trace.replay(pool)
            assert (run.failed, run.events) == (0, len(trace))
        else:
            pool.allocate(1000).free()
            assert trace.peak_bytes_live() == (5 << 20) + 1000

    return use


def streams(pool: Any) -> Use:
    """Streams of all threads are recorded for one buffer, and for those of each."""
    shared = pool.allocate(2000)

    def use(number: int) -> None:
        pool.record_stream(shared, number + 1)
        own = pool.allocate(2000)
        pool.record_stream(own, number + 1)
        with bfc.use_stream(number + 1):
            pool.allocate(1000).free()
        own.free()

    return use


def owners(pool: Any) -> Use:
    """One scope is entered by all, and within it each has one of its own."""
    shared = bfc.owner("shared")

    def use(number: int) -> None:
        with shared, bfc.owner(f"of {number}") if number % 2 else shared:
            kept = pool.allocate(1000)
            found = [chunk.owner for chunk in pool.snapshot().chunks() if chunk.ptr == kept.ptr]
        assert found == [f"of {number}" if number % 2 else "shared"]
        kept.free()

    return use


def tags(pool: Any) -> Use:
    """Two enter the same scope of a tag, two have tags of their own."""
    shared = pool.tag("shared")

    def use(number: int) -> None:
        with shared if number < 2 else pool.tag(f"tag {number}"):
            kept = pool.allocate(1000)
        assert pool.tag_stats()
        kept.free()

    return use


def sleep(pool: Any) -> Use:
    """Each thread's tag sleeps, and comes back as it was."""

    def use(number: int) -> None:
        with pool.tag(f"tag {number}"):
            own = pool.allocate(5000)
        wanted = np.full(5000, number, np.uint8)
        own.from_host(wanted)
        pool.sleep(keep={f"tag {number}": "host"})
        pool.wake(f"tag {number}")
        assert (own.to_host() == wanted).all()
        own.free()

    return use


def plans(pool: Any) -> Use:
    """A plan serves the steps of one thread at a time. The others are served beside it."""
    plan, _ = recorded(pool)
    pool.use_plan(plan, gate=None)

    def use(number: int) -> None:
        with suppress(RuntimeError), pool.step("train"):
            iterate(pool)
        assert pool.plan_stats()["hits"] >= 0

    return use


def captures(pool: Any) -> Use:
    """Each thread captures a stream of its own."""

    def use(number: int) -> None:
        with pool.capture(number + 1) as graph:
            kept = pool.allocate(1000, stream=number + 1)
        kept.free()
        graph.release()

    return use


#: Each with the kind of memory that it needs, and the policies that have it.
USES: dict[Callable[[Any], Use], tuple[Any, tuple[str, ...]]] = {
    blocks: (HOST, tuple(POLICIES)),
    buffers: (HOST, tuple(POLICIES)),
    views: (HOST, ("caching", "pages")),
    copies: (HOST, ("caching", "pages")),
    snapshots: (HOST, tuple(POLICIES)),
    traces: (DEVICE, tuple(POLICIES)),
    streams: (DEVICE, tuple(POLICIES)),
    owners: (HOST, tuple(POLICIES)),
    tags: (HOST, MAPPED),
    sleep: (HOST, MAPPED),
    plans: (DEVICE, ("bfc", "caching", "stitching")),
    captures: (DEVICE, ("bfc", "caching")),
}


@pytest.mark.parametrize(
    ("prepare", "policy"),
    [
        pytest.param(prepare, policy, id=f"{prepare.__name__} {policy}")
        for prepare, (_, policies) in USES.items()
        for policy in policies
    ],
)
def test_four_threads_share(prepare: Callable[[Any], Use], policy: str) -> None:
    with POLICIES[policy](USES[prepare][0]("512 MiB")) as pool:
        play(prepare(pool))
        pool.release_free_regions()
        pool.check()
        assert pool.stats().bytes_in_use == 0


def play(use: Use) -> None:
    def work(number: int) -> None:
        for _ in range(TIMES):
            use(number)

    on_threads(work)
