"""Blocks far larger than any device: what replays them goes by events, not by bytes."""

from __future__ import annotations

import pytest

import bfc
from bfc_tools.study import candidates
from bfc_tools.study.candidates import Point, replay
from bfc_tools.study.counting import CountedPages, CountedSimulated
from bfc_tools.study.search import DEFAULT, EXPANDABLE
from bfc_tools.study.workers import Replays

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
MAPPING = [EXPANDABLE, *candidates.ours()[:3]]


def one_block(nbytes: int) -> bfc.Trace:
    return bfc.Trace([0, 1], [0, 0], [nbytes, 0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nbytes", [TIB, 8 * TIB, 64 * TIB, 1 << 50])
def test_advice_on_one_block_maps_few_pages(nbytes: int, monkeypatch: pytest.MonkeyPatch):
    replays: list[CountedPages] = []

    class Watched(CountedPages):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            replays.append(self)

    monkeypatch.setattr(candidates, "CountedPages", Watched)
    advice = bfc.advise(one_block(nbytes), "8 GiB", jobs=1)
    assert not advice.fits
    assert "too many" in advice.answer
    assert advice.rows[advice.in_force].smallest_device is not None
    assert "page_size=2MiB" in str(advice.given_up) or nbytes > 64 * TIB  # no addresses for more
    assert max(device._pages_made for device in replays) <= 2 * candidates.MOST_PAGES
    assert len(replays) < 300


def test_a_replay_is_given_up_where_it_maps_too_much():
    trace = one_block(30 * GIB)
    for point in MAPPING:
        assert replay(trace, point, 32 * GIB).completes
        given_up = replay(trace, point, 32 * GIB, most_pages=100)
        assert given_up.given_up
        assert not given_up.completes
    assert replay(trace, DEFAULT, 32 * GIB, most_pages=100).completes


def test_what_is_given_up_is_named_and_has_no_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(candidates, "MOST_PAGES", 300)
    monkeypatch.setattr(replay, "__defaults__", (300,))
    monkeypatch.setattr("bfc_tools.study.workers.MOST_PAGES", 300)
    advice = bfc.advise(one_block(9 * GIB), "8 GiB", jobs=1)
    by_name = {row.name: row for row in advice.rows}
    assert set(advice.given_up) >= {"expandable_segments:True", "caching+stitch"}
    for name in advice.given_up:
        assert name not in by_name or by_name[name].smallest_device is None
    assert "Given up where it maps more than" in str(advice)


def test_nothing_is_given_up_in_this_process_first():
    trace = one_block(3 * TIB)
    with Replays(trace, jobs=1) as replays:
        (outcome,) = replays.run([(EXPANDABLE, 4 * TIB)], here=True)
    assert outcome.completes


@pytest.mark.parametrize("point", MAPPING, ids=lambda point: point.name)
def test_a_device_without_books_counts_as_one_with(point: Point):
    trace = bfc.Trace.load("tests/recordings/rec_magma27_snapshot.npz")
    for capacity in (trace.peak_bytes_live() * 2, trace.peak_bytes_live() - GIB):
        found = []
        for kind in (CountedSimulated, CountedPages):
            device = kind(capacity)
            with point.allocator(device, "2.15") as allocator:
                result = trace.replay(allocator)
                found.append((device.calls_by_kind.copy(), device.live_bytes))
                found[-1] += (result.failed, result.peak_bytes_reserved, allocator.stats())
            assert not device.live_bytes
        assert found[0] == found[1]


def test_addresses_that_no_process_has_are_a_refusal():
    assert replay(one_block(GIB), EXPANDABLE, 1 << 47).refused == 1
