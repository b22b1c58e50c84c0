"""The corner cases of PyTorch's caching policy by number: rows 1 to 53.

Each runs on the compiled allocators of PyTorch 2.11 and 2.15, on the model of them that the random
tests use, and on ours in strict mode. `test_pytorch_versions.py` has the rows of 2.15 that differ.
`test_pytorch_behaviour_of_pools.py` has the further rows, and
`test_differences_from_pytorch.py` those where ours does otherwise on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch_corners import (
    BASE,
    EVERYONE,
    GIB,
    KIB,
    MIB,
    OTHER,
    POOL,
    SIDE,
    Start,
    actions,
    cache,
    costs,
    current,
    failed,
    free_after,
    layout,
    of_2_11,
    original,
    original_of_2_11,
    pending,
    polled,
    pool_with,
    recorded,
    refused_at_start,
    release,
    reserved,
    scope,
    sizes_of,
    started,
    states,
    take,
    upstream_of_2_11,
)


@pytest.fixture(params=EVERYONE)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    yield from started(request.param)


# -- 7.1 sizes and splitting ----------------------------------------------------------------------


def test_row_1_no_bytes_are_no_allocation(start):
    subject = start()
    subject.record_history(True)
    before = subject.stats()
    assert subject.malloc(0) == 0
    assert subject.allocate(0) == 0
    assert subject.stats() == before
    assert subject.trace() == []
    assert subject.calls == []


def test_row_2_one_byte_takes_a_small_segment(start):
    subject = start()
    assert take(subject, 1) == BASE
    assert current(subject, "allocated_bytes", "requested_bytes", "segment") == [512, 1, 1]
    assert current(subject, "inactive_split", "inactive_split_bytes") == [1, 2096640]
    assert subject.stats()["reserved_bytes.small_pool.current"] == 2 * MIB


def test_row_3_small_blocks_stand_side_by_side(start):
    subject = start()
    assert (take(subject, 512), take(subject, 513)) == (BASE, BASE + 512)
    assert layout(subject) == [[512, 1024, 2 * MIB - 1536]]


def test_row_4_two_mebibytes_fill_a_small_segment(start):
    subject = start()
    assert (take(subject, MIB), take(subject, MIB)) == (BASE, BASE + MIB)
    assert current(subject, "segment", "inactive_split") == [1, 0]
    assert layout(subject) == [[MIB, MIB]]


@pytest.mark.parametrize(
    ("nbytes", "blocks"),
    [
        pytest.param(1048065, [MIB, MIB], id="row_5"),
        pytest.param(MIB + 1, [1049088, 19922432], id="row_6"),
        pytest.param(10 * MIB - 512, [10485248, 10486272], id="row_7"),
        pytest.param(10 * MIB - 511, [10 * MIB], id="row_8_lowest"),
        pytest.param(10 * MIB - 1, [10 * MIB], id="row_8_between"),
        pytest.param(10 * MIB, [10 * MIB], id="row_8_highest"),
        pytest.param(10 * MIB + 1, [10486272, 2096640], id="row_9"),
        pytest.param(11 * MIB, [12 * MIB], id="row_10"),
        pytest.param(11 * MIB - 512, [11533824, 1049088], id="row_11"),
        pytest.param(19 * MIB, [20 * MIB], id="row_12"),
    ],
)
def test_rows_5_to_12_a_request_is_rounded_placed_and_split(start, nbytes, blocks):
    subject = start()
    assert take(subject, nbytes) == BASE
    assert layout(subject) == [blocks]
    assert current(subject, "allocated_bytes", "requested_bytes") == [blocks[0], nbytes]
    assert current(subject, "segment", "inactive_split") == [1, len(blocks) - 1]
    kind = "small" if nbytes < MIB else "large"
    assert [segment["segment_type"] for segment in subject.snapshot()] == [kind]


def test_row_13_a_last_piece_of_512_bytes_is_split_off(start):
    subject = start()
    for nbytes in (512 * KIB, 512 * KIB, 512 * KIB, 512 * KIB - 512):
        take(subject, nbytes)
    assert layout(subject) == [[512 * KIB] * 3 + [512 * KIB - 512, 512]]


def test_row_14_the_best_fit_wins(start):
    subject = start()
    a, b = take(subject, 24 * MIB), take(subject, 30 * MIB)
    release(subject, b, a)
    assert take(subject, 23 * MIB) == a
    assert layout(subject)[0] == [24 * MIB]


def test_row_15_the_caller_gets_the_low_part(start):
    subject = start()
    assert (take(subject, 4 * MIB), take(subject, 4 * MIB)) == (BASE, BASE + 4 * MIB)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_row_16_neighbours_merge_in_any_order(start, order):
    subject = start()
    blocks = [take(subject, 4 * MIB) for _ in range(3)]
    release(subject, *(blocks[number] for number in order))
    assert layout(subject) == [[20 * MIB]]
    assert current(subject, "segment", "inactive_split", "inactive_split_bytes") == [1, 0, 0]


def test_row_17_a_hole_is_used_again(start):
    subject = start()
    blocks = [take(subject, 4 * MIB) for _ in range(3)]
    release(subject, blocks[1])
    assert current(subject, "inactive_split") == [2]
    assert take(subject, 4 * MIB) == blocks[1]


def equal_holes(subject: Any) -> tuple[int, int]:
    """One hole of 4 MiB in each of two segments that are full otherwise."""
    blocks = [take(subject, 4 * MIB) for _ in range(10)]
    release(subject, blocks[7], blocks[2])
    return blocks[2], blocks[7]


@original_of_2_11
@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
def test_row_18_of_equal_sizes_the_lower_address_wins(start, private):
    subject = start(addresses=[BASE + GIB, BASE])
    if private:
        scope(subject)
    older, newer = equal_holes(subject)
    assert newer < older
    assert take(subject, 4 * MIB) == newer


@original_of_2_11
def test_row_18_with_an_allocator_of_its_own(start):
    subject = start(addresses=[BASE + GIB, BASE])
    subject.create_pool(POOL, own_allocator=True)
    subject.begin_pool(POOL)
    older, newer = equal_holes(subject)
    assert newer < older
    assert take(subject, 4 * MIB) == newer


def test_row_19_streams_do_not_share(start):
    subject = start()
    (first,) = cache(subject, 4 * MIB, stream=SIDE)
    assert take(subject, 4 * MIB, OTHER) != first
    assert current(subject, "segment", "reserved_bytes") == [2, 40 * MIB]


def test_row_20_far_too_much(start):
    subject = start()
    subject.hold(SIDE)
    free_after(subject, take(subject, 4 * MIB), SIDE)
    before = len(subject.calls)
    assert failed(subject.allocate(1 << 60), "oom")
    assert costs(subject)
    assert len(subject.calls) == before  # nothing was polled either


@original
def test_row_20_the_raw_way_asks_the_device(start):
    subject = start()
    assert failed(subject.malloc(1 << 60), "oom")
    assert costs(subject, retries=1, ooms=1, waits=1)
    assert sizes_of(subject, "malloc") == [1 << 60] * 2


def test_row_21_pointers_that_are_none(start):
    subject = start()
    gone, live = take(subject, 4096), take(subject, 4096)
    release(subject, gone)
    before = subject.stats(), subject.snapshot()
    for wrong in (gone, live + 512, live + 1, 12345):
        assert failed(subject.free(wrong), "internal")
    assert (subject.stats(), subject.snapshot()) == before
    release(subject, live, 0)


@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
@pytest.mark.parametrize(
    ("nbytes", "segments"),
    [
        (512, [2]),
        (MIB, [2, 2]),
        (MIB + 512, [20]),
        (10 * MIB - 512, [20, 20]),
        (10 * MIB + 512, [12, 12, 12]),
    ],
)
def test_row_22_the_segments_of_three(start, nbytes, segments, private):
    subject = start()
    if private:
        scope(subject)
    for _ in range(3):
        take(subject, nbytes)
    assert sizes_of(subject, "malloc") == [size * MIB for size in segments]


def test_row_23_a_live_block_holds_its_segment(start):
    subject = start()
    live, freed = take(subject, 512), take(subject, 512)
    release(subject, freed)
    assert subject.empty_cache() is None
    assert current(subject, "segment") == [1]
    assert sizes_of(subject, "free") == []
    release(subject, live)
    subject.empty_cache()
    assert reserved(subject) == subject.live_bytes == 0


@original
def test_row_24_without_caching(start):
    subject = start(environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    subject.record_history(True)
    address = take(subject, 1000)
    free_after(subject, address, SIDE)
    assert subject.calls == [("malloc", 1000, BASE), ("free", 1000, BASE)]
    assert subject.snapshot() == []
    assert actions(subject) == []
    assert set(subject.stats().values()) <= {0, -1}


@original
@pytest.mark.parametrize("value", ["0", "yes", ""])
def test_row_24_only_a_1_disables(start, value):
    subject = start(environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": value})
    take(subject, 1000)
    assert sizes_of(subject, "malloc") == [2 * MIB]


# -- 7.2 streams and events -----------------------------------------------------------------------


def test_rows_25_to_27_a_recorded_block_waits_for_its_event(start):
    subject = start()
    subject.record_history(True)
    subject.hold(SIDE)
    block = take(subject, 4 * MIB)
    free_after(subject, block, SIDE)
    done = ["segment_alloc", "alloc", "free_requested"]
    for _ in range(2):  # row 26: the stream has finished, but nobody looks
        assert current(subject, "allocation", "allocated_bytes") == [0, 0]
        assert current(subject, "active", "active_bytes", "requested_bytes") == [
            1,
            4 * MIB,
            4 * MIB,
        ]
        assert states(subject) == ["active_pending_free", "inactive"]
        assert actions(subject) == done
        subject.finish(SIDE)
    assert polled(subject) == 0
    assert take(subject, 4 * MIB) == block  # row 27
    assert actions(subject) == [*done, "free_completed", "alloc"]


def test_row_27_what_fails_has_polled_too(start):
    subject = start(capacity=100 * MIB)
    subject.hold(SIDE)
    free_after(subject, take(subject, 4 * MIB), SIDE)
    take(subject, 512)
    assert (polled(subject), pending(subject)) == (1, 1)
    subject.finish(SIDE)
    take(subject, 512)
    assert pending(subject) == 0
    subject.hold(SIDE)
    free_after(subject, take(subject, 4 * MIB), SIDE)
    before = polled(subject)
    assert failed(subject.malloc(GIB), "oom")
    assert polled(subject) == before + 1


def test_row_28_a_block_waits_for_no_event_of_its_own_stream(start):
    subject = start()
    subject.hold(SIDE)
    block = take(subject, 4 * MIB, SIDE)
    free_after(subject, block, SIDE)
    assert recorded(subject) == []
    assert take(subject, 4 * MIB, SIDE) == block


def test_row_29_a_stream_recorded_twice_is_one_event(start):
    subject = start()
    subject.hold(SIDE)
    free_after(subject, take(subject, 4 * MIB), SIDE, SIDE)
    assert recorded(subject) == [SIDE]
    assert pending(subject) == 1


def test_row_30_both_streams_must_finish(start):
    subject = start()
    for stream in (SIDE, OTHER):
        subject.hold(stream)
    free_after(subject, take(subject, 4 * MIB), SIDE, OTHER)
    for stream, left in ((SIDE, 1), (OTHER, 0)):
        subject.finish(stream)
        take(subject, 512)
        assert pending(subject) == left


def test_row_31_events_of_a_stream_come_in_order(start):
    subject = start()
    subject.hold(SIDE)
    x, y = take(subject, 4 * MIB), take(subject, 4 * MIB)
    for block in (x, y):
        free_after(subject, block, SIDE)
    take(subject, 512)
    assert (pending(subject), polled(subject)) == (2, 1)  # y's event was not looked at
    subject.finish_events(SIDE, 1)
    assert take(subject, 4 * MIB) == x
    assert pending(subject) == 1


@pytest.mark.parametrize("x_streams", [(SIDE,), (SIDE, OTHER)], ids=["one", "both"])
def test_row_32_streams_do_not_wait_for_each_other(start, x_streams):
    subject = start()
    for stream in (SIDE, OTHER):
        subject.hold(stream)
    x, y = take(subject, 4 * MIB), take(subject, 4 * MIB)
    free_after(subject, x, *x_streams)
    free_after(subject, y, OTHER)
    subject.finish(OTHER)
    assert take(subject, 4 * MIB) == y
    assert pending(subject) == 1


def test_row_33_a_pending_neighbour_is_not_merged(start):
    subject = start()
    a, b = take(subject, 4 * MIB), take(subject, 4 * MIB)
    subject.hold(SIDE)
    free_after(subject, b, SIDE)
    release(subject, a)
    assert layout(subject) == [[4 * MIB, 4 * MIB, 12 * MIB]]
    subject.finish(SIDE)
    take(subject, 512)
    assert layout(subject)[0] == [20 * MIB]


def test_row_33b_emptying_waits(start):
    subject = start()
    subject.hold(SIDE)
    free_after(subject, take(subject, 30 * MIB), SIDE)
    subject.empty_cache()
    assert reserved(subject) == 0
    assert costs(subject, waits=1)
    subject.empty_cache()  # with nothing to wait for
    assert costs(subject, waits=2)


@of_2_11
def test_row_34_a_scope_defers_what_is_recorded_in_it(start):
    subject = start()
    subject.hold(SIDE)
    scope(subject)
    block = take(subject, 30 * MIB)
    free_after(subject, block, SIDE)
    subject.finish(SIDE)
    assert take(subject, 30 * MIB) != block
    assert (recorded(subject), polled(subject)) == ([], 0)


@upstream_of_2_11
def test_row_34b_what_a_scope_deferred_is_forgotten(start):
    subject = start()
    subject.hold(SIDE)
    scope(subject)
    block = take(subject, 30 * MIB)
    free_after(subject, block, SIDE)
    subject.end_pool(POOL)
    take(subject, 512)
    assert recorded(subject) == []
    subject.begin_pool(POOL)
    assert take(subject, 30 * MIB) == block


@of_2_11
def test_row_34b_recorded_or_freed_outside(start):
    subject = start()
    subject.hold(SIDE)
    before, inside = take(subject, 30 * MIB), take(subject, 40 * MIB)
    subject.record_stream(before, SIDE)
    scope(subject)
    subject.record_stream(inside, SIDE)
    release(subject, before)
    subject.end_pool(POOL)
    assert recorded(subject) == []
    take(subject, 512)
    assert recorded(subject) == [SIDE]
    release(subject, inside)
    assert recorded(subject) == [SIDE, SIDE]


@of_2_11
@pytest.mark.parametrize("streams", ["none", OTHER])
def test_row_34c_a_scope_gates_everyone(start, streams):
    subject = start(capacity=100 * MIB)
    cache(subject, 80 * MIB, stream=SIDE)
    scope(subject, streams=streams)
    assert failed(subject.malloc(60 * MIB, 6), "oom")
    assert costs(subject, ooms=1)


# -- 7.3 limits, lack of memory, collection, large blocks ------------------------------------------


def test_row_35_the_limit_may_be_reached(start):
    subject = start(capacity=80 * MIB)
    subject.set_memory_fraction(0.5)
    take(subject, 20 * MIB)
    take(subject, 4 * MIB)
    assert reserved(subject) == 40 * MIB


def test_row_36_the_whole_segment_must_fit_below_the_limit(start):
    subject = start(capacity=2 * (40 * MIB - 1))
    subject.set_memory_fraction(0.5)
    take(subject, 20 * MIB)
    assert failed(subject.malloc(4 * MIB), "oom")


def test_row_37_a_limit_of_nothing(start):
    subject = start()
    subject.set_memory_fraction(0.0)
    assert failed(subject.malloc(1), "oom")
    subject = start()
    (block,) = cache(subject, 512)
    subject.set_memory_fraction(0.0)
    assert take(subject, 1) == block


@of_2_11
def test_row_37b_the_limit_is_truncated(start):
    total = 6 * MIB + 1
    subject = start(capacity=total)
    subject.set_memory_fraction((4 * MIB - 0.4) / total)
    take(subject, MIB)
    take(subject, MIB)
    assert failed(subject.malloc(MIB), "oom")


def test_row_37c_a_fraction_of_one_is_no_limit(start):
    subject = start(capacity=80 * MIB)
    for fraction in (0.5, 1.0):
        assert subject.set_memory_fraction(fraction) is None
        assert subject.memory_fraction() == fraction
        assert failed(subject.malloc(60 * MIB), "oom") == (fraction == 0.5)
    for wrong in (-0.1, 1.1):
        assert failed(subject.set_memory_fraction(wrong), "internal")
    assert subject.memory_fraction() == 1.0


def test_row_38_what_one_failure_costs(start):
    subject = start(capacity=16 * MIB)
    subject.record_history(True)
    answer = subject.malloc(4 * MIB - 100)
    assert failed(answer, "oom")
    assert costs(subject, retries=1, ooms=1, waits=1)
    (entry,) = subject.trace()
    assert (entry["action"], entry["addr"], entry["size"]) == ("oom", 16 * MIB, 4 * MIB)
    assert sizes_of(subject, "malloc") == [20 * MIB] * 2


@original
def test_row_38_the_text_names_the_segment(start):
    assert "20.00 MiB" in start(capacity=16 * MIB).malloc(4 * MIB).text


def test_row_39_another_streams_cache_is_given_up(start):
    subject = start(capacity=100 * MIB)
    cache(subject, 80 * MIB, stream=SIDE)
    take(subject, 60 * MIB, OTHER)
    assert costs(subject, retries=1, waits=1)
    assert sizes_of(subject, "free") == [80 * MIB]


def test_row_40_no_second_search_after_the_wait(start):
    subject = start(capacity=20 * MIB)
    block, _ = take(subject, 8 * MIB), take(subject, 9 * MIB)
    subject.hold(SIDE)
    free_after(subject, block, SIDE)
    assert failed(subject.malloc(8 * MIB), "oom")
    assert take(subject, 8 * MIB) == block


MAX_SPLIT = "max_split_size_mb:32"


def test_row_41_a_large_block_is_kept_for_large_requests(start):
    subject = start(settings=MAX_SPLIT)
    cache(subject, 40 * MIB)
    take(subject, 16 * MIB)
    assert sizes_of(subject, "malloc") == [40 * MIB, 16 * MIB]


def test_row_42_a_large_block_is_not_split(start):
    subject = start(settings=MAX_SPLIT)
    (block,) = cache(subject, 40 * MIB)
    assert take(subject, 32 * MIB) == block
    assert current(subject, "allocated_bytes", "requested_bytes") == [40 * MIB, 32 * MIB]
    assert subject.stats()["oversize_allocations.current"] == 1


@pytest.mark.parametrize(("cached", "reused"), [(84, False), (82, True)])
def test_row_43_a_large_block_must_not_be_much_too_large(start, cached, reused):
    subject = start(settings=MAX_SPLIT)
    (block,) = cache(subject, cached * MIB)
    assert (take(subject, 64 * MIB) == block) == reused


def test_row_44_a_large_block_makes_room(start):
    subject = start(settings=MAX_SPLIT, capacity=160 * MIB)
    subject.set_memory_fraction(140 / 160)
    cache(subject, 84 * MIB)
    take(subject, 64 * MIB)
    assert sizes_of(subject, "free") == [84 * MIB]
    assert costs(subject)


def test_row_44b_the_largest_go_first(start):
    subject = start(settings=MAX_SPLIT, capacity=160 * MIB)
    cache(subject, 34 * MIB, 36 * MIB, 38 * MIB, 40 * MIB)
    take(subject, 70 * MIB)
    assert sizes_of(subject, "free") == [40 * MIB, 38 * MIB]
    assert costs(subject)


def test_row_44c_too_little_stays_given_back(start):
    subject = start(settings=MAX_SPLIT, capacity=160 * MIB)
    cache(subject, 34 * MIB, 36 * MIB)
    take(subject, 80 * MIB)
    take(subject, 76 * MIB)
    assert sizes_of(subject, "free") == [36 * MIB, 34 * MIB]
    assert costs(subject, retries=1, waits=1)


def test_row_44d_another_streams_block_is_not_taken_for_it(start):
    subject = start(settings=MAX_SPLIT, capacity=100 * MIB)
    cache(subject, 80 * MIB, stream=SIDE)
    take(subject, 60 * MIB)
    assert costs(subject, retries=1, waits=1)


def test_row_44e_the_smallest_large_block_goes(start):
    subject = start(settings=MAX_SPLIT, capacity=100 * MIB)
    cache(subject, 40 * MIB, 60 * MIB)
    take(subject, 16 * MIB)
    assert sizes_of(subject, "free") == [40 * MIB]
    assert costs(subject)


@pytest.mark.parametrize("key", ["max_split_size_mb", "max_non_split_rounding_mb"])
def test_row_45_the_bound_of_max_split(start, key):
    subject = start()
    for nbytes in (2, 19):
        assert failed(subject.set_settings(f"{key}:{nbytes}"), "value")
        assert refused_at_start(start, f"{key}:{nbytes}")
    assert subject.set_settings(f"{key}:20") is None


def test_row_45b_every_segment_may_be_large(start):
    subject = start(settings="max_split_size_mb:20")
    (block,) = cache(subject, 4 * MIB)
    assert take(subject, 4 * MIB) != block
    assert current(subject, "segment") == [2]


def test_row_45c_a_block_allocated_before_max_split_was_lowered(start):
    subject = start()
    block = take(subject, 40 * MIB)
    assert subject.set_settings(MAX_SPLIT) is None
    release(subject, block)
    assert subject.stats()["oversize_allocations.current"] == -1


def split_before_max_split(subject: Any) -> int:
    """A live block of 40 MiB before a free one of 80 MiB, which has become a large one."""
    cache(subject, 120 * MIB)
    live = take(subject, 40 * MIB)
    assert layout(subject) == [[40 * MIB, 80 * MIB]]
    assert subject.set_settings(MAX_SPLIT) is None
    return live


@original
def test_row_45d_part_of_a_segment_is_offered_to_the_device(start):
    subject = start(capacity=120 * MIB)
    split_before_max_split(subject)
    assert failed(subject.malloc(50 * MIB), "driver")


def collecting(start: Start, capacity: int, fraction: float) -> Any:
    subject = start(capacity=capacity * MIB, settings="garbage_collection_threshold:0.5")
    assert subject.set_memory_fraction(fraction) is None
    return subject


def test_row_46_collection_takes_all_of_an_age(start):
    subject = collecting(start, 400, 120 / 400)
    cache(subject, 40 * MIB, 40 * MIB)
    take(subject, 80 * MIB)
    assert reserved(subject) == 80 * MIB
    assert costs(subject)


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_row_47_without_a_limit_nothing_is_collected(start, fraction):
    subject = start(capacity=400 * MIB, settings="garbage_collection_threshold:0.5")
    if fraction is not None:
        subject.set_memory_fraction(fraction)
    cache(subject, 40 * MIB, 40 * MIB)
    take(subject, 80 * MIB)
    assert reserved(subject) == 160 * MIB


@pytest.mark.parametrize(("second", "left"), [(50, 270), (52, 120)])
def test_row_47b_the_threshold_must_be_passed(start, second, left):
    subject = collecting(start, 600, 0.5)
    cache(subject, 100 * MIB, second * MIB)
    take(subject, 120 * MIB)
    assert reserved(subject) == left * MIB


def test_row_47b_a_small_request_collects_on_every_stream(start):
    subject = collecting(start, 600, 0.5)
    subject.hold(SIDE)
    waiting = take(subject, 50 * MIB)
    first, second = take(subject, 60 * MIB), take(subject, 52 * MIB, OTHER)
    free_after(subject, waiting, SIDE)
    release(subject, first, second)
    take(subject, 1)
    assert sorted(sizes_of(subject, "free")) == [52 * MIB, 60 * MIB]
    assert pending(subject) == 1
    assert costs(subject)


def cached_small(subject: Any) -> None:
    cache(subject, *[MIB] * 62)


def cached_split(subject: Any) -> None:
    cache(subject, 62 * MIB)
    take(subject, 20 * MIB)


def cached_private(subject: Any) -> None:
    pool_with(subject, 62 * MIB)


@pytest.mark.parametrize("fill", [cached_small, cached_split, cached_private])
def test_row_48_what_is_not_collected(start, fill):
    subject = collecting(start, 400, 120 / 400)
    fill(subject)
    take(subject, 50 * MIB, OTHER)
    assert reserved(subject) == 112 * MIB
    assert sizes_of(subject, "free") == []


def test_row_49_the_stat_is_that_of_the_start(start):
    subject = start()
    assert subject.set_settings("max_split_size_mb:40") is None
    assert subject.stats()["max_split_size"] == -1
    assert start(settings="max_split_size_mb:40").stats()["max_split_size"] == 40 * MIB


def test_row_50_new_settings_reset_old_ones(start):
    subject = start()
    subject.set_settings("max_split_size_mb:40")
    (block,) = cache(subject, 40 * MIB)
    assert take(subject, 30 * MIB) != block
    assert subject.set_settings("expandable_segments:False") is None
    assert take(subject, 25 * MIB) == block


RESET = (
    "large_segment_size_mb:32,max_split_size_mb:40,max_non_split_rounding_mb:50,"
    "roundup_power2_divisions:4,garbage_collection_threshold:0.1,per_process_memory_fraction:0.5"
)


def test_row_51_no_text_resets(start):
    subject = start(settings=RESET, capacity=GIB)
    assert subject.set_settings("") is None
    assert subject.memory_fraction() == 0.5
    take(subject, 4 * MIB)
    assert layout(subject) == [[4 * MIB, 28 * MIB]]  # the size of a large segment stays
    (block,) = cache(subject, 84 * MIB)
    assert layout(subject)[1:] == [[84 * MIB]]  # not 96
    take(subject, 200 * MIB)
    assert sizes_of(subject, "free") == []  # nothing was collected
    assert take(subject, 30 * MIB) == block  # nothing is large


def test_row_51_the_rounding_is_that_of_the_segment_size_in_force(start):
    for cached, reused in ((94, True), (96, False)):
        subject = start(settings=RESET)
        subject.set_settings("")
        subject.set_settings("max_split_size_mb:40")
        (block,) = cache(subject, cached * MIB)
        assert (take(subject, 64 * MIB) == block) == reused


@pytest.mark.parametrize(
    "text",
    [
        "no_such_key:1",
        "expandable_segments:true",
        "garbage_collection_threshold:1.0",
        "roundup_power2_divisions:3",
    ],
)
def test_row_52_settings_that_are_refused(start, text):
    assert failed(start().set_settings(text), "value")
    assert refused_at_start(start, text)


@original
def test_row_53_the_first_variable_wins(start):
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:40",
    }
    subject = start(environment=environment)
    assert subject.stats()["max_split_size"] == -1
    take(subject, 84 * MIB)
    assert layout(subject) == [[96 * MIB]]
