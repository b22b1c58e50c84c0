"""A recording that began in mid-run: what was live then is rebuilt, and the gaps that this fills
for a moment count nowhere."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_recounts import gaps_of, recount

import bfc
from bfc_tools.browser.data import data_of
from bfc_tools.study.candidates import BFC, CACHING, PAGES, Point, replay

MIB = 1 << 20
RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*.npz"))
POINTS = [
    Point(CACHING, ""),
    Point(CACHING, "max_split_size_mb:64"),
    Point(CACHING, "expandable_segments:True"),
    Point(BFC, ""),
    Point(PAGES, ""),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_way_to_ask_gives_one_peak(path: Path) -> None:
    trace = bfc.Trace.load(path)
    counted = recount(trace)
    peak = max(counted.live)
    assert gaps_of(trace), "the recording has no gaps: it proves nothing"
    assert (trace.peak_bytes_live(), trace.fullest_event()) == (peak, counted.peak)
    assert bfc.diff(trace, trace).peak.total.bytes_a == peak
    found = data_of([("run", trace)], [])
    assert (found["peak_live"], found["peak_event"]) == (peak, counted.peak)
    for point in POINTS:
        assert replay(trace, point, 80 << 30).peak_live == peak


def recorded(pool: bfc.CachingAllocator, live: Iterable[int]) -> bfc.Trace:
    """The history of a pool, as PyTorch would write it. What is live is freed then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.pickle")
        pool.dump(path)
        for ptr in live:
            pool.deallocate_raw(ptr)
        return bfc.Trace.from_torch(path)


class Run:
    """A random history of allocations, of which the end alone is recorded."""

    def __init__(self, seed: int, settings: str = "") -> None:
        self.rng = random.Random(seed)
        self.pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 GiB"), settings=settings)
        self.live: dict[int, int] = {}
        self.bytes = 0

    def step(self) -> None:
        if self.live and self.rng.random() < 0.47:
            ptr = self.rng.choice(list(self.live))
            self.bytes -= self.live.pop(ptr)
            self.pool.deallocate_raw(ptr)
            return
        size = self.rng.choice([500, 3000, 700_000, 3 * MIB, 12 * MIB, 90 * MIB])
        size += self.rng.randrange(400)
        self.live[self.pool.allocate_raw(size)] = size
        self.bytes += size

    def recording(self, before: int, after: int) -> tuple[bfc.Trace, int]:
        """The trace of the last events, and the most bytes that were live in them."""
        for _ in range(before):
            self.step()
        self.pool.record_history()
        most = self.bytes
        for _ in range(after):
            self.step()
            most = max(most, self.bytes)
        return recorded(self.pool, self.live), most


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", ["", "max_split_size_mb:40"])
def test_the_end_of_a_run_has_the_peak_that_it_had(seed: int, settings: str) -> None:
    """The truth is known here: the run was made, and only then cut."""
    print("seed", seed)
    trace, most = Run(seed, settings).recording(150 * seed, 300)
    assert trace.peak_bytes_live() == most
    for point in POINTS:
        assert replay(trace, point, 80 << 30).peak_live == most
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 GiB"), settings=settings) as pool:
        result = trace.replay(pool, samples=100)
    assert result.beginning == ("as recorded" if trace.beginning.events else "")
    assert (result.failed, result.peak_bytes_live) == (0, most)
    assert result.timeline is not None
    assert int(result.timeline.live.max()) == most


def fragmented() -> bfc.Trace:
    """Ten blocks of 40 MiB between gaps of 60 MiB were live, and then three more came and went."""
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB"))
    for segment in [pool.allocate_raw(100 * MIB) for _ in range(10)]:
        pool.deallocate_raw(segment)
    gaps, blocks = [], []
    for _ in range(10):
        gaps.append(pool.allocate_raw(60 * MIB))
        blocks.append(pool.allocate_raw(40 * MIB))
    for gap in gaps:
        pool.deallocate_raw(gap)
    pool.record_history()
    for ptr in [pool.allocate_raw(50 * MIB) for _ in range(3)]:
        pool.deallocate_raw(ptr)
    return recorded(pool, blocks)


@pytest.mark.parametrize("capacity", ["560 MiB", "600 MiB", "999 MiB"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.policy} {point.settings}")
def test_no_gap_is_refused_or_costs_anything(point: Point, capacity: str) -> None:
    """The gaps take 600 MiB. Without them everything fits on what is live, and a little more."""
    trace = fragmented()
    outcome = replay(trace, point, bfc.units.parse_bytes(capacity))
    assert (outcome.refused, outcome.peak_live) == (0, 550 * MIB)
    assert outcome.peak_reserved <= bfc.units.parse_bytes(capacity)


def test_a_replay_says_where_the_beginning_lies() -> None:
    trace = fragmented()
    kinds: list[tuple[Any, str]] = [
        (bfc.CachingAllocator(bfc.SimulatedSubAllocator("2 GiB")), "as recorded"),
        (bfc.CachingAllocator(bfc.SimulatedSubAllocator("999 MiB")), "as placed"),
        (
            bfc.CachingAllocator(bfc.SimulatedSubAllocator("2 GiB"), max_split_size_mb=64),
            "as placed",
        ),
        (bfc.BFCAllocator(bfc.SimulatedSubAllocator("2 GiB")), "as placed"),
    ]
    first = trace.beginning.events
    for pool, beginning in kinds:
        with pool:
            result = trace.replay(pool)
            again = trace.closed().replay(pool)
        assert result.beginning == beginning
        assert again.beginning == "as placed", "the pool was not empty any more"
        gaps = np.array([event in gaps_of(trace) for event in range(len(trace))])
        assert (result.addresses[gaps] == 0).all() == (beginning == "as placed")
        assert (result.addresses[:first][~gaps[:first]] > 0).all()
        assert result.skipped == (gaps.sum() if beginning == "as placed" else 0)
    assert (
        bfc.Trace([0], [0], [512])
        .replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator(MIB)))
        .beginning
        == ""
    )


def test_where_the_beginning_lies_can_be_asked_for() -> None:
    trace = fragmented()
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("2 GiB")) as pool:
        assert trace.replay(pool, beginning="as recorded").beginning == "as recorded"
        assert pool.stats().bytes_in_use == 400 * MIB
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("2 GiB")) as pool:
        assert trace.replay(pool, beginning="as placed").peak_bytes_reserved == 550 * MIB
        with pytest.raises(ValueError, match="'as recorded' or 'as placed', not 'so'"):
            trace.replay(pool, beginning="so")
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("600 MiB")) as pool:
        result = trace.replay(pool, beginning="as recorded")
        assert (result.beginning, result.failed) == ("as placed", 0), "there is no room as it lay"


@pytest.mark.parametrize(
    "torch",
    [
        7,
        {"first_recorded_event": "3"},
        {"first_recorded_event": 99},
        {"first_recorded_event": True},
    ],
)
def test_a_meta_of_somebody_else_rebuilds_nothing(torch: Any) -> None:
    trace = bfc.Trace([0, 1, 0], [0, 0, 1], [9 * MIB, 0, MIB], meta={"torch": torch})
    assert (trace.beginning.events, trace.peak_bytes_live()) == (0, 9 * MIB)


def test_sizes_beyond_64_bits_are_exact() -> None:
    trace = bfc.Trace([0, 0, 0], [0, 1, 2], [(1 << 63) - 1] * 3)
    assert trace.peak_bytes_live() == 3 * ((1 << 63) - 1)
