"""The corner cases of PyTorch's caching policy by number: rows 54 to 61 and 70 to 82.

As in `test_pytorch_behaviour.py`; that and `test_differences_from_pytorch.py` have the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch_corners import (
    EVERYONE,
    GIB,
    KIB,
    MIB,
    OTHER,
    POOL,
    SECOND_POOL,
    SIDE,
    Start,
    actions,
    cache,
    check_sums,
    costs,
    drop,
    failed,
    free_after,
    layout,
    of_2_11,
    original,
    original_of_2_11,
    pending,
    pool_with,
    pools,
    release,
    reserved,
    scope,
    started,
    take,
)

from bench.peers.torch import STATS


@pytest.fixture(params=EVERYONE)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    yield from started(request.param)


# -- 7.4 private pools ----------------------------------------------------------------------------


def test_row_54_pools_do_not_share(start):
    subject = start()
    (inside,) = pool_with(subject, 30 * MIB)
    assert take(subject, 30 * MIB) != inside
    assert pools(subject) == [POOL, (0, 0)]
    assert [segment["address"] for segment in subject.snapshot(POOL)] == [inside]


def test_row_55_a_released_pool_keeps_what_is_cached(start):
    subject = start()
    scope(subject)
    live = take(subject, 30 * MIB)
    subject.end_pool(POOL)
    drop(subject)
    release(subject, live)
    assert reserved(subject) == 30 * MIB
    subject.empty_cache()
    assert reserved(subject) == 0


def test_row_55_until_somebody_needs_it(start):
    subject = start(capacity=100 * MIB)
    pool_with(subject, 60 * MIB)
    drop(subject)
    take(subject, 70 * MIB)
    assert costs(subject, retries=1, waits=1)


def test_row_56_a_pool_in_use_is_not_emptied(start):
    subject = start()
    pool_with(subject, 30 * MIB, pool=SECOND_POOL)
    drop(subject, SECOND_POOL)
    scope(subject)
    cache(subject, 40 * MIB)
    subject.empty_cache()
    assert pools(subject) == [POOL]


@of_2_11
def test_row_56_nor_are_the_default_ones_inside_a_scope(start):
    subject = start()
    cache(subject, 30 * MIB)
    scope(subject)
    subject.empty_cache()
    assert pools(subject) == [(0, 0)]


def test_row_56b_emptying_by_id(start):
    subject = start()
    pool_with(subject, 30 * MIB)
    cache(subject, 40 * MIB)
    subject.begin_pool(POOL)
    assert subject.empty_cache(POOL) is None
    subject.end_pool(POOL)
    assert subject.empty_cache(POOL) is None
    assert subject.empty_cache((0, 9)) is None
    assert (pools(subject), costs(subject)) == ([POOL, (0, 0)], True)
    assert subject.release_pool(POOL) is None  # the second scope's reference
    drop(subject)
    assert subject.empty_cache(POOL) is None
    assert (pools(subject), costs(subject, waits=1)) == ([(0, 0)], True)


def test_row_56b_waits_for_that_pool_alone(start):
    subject = start()
    for stream in (SIDE, OTHER):
        subject.hold(stream)
    scope(subject)
    inside = take(subject, 30 * MIB)
    subject.end_pool(POOL)
    free_after(subject, inside, SIDE)
    free_after(subject, take(subject, 40 * MIB), OTHER)
    drop(subject)
    assert subject.empty_cache(POOL) is None
    assert (pools(subject), pending(subject)) == ([(0, 0)], 1)
    assert costs(subject, waits=1)


def test_row_56b_leaves_other_pools_alone_that_hold_nothing(start):
    subject = start()
    for pool in (POOL, SECOND_POOL):
        scope(subject, pool)
        assert subject.end_pool(pool) is None
        drop(subject, pool)
    assert subject.empty_cache(POOL) is None
    assert subject.empty_cache(SECOND_POOL) is None  # still there: its streams are waited for
    assert costs(subject, waits=2)


@of_2_11
def test_row_56b_by_id_inside_another_scope(start):
    subject = start()
    pool_with(subject, 30 * MIB)
    drop(subject)
    scope(subject, SECOND_POOL)
    assert failed(subject.empty_cache(POOL), "internal")
    assert costs(subject, waits=1)


def test_row_57_a_scope_is_not_for_other_threads(start):
    subject = start()
    scope(subject, streams="none")
    take(subject, 30 * MIB)
    assert pools(subject) == [(0, 0)]


def test_row_58_the_innermost_scope_wins(start):
    subject = start()
    scope(subject)
    scope(subject, SECOND_POOL)
    take(subject, 30 * MIB)
    subject.end_pool(SECOND_POOL)
    take(subject, 30 * MIB)
    subject.end_pool(POOL)
    take(subject, 30 * MIB)
    assert pools(subject) == [SECOND_POOL, POOL, (0, 0)]


def test_row_59_a_pool_that_does_not_split(start):
    subject = start()
    subject.create_pool(POOL)
    assert subject.set_no_split(POOL) is None
    subject.begin_pool(POOL)
    for nbytes in (4 * MIB, 4 * MIB, 512):
        take(subject, nbytes)
    assert layout(subject) == [[20 * MIB], [20 * MIB], [2 * MIB]]


@of_2_11
def test_row_59_is_remembered_and_may_be_the_default_one(start):
    subject = start()
    subject.set_no_split(POOL)
    pool_with(subject, 4 * MIB)
    drop(subject)
    subject.empty_cache()
    scope(subject)
    take(subject, 4 * MIB)
    subject.end_pool(POOL)
    subject.set_no_split((0, 0))
    take(subject, 4 * MIB)
    assert layout(subject) == [[20 * MIB], [20 * MIB]]


def lending(start: Start, capacity: int = 40, **options: object) -> tuple[Any, int]:
    """A device that a lending pool's free 40 MiB fill."""
    subject = start(capacity=capacity * MIB, **options)
    (block,) = pool_with(subject, 40 * MIB)
    assert subject.set_use_on_oom(POOL) is None
    return subject, block


def test_row_60_a_pool_lends(start):
    subject, block = lending(start)
    assert take(subject, 30 * MIB) == block
    assert layout(subject) == [[30 * MIB, 10 * MIB]]
    assert pools(subject) == [POOL]
    assert costs(subject)
    release(subject, block)
    assert layout(subject) == [[40 * MIB]]


@pytest.mark.parametrize(
    ("nbytes", "stream"), [(30 * MIB, SIDE), (MIB, 0)], ids=["other_stream", "small"]
)
def test_row_60b_what_is_not_lent(start, nbytes, stream):
    subject, _ = lending(start)
    assert failed(subject.malloc(nbytes, stream), "oom")
    assert costs(subject, retries=1, ooms=1, waits=1)


def test_row_60b_nothing_is_lent_to_a_pool(start):
    subject, _ = lending(start)
    scope(subject, SECOND_POOL)
    assert failed(subject.malloc(30 * MIB), "oom")


@original
def test_row_60c_what_is_lent_is_split_by_the_plain_rule(start):
    subject, block = lending(start)
    subject.set_settings("expandable_segments:True")
    assert take(subject, 39 * MIB + 512 * KIB) == block
    assert layout(subject) == [[40 * MIB]]


@original
def test_row_60d_a_lender_in_use_elsewhere(start):
    subject, _ = lending(start)
    subject.begin_pool(POOL, SIDE)
    references = subject.pool_use_count(POOL)
    assert failed(subject.malloc(30 * MIB), "internal")
    assert subject.pool_use_count(POOL) == references + 1


@original_of_2_11
def test_row_61_an_allocator_of_its_own_that_refuses(start):
    subject = start(capacity=50 * MIB)
    subject.create_pool(POOL, own_allocator=True)
    subject.begin_pool(POOL)
    block = take(subject, 4 * MIB)
    assert failed(subject.malloc(40 * MIB), "oom")
    assert subject.calls == [("pool_malloc", 20 * MIB, block), ("pool_malloc", 40 * MIB, None)]


# -- 7.5 rounding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "nbytes", "size"),
    [
        pytest.param("4", 84 * MIB, 96 * MIB, id="row_70"),
        pytest.param("4", 1200, 1536, id="row_71_not_yet"),
        pytest.param("4", 2048, 2048, id="row_71_at_the_bound"),
        pytest.param("4", 2049, 2560, id="row_71_above"),
        pytest.param("8", 4096, 4096, id="row_72_at_the_bound"),
        pytest.param("8", 4097, 4608, id="row_72_above"),
        pytest.param("1", 1200, 1536, id="row_73"),
        pytest.param("[64:8,256:4]", 150 * MIB + 1, 150 * MIB + 512, id="row_74"),
        pytest.param("[64:8,256:2]", 400 * MIB, 512 * MIB, id="row_75"),
        pytest.param("[64:8,256:2]", 3 * MIB + 1, 3 * MIB + 256 * KIB, id="row_76"),
    ],
)
def test_rows_70_to_76_rounding_by_divisions(start, setting, nbytes, size):
    subject = start(settings=f"roundup_power2_divisions:{setting}")
    subject.record_history(True)
    subject.set_memory_fraction(0.0)
    assert failed(subject.malloc(nbytes), "oom")
    # The entry of a failure has the rounded size; a block may be larger than that.
    assert [entry["size"] for entry in subject.trace()] == [size]


# -- 7.6 statistics and the trace -----------------------------------------------------------------


def test_row_77_a_reset_peak_is_what_is_current(start):
    subject = start()
    cache(subject, 30 * MIB)
    take(subject, 8 * MIB)
    subject.reset_peak_stats()
    stats = subject.stats()
    assert stats["allocated_bytes.all.peak"] == 8 * MIB
    for name in STATS:
        if name.endswith(".peak"):
            assert stats[name] == stats[name.replace(".peak", ".current")], name


def test_row_78_what_only_rises_is_reset(start):
    subject = start(capacity=60 * MIB)
    cache(subject, 30 * MIB)
    assert failed(subject.malloc(GIB), "oom")
    take(subject, 8 * MIB)
    before = subject.stats()
    subject.reset_accumulated_stats()
    for name, value in subject.stats().items():
        if name.endswith((".allocated", ".freed")) or name.startswith("num_"):
            assert value == 0, name
        else:
            assert value == before[name], name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", ["", "max_split_size_mb:40,roundup_power2_divisions:4"])
def test_row_79_the_sums_hold_after_every_operation(start, settings):
    rng = random.Random(settings)
    subject = start(settings=settings, capacity=600 * MIB)
    live: list[int] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.4 and live:
            streams = [SIDE] if rng.random() < 0.3 else []
            free_after(subject, live.pop(rng.randrange(len(live))), *streams)
        elif action < 0.5:
            rng.choice([subject.hold, subject.finish])(SIDE)
        elif action < 0.52:
            subject.empty_cache()
        else:
            nbytes = rng.choice([rng.randrange(1, MIB), rng.randrange(MIB, 60 * MIB)])
            address = subject.malloc(nbytes, rng.choice([0, OTHER]))
            live += [address] * isinstance(address, int)
        check_sums(subject.stats(), subject.snapshot())
    assert subject.stats()["active.all.peak"] > 5


def test_row_80_the_trace_is_a_ring(start):
    subject = start()
    subject.record_history(True, 7)
    for nbytes in range(1, 13):  # with the segment, 13 entries
        take(subject, nbytes)
    assert [entry["size"] for entry in subject.trace()] == [6, 7, 8, 9, 10, 11, 12]


def test_row_81_actions_left_out_of_the_trace(start):
    subject = start()
    subject.record_history(True, 100, ["free_requested"])
    cache(subject, 30 * MIB)
    assert actions(subject) == ["segment_alloc", "alloc", "free_completed"]
    assert failed(subject.record_history(True, 100, ["no such"]), "internal")


def test_row_82_a_snapshot_is_seen_in_the_next(start):
    subject = start()
    take(subject, 30 * MIB)
    subject.record_history(True)
    assert subject.trace() == []
    (entry,) = subject.trace()
    assert (entry["action"], entry["addr"], entry["size"]) == ("snapshot", 0, 30 * MIB)
