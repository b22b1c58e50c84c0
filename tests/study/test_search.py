"""The search for the settings that fit on least, on made-up outcomes and on recorded runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

import bfc
from bfc.pytorch.settings import CachingSettings
from bfc_tools.study import candidates, search
from bfc_tools.study.candidates import (
    CACHING,
    PAGES,
    Outcome,
    Point,
    caching,
    grid,
    one_key_at_a_time,
)
from bfc_tools.study.search import DEFAULT, GRAIN, Candidate, Search, choose
from bfc_tools.study.workers import Task

MIB, GIB = 1 << 20, 1 << 30

Rule = Callable[[Point, int], bool]


class MadeUp:
    """Replays that complete where a rule says so, and what was asked of them."""

    def __init__(self, completes: Rule, calls: Callable[[Point], int] = lambda point: 10) -> None:
        self.completes = completes
        self.calls = calls
        self.asked: set[Task] = set()

    def run(self, tasks: Sequence[Task]) -> list[Outcome]:
        self.asked |= set(tasks)
        return [
            Outcome(0 if self.completes(point, size) else 3, size, self.calls(point), 100 * MIB)
            for point, size in tasks
        ]


def searched(replays: MadeUp, device: int, live: int = 100 * MIB) -> Search:
    made = Search(replays, device, live)  # type: ignore[arg-type]
    made.search([Point(PAGES, "")])
    return made


def needs(least: dict[str, int], otherwise: int) -> Rule:
    """A point completes from so many bytes on."""
    return lambda point, size: size >= least.get(point.settings, otherwise)


def test_the_smallest_size_is_found_to_the_grain():
    found = searched(MadeUp(needs({"max_split_size_mb:64": 131 * MIB}, 170 * MIB)), 200 * MIB)
    best = choose(found.ranked(), found.device, found.coarse)
    assert best is not None
    assert (best.point.settings, best.high) == ("max_split_size_mb:64", 132 * MIB)
    assert found.candidates[DEFAULT].high == 170 * MIB


def test_a_pair_is_found_that_no_single_value_leads_to():
    pair = "max_split_size_mb:21,roundup_power2_divisions:4"
    least = {
        "max_split_size_mb:21": 150 * MIB,
        "roundup_power2_divisions:4": 160 * MIB,
        pair: 110 * MIB,
        pair + ",large_segment_size_mb:12": 104 * MIB,
    }
    found = searched(MadeUp(needs(least, 180 * MIB)), 170 * MIB)
    best = found.ranked()[0]
    assert best.point.settings == pair + ",large_segment_size_mb:12"
    assert best.high == 104 * MIB


@pytest.mark.parametrize(("size", "is_near"), [(1510, True), (1530, False)])
def test_of_equally_plain_settings_calls_decide_within_one_percent(
    size: int, is_near: bool
) -> None:
    fast, slow = "large_segment_size_mb:64", "max_split_size_mb:64"
    least = {slow: 1500 * MIB, fast: size * MIB}
    made = MadeUp(needs(least, 1800 * MIB), lambda point: 3 if point.settings == fast else 10)
    found = searched(made, 1700 * MIB, 1000 * MIB)
    assert found.ranked()[0].high == 1500 * MIB
    best = choose(found.ranked(), found.device, found.coarse)
    assert best is not None
    assert best.point.settings == (fast if is_near else slow)
    assert best.high == (size if is_near else 1500) * MIB


def test_settings_are_combined_only_where_that_can_help():
    fits, cannot = MadeUp(needs({}, 100 * MIB)), MadeUp(needs({}, 300 * MIB))
    searched(fits, 200 * MIB)
    searched(cannot, 200 * MIB, live=250 * MIB)
    for replays, most in ((fits, 1), (cannot, 0)):
        keys = {point.settings.count(":") for point, _ in replays.asked if point.is_pytorch}
        with_a_limit = 1  # a threshold is tried with a limit
        assert max(keys) <= most + with_a_limit
    assert {point.settings for point, _ in cannot.asked if point.is_pytorch} == {
        "",
        "expandable_segments:True",
    }


def test_what_fits_nowhere_is_searched_on_larger_devices():
    found = searched(MadeUp(needs({}, 300 * MIB)), 128 * MIB)
    assert choose(found.ranked(), found.device, found.coarse) is None
    assert found.candidates[DEFAULT].high == 300 * MIB
    assert found.ranked(is_pytorch=False)[0].high == 300 * MIB


@pytest.mark.parametrize("seed", range(30))
def test_only_sizes_that_were_replayed_are_named(seed: int) -> None:
    """Where completing is not monotone in the size, the more so."""
    dice = random.Random(seed)
    threshold = dice.randrange(101, 190) * MIB
    whims = {size for size in range(0, 400, 2) if dice.random() < 0.2}

    def completes(point: Point, size: int) -> bool:
        return size >= threshold and (size // MIB // 2 * 2) not in whims

    replays = MadeUp(completes)
    found = searched(replays, 200 * MIB)
    for candidate in found.candidates.values():
        if candidate.high is not None:
            assert (candidate.point, candidate.high) in replays.asked
            assert completes(candidate.point, candidate.high)
        for size in candidate.refused_above:
            assert candidate.high is not None
            assert size > candidate.high
            assert (candidate.point, size) in replays.asked
            assert not completes(candidate.point, size)


def test_a_size_above_that_refuses_again_is_noted():
    odd = 150 * MIB
    found = searched(MadeUp(lambda point, size: size >= 148 * MIB and size != odd), 200 * MIB)
    best = found.ranked()[0]
    assert (best.high, best.refused_above) == (148 * MIB, [150 * MIB])


def test_a_size_below_that_completes_again_is_found():
    island = 144 * MIB
    found = searched(MadeUp(lambda point, size: size >= 150 * MIB or size == island), 200 * MIB)
    assert found.ranked()[0].high == island


def test_among_sizes_that_are_near_the_fewest_calls_are_best():
    def row(settings: str, mib: int, calls: int) -> Candidate:
        outcome = Outcome(0, mib * MIB, calls, 100 * MIB)
        return Candidate(Point(CACHING, settings), outcome, mib * MIB - GRAIN, mib * MIB)

    few = row("few calls", 1010, 5)
    listed = [row("least", 1000, 50), few, row("far", 1012, 1)]
    assert choose(listed, GIB, GRAIN) is few
    assert choose([*listed, row("as few, smaller", 1004, 5)], GIB, GRAIN) is not few
    few.outcome = Outcome(1, 0, 5, 0)  # does not complete on the device
    best = choose(listed, GIB, GRAIN)
    assert best is not None
    assert best.point.settings == "least"
    assert choose([], GIB, GRAIN) is None


def test_nothing_is_tried_that_pytorch_refuses():
    listed = [point for key in one_key_at_a_time().values() for point in map(caching, key)]
    every = [*listed, *grid()]
    assert len(every) > 1000
    for point in every:
        assert point is not None
        CachingSettings().apply(point.settings)
    # Refused by PyTorch: a large block below a large segment.
    assert caching({"max_split_size_mb": "32", "large_segment_size_mb": "64"}) is None
    # Without effect: this key alone.
    assert caching({"max_non_split_rounding_mb": "64"}) is None


def test_a_threshold_is_tried_with_a_limit_without_which_pytorch_collects_nothing():
    point = caching({"garbage_collection_threshold": "0.6"})
    assert point is not None
    assert point.settings == "garbage_collection_threshold:0.6,per_process_memory_fraction:0.99"
    # 80 of 130 MiB are reserved when 41 are asked for, and 40 of them are free.
    trace = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [40 * MIB, 40 * MIB, 0, 41 * MIB])
    alone = candidates.replay(trace, Point(CACHING, "garbage_collection_threshold:0.6"), 130 * MIB)
    assert alone == candidates.replay(trace, DEFAULT, 130 * MIB)
    assert (alone.peak_reserved, alone.driver_calls) == (122 * MIB, 3)
    collected = candidates.replay(trace, point, 130 * MIB)
    assert (collected.peak_reserved, collected.driver_calls) == (82 * MIB, 4)


def test_every_policy_of_ours_can_be_replayed():
    trace = bfc.Trace([0], [0], [5 * MIB])
    for point in candidates.ours():
        outcome = candidates.replay(trace, point, 64 * MIB)
        assert (outcome.completes, outcome.peak_live) == (True, 5 * MIB)
        assert outcome.driver_calls >= 1
    assert len({point.policy for point in candidates.ours()}) >= 2


def test_where_a_run_reserves_less_the_search_goes_there_at_once():
    """It asked for no more, so on a device of that size nothing is refused either."""
    candidate = Candidate(DEFAULT, Outcome(0, 0, 0, 0), 100 * MIB)
    candidate.note(900 * MIB, Outcome(0, 301 * MIB, 1, 0))
    assert candidate.next_size(float("inf")) == 302 * MIB
    assert search.GRAIN == 2 * MIB
