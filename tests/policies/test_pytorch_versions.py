"""Where PyTorch 2.15 differs from 2.11, by the numbers of docs/behaviour/pytorch.md (such as V-1).

Each case runs on PyTorch 2.15's compiled allocator, on the model of it that the random tests use,
and on ours in strict mode. `test_pytorch_behaviour.py` has what holds of 2.11 in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch_corners import (
    KIB,
    MIB,
    OTHER,
    POOL,
    SECOND_POOL,
    SIDE,
    Start,
    cache,
    costs,
    counters,
    drop,
    failed,
    free_after,
    layout,
    of_2_11,
    of_2_15,
    original_of_2_15,
    pending,
    polled,
    pool_with,
    pools,
    recorded,
    release,
    reserved,
    scope,
    sizes_of,
    started,
    take,
    upstream_of_2_15,
)

import bfc


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    yield from started(request.param)


# -- V-1 the order of free blocks ------------------------------------------------------------------


def two_segments(subject: Any, nbytes: int) -> tuple[int, int]:
    """Two free segments: the older one, and the newer one below it."""
    older, newer = cache(subject, nbytes, nbytes)
    assert newer < older
    return older, newer


@of_2_11
def test_v_1_in_2_11_the_lower_address_wins(start):
    subject = start(placement="fall")
    _, newer = two_segments(subject, 12 * MIB)
    assert take(subject, 12 * MIB) == newer


@of_2_15
@pytest.mark.parametrize("private", [False, True], ids=["V-1", "V-1b"])
def test_v_1_the_older_segment_wins(start, private):
    subject = start(placement="fall")
    if private:
        scope(subject)
    older, newer = two_segments(subject, 12 * MIB)
    assert [take(subject, 12 * MIB), take(subject, 12 * MIB)] == [older, newer]


@original_of_2_15
def test_v_1c_in_a_pool_with_an_allocator_of_its_own(start):
    subject = start(placement="fall")
    subject.create_pool(POOL, own_allocator=True)
    subject.begin_pool(POOL)
    older, _ = two_segments(subject, 12 * MIB)
    assert take(subject, 12 * MIB) == older


@of_2_15
@pytest.mark.parametrize(
    ("nbytes", "count", "freed"),
    [(4 * MIB, 5, (3, 6)), (512 * KIB, 4, (3, 5))],
    ids=["V-1d", "V-1f"],
)
def test_v_1d_pieces_have_the_age_of_their_segment(start, nbytes, count, freed):
    subject = start(placement="fall")
    blocks = [take(subject, nbytes) for _ in range(2 * count)]
    release(subject, *(blocks[number] for number in freed))
    assert [take(subject, nbytes), take(subject, nbytes)] == [blocks[number] for number in freed]


@of_2_15
def test_v_1e_within_a_segment_the_lower_address_wins(start):
    subject = start(placement="fall")
    blocks = [take(subject, 4 * MIB) for _ in range(4)]
    release(subject, blocks[1])
    assert take(subject, 4 * MIB) == blocks[1]


@of_2_15
def test_v_1h_an_older_segment_wins_over_a_range_below_it(start):
    subject = start(reserve_base=1 << 36)
    plain = [take(subject, 4 * MIB) for _ in range(5)]
    subject.set_settings("expandable_segments:True")
    mapped = [take(subject, 4 * MIB) for _ in range(5)]
    release(subject, plain[1], mapped[1])
    assert mapped[1] < plain[1]
    assert [take(subject, 4 * MIB), take(subject, 4 * MIB)] == [plain[1], mapped[1]]


@of_2_15
def test_v_1j_the_older_segment_goes_first(start):
    subject = start(placement="fall")
    older, newer = two_segments(subject, 12 * MIB)
    subject.empty_cache()
    assert [call[2] for call in subject.calls if call[0] == "free"] == [older, newer]


@of_2_15
@pytest.mark.parametrize(
    ("capacity", "nbytes", "gone"),
    [(90, 16, ["older"]), (100, 64, ["newer", "older"])],
    ids=["V-1k", "V-1l"],
)
def test_v_1k_oversize_segments_go_by_age(start, capacity, nbytes, gone):
    subject = start(placement="fall", capacity=capacity * MIB, settings="max_split_size_mb:20")
    older, newer = two_segments(subject, 40 * MIB)
    take(subject, nbytes * MIB)
    names = {older: "older", newer: "newer"}
    assert [names[call[2]] for call in subject.calls if call[0] == "free"] == gone


@of_2_15
def test_v_1_an_address_that_comes_again_is_that_of_the_youngest(start):
    """The order is kept while segments go, come back below others, and are split."""
    subject = start(placement="reuse")
    first, second, third = (take(subject, 20 * MIB) for _ in range(3))
    release(subject, first)
    subject.empty_cache()
    again = [take(subject, 4 * MIB) for _ in range(5)]
    assert again[0] == first
    release(subject, second, third)
    pieces = [take(subject, 4 * MIB) for _ in range(10)]
    assert pieces[0] == second
    release(subject, again[2], pieces[7], pieces[1])
    assert [take(subject, 4 * MIB) for _ in range(3)] == [pieces[1], pieces[7], again[2]]


# -- V-2 scopes are no captures --------------------------------------------------------------------


@of_2_15
def test_v_2_a_scope_polls_events(start):
    subject = start()
    subject.hold(SIDE)
    scope(subject)
    block = take(subject, 12 * MIB)
    free_after(subject, block, SIDE)
    subject.finish(SIDE)
    assert take(subject, 12 * MIB) == block
    assert recorded(subject) == [SIDE]
    assert polled(subject) > 0


@of_2_15
def test_v_2b_what_was_freed_in_a_scope_is_not_forgotten(start):
    subject = start()
    subject.hold(SIDE)
    block = take(subject, 12 * MIB)
    scope(subject)
    free_after(subject, block, SIDE)
    subject.end_pool(POOL)
    assert take(subject, 12 * MIB) != block
    assert pending(subject) == 1


@of_2_15
def test_v_2c_another_streams_cache_is_given_up_while_a_scope_is_open(start):
    subject = start(capacity=100 * MIB)
    cache(subject, 80 * MIB, stream=SIDE)
    scope(subject, streams=OTHER)
    take(subject, 60 * MIB, 6)
    assert costs(subject, retries=1, waits=1)
    assert sizes_of(subject, "free") == [80 * MIB]


@of_2_15
def test_v_2d_and_in_its_own_scope(start):
    subject = start(capacity=100 * MIB)
    cache(subject, 80 * MIB)
    scope(subject)
    take(subject, 60 * MIB)
    assert pools(subject) == [POOL]
    assert counters(subject)["retries"] == 1


@of_2_15
def test_v_2e_a_request_in_a_scope_polls_for_all_pools(start):
    subject = start()
    subject.hold(SIDE)
    free_after(subject, take(subject, 12 * MIB), SIDE)
    subject.finish(SIDE)
    scope(subject)
    take(subject, 1)
    assert subject.stats()["active.all.current"] == 1


@of_2_15
def test_v_2f_the_default_pool_is_emptied_inside_a_scope(start):
    subject = start()
    cache(subject, 12 * MIB)
    scope(subject)
    subject.empty_cache()
    assert reserved(subject) == 0
    assert costs(subject, waits=1)


@of_2_15
def test_v_2g_a_released_pool_is_emptied_while_another_is_in_use(start):
    subject = start()
    pool_with(subject, 30 * MIB)
    drop(subject)
    scope(subject, SECOND_POOL)
    assert subject.empty_cache(POOL) is None
    assert reserved(subject) == 0


def capturing(subject: Any, stream: int = 0) -> None:
    subject.mark_capture(True)
    subject.capture(stream)


def ended(subject: Any, stream: int = 0) -> None:
    subject.capture(stream, False)
    subject.mark_capture(False)


@upstream_of_2_15
def test_v_2h_a_marked_capture_defers(start):
    subject = start()
    subject.hold(SIDE)
    capturing(subject)
    block = take(subject, 12 * MIB)
    free_after(subject, block, SIDE)
    subject.finish(SIDE)
    take(subject, 12 * MIB)
    assert (len(layout(subject)), pending(subject), recorded(subject)) == (2, 1, [])
    ended(subject)
    assert take(subject, 12 * MIB) == block
    assert recorded(subject) == []


@upstream_of_2_15
@pytest.mark.parametrize("marked", [True, False], ids=["V-2i", "V-2j"])
def test_v_2i_a_capture_is_marked_and_on_the_current_stream(start, marked):
    subject = start()
    subject.hold(SIDE)
    if marked:
        subject.mark_capture(True)
        subject.capture(OTHER)
        subject.capture(0, False)
    else:
        subject.capture(0)
    block = take(subject, 12 * MIB)
    free_after(subject, block, SIDE)
    subject.finish(SIDE)
    assert take(subject, 12 * MIB) == block
    assert recorded(subject) == [SIDE]


@upstream_of_2_15
def test_v_2k_a_marked_capture_makes_no_retry(start):
    subject = start(capacity=100 * MIB)
    pool_with(subject, 2 * MIB)
    drop(subject)
    cache(subject, 70 * MIB, stream=SIDE)
    capturing(subject)
    assert failed(subject.malloc(60 * MIB), "oom")
    assert costs(subject, ooms=1)
    assert failed(subject.empty_cache(POOL), "internal")
    assert subject.empty_cache() is None  # released pools alone
    assert reserved(subject) == 70 * MIB


@upstream_of_2_15
def test_v_2m_what_was_recorded_before_a_capture_has_its_event_after_it(start):
    subject = start()
    subject.hold(SIDE)
    block = take(subject, 12 * MIB)
    subject.record_stream(block, SIDE)
    capturing(subject)
    release(subject, block)
    assert recorded(subject) == []
    ended(subject)
    assert take(subject, 12 * MIB) != block
    assert recorded(subject) == [SIDE]


@of_2_15
def test_v_4h_a_released_pool_is_given_up_while_a_scope_is_open(start):
    subject = start(capacity=100 * MIB)
    pool_with(subject, 60 * MIB)
    drop(subject)
    scope(subject, SECOND_POOL, streams="none")
    take(subject, 70 * MIB)
    assert counters(subject)["retries"] == 1


@original_of_2_15
def test_v_7h_an_allocator_of_its_own_is_asked_twice(start):
    subject = start(capacity=50 * MIB)
    subject.create_pool(POOL, own_allocator=True)
    subject.begin_pool(POOL)
    answer = subject.malloc(60 * MIB)
    assert failed(answer, "oom")
    assert "custom allocator backing this MemPool returned nullptr" in answer.text
    assert sizes_of(subject, "pool_malloc") == [60 * MIB, 60 * MIB]
    assert costs(subject, retries=1, ooms=1, waits=1)


# -- V-3 the limit is rounded ----------------------------------------------------------------------


@of_2_15
def test_v_3_the_limit_is_rounded(start):
    total = 6 * MIB + 1
    subject = start(capacity=total)
    subject.set_memory_fraction((4 * MIB - 0.4) / total)
    assert [take(subject, MIB) - take(subject, MIB) for _ in range(1)] == [-MIB]
    take(subject, MIB)  # a limit that is truncated would be one byte too low
    assert reserved(subject) == 4 * MIB


@of_2_15
@pytest.mark.parametrize(
    ("fraction", "limit"),
    [(0.1, 100000001), (0.25, 250000002), (0.5, 500000004), (0.999, 999000007)],
)
def test_v_3c_half_a_byte_is_rounded_up(start, fraction, limit):
    total = 10**9 + 7
    subject = start(capacity=total)
    subject.set_memory_fraction(fraction)
    assert round(subject.memory_fraction() * total) == limit


# -- V-4 pools that are not split ------------------------------------------------------------------


@of_2_15
def test_v_4_a_pool_that_has_gone_is_split_when_it_comes_again(start):
    subject = start()
    subject.create_pool(POOL)
    subject.set_no_split(POOL)
    subject.release_pool(POOL)
    subject.empty_cache()
    scope(subject)
    take(subject, 4 * MIB)
    assert layout(subject) == [[4 * MIB, 16 * MIB]]


# -- V-5 and V-10 ranges ---------------------------------------------------------------------------

ON = "expandable_segments:True"


def range_calls(subject: Any) -> list[tuple[str, int]]:
    names = ("reserve", "unreserve", "create")
    return [(name, nbytes) for name, nbytes, _ in subject.calls if name in names]


@of_2_15
def test_v_5_a_range_that_is_too_small_is_given_back_at_once(start):
    subject = start(capacity=100 * MIB, settings=ON)
    assert failed(subject.malloc(200 * MIB), "oom")
    size = 125829120
    assert range_calls(subject) == [("reserve", size), ("unreserve", size)] * 2
    assert costs(subject, retries=1, ooms=1, waits=1)
    take(subject, 10 * MIB)
    assert range_calls(subject)[4:] == [("reserve", size), ("create", 20 * MIB)]


@of_2_15
@pytest.mark.parametrize(
    ("text", "large", "small"),
    [
        ("0.5", 62914560, 52428800),
        ("1G", 125829120, 119537664),
        ("1e300", 125829120, 119537664),
        ("1e300G", 125829120, 119537664),
    ],
)
def test_v_10_how_much_is_reserved(start, text, large, small):
    subject = start(capacity=100 * MIB, settings=f"{ON},expandable_segments_reserve:{text}")
    take(subject, 4 * MIB)
    take(subject, 512)
    assert sizes_of(subject, "reserve") == [large, small]


def test_a_reserve_of_nothing_refuses_and_asks_no_driver_for_it():
    """The compiled original asks for 0 bytes of addresses, which no driver gives."""
    device = bfc.SimulatedSubAllocator(100 * MIB)
    text = f"{ON},expandable_segments_reserve:1e-30"
    for strict in (False, True):
        allocator = bfc.CachingAllocator(device, settings=text, strict=strict)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(MIB)
    assert device.live == {}


@of_2_15
def test_v_10_what_is_above_the_reserve_is_refused_without_a_page(start):
    subject = start(capacity=100 * MIB, settings=f"{ON},expandable_segments_reserve:0.5")
    assert failed(subject.malloc(70 * MIB), "oom")
    assert [name for name, _ in range_calls(subject)] == ["reserve", "unreserve"] * 2


@of_2_15
def test_v_10g_a_range_that_is_full_counts_in_the_age_of_what_is_collected(start):
    """A fault of upstream's, which ours has under `strict` alone."""
    assert collected(start) == 0


def collected(start: Start) -> int:
    """How many segments a request collects beside a free range that is mapped to its end."""
    subject = start(
        capacity=200 * MIB,
        settings=f"{ON},expandable_segments_reserve:0.2,garbage_collection_threshold:0.3",
    )
    subject.set_memory_fraction(0.9)
    cache(subject, 40 * MIB)
    subject.set_settings("expandable_segments:False,garbage_collection_threshold:0.3")
    cache(subject, 30 * MIB, 32 * MIB)  # younger than what fills the range
    take(subject, 38 * MIB, SIDE)
    return len(sizes_of(subject, "free"))


# -- V-9 throw_on_cudamalloc_oom -------------------------------------------------------------------

THROWS = "throw_on_cudamalloc_oom:True"


def rejections(subject: Any) -> int:
    return subject.stats()["num_oom_rejections"]


@of_2_15
def test_v_9_the_limit_refuses_first(start):
    subject = start(capacity=200 * MIB, settings=f"{THROWS},per_process_memory_fraction:0.5")
    assert failed(subject.malloc(120 * MIB), "oom")
    assert rejections(subject) == 0
    assert costs(subject, retries=1, ooms=1, waits=1)


@of_2_15
def test_v_9b_a_rejection_costs_nothing(start):
    subject = start(capacity=200 * MIB, settings=f"{THROWS},per_process_memory_fraction:0.5")
    subject.set_memory_fraction(1.0)
    subject.record_history(True)
    assert failed(subject.malloc(120 * MIB), "oom")
    assert (rejections(subject), subject.calls, subject.trace()) == (1, [], [])
    assert costs(subject)
    assert subject.rejections() == [(125829120, 0, 209715200)]
    subject.reset_accumulated_stats()  # V-9i
    assert rejections(subject) == 0


@of_2_15
def test_v_9d_the_cache_is_kept(start):
    subject = start(capacity=200 * MIB, settings=THROWS)
    cache(subject, 150 * MIB, stream=SIDE)
    assert failed(subject.malloc(100 * MIB, OTHER), "oom")
    assert (rejections(subject), reserved(subject)) == (1, 150 * MIB)


@of_2_15
def test_v_9e_the_device_may_be_filled(start):
    subject = start(capacity=200 * MIB, settings=THROWS)
    take(subject, 200 * MIB)


@of_2_15
def test_v_9f_a_whole_segment_is_counted(start):
    subject = start(capacity=201 * MIB, settings=THROWS)
    take(subject, 200 * MIB)
    assert failed(subject.malloc(1), "oom")
    assert rejections(subject) == 1


@of_2_15
def test_v_9h_at_run_time(start):
    subject = start(capacity=200 * MIB)
    subject.set_settings(f"{THROWS},per_process_memory_fraction:0.25")
    assert failed(subject.malloc(60 * MIB), "oom")
    take(subject, 40 * MIB)


# -- V-16 statistics -------------------------------------------------------------------------------


@of_2_15
def test_v_16_the_reserved_bytes_of_a_pool(start):
    subject = start()
    assert not any("private" in name for name in subject.stats())
    scope(subject, (0, 3))
    cache(subject, 4 * MIB, 512)
    subject.end_pool((0, 3))

    def figures(field: str) -> list[int]:
        stats, name = subject.stats(), "reserved_bytes_by_private_pools.0_3"
        return [stats[f"{name}.{kind}.{field}"] for kind in ("all", "small_pool", "large_pool")]

    whole = [23068672, 2097152, 20971520]
    assert figures("current") == figures("peak") == whole
    drop(subject, (0, 3))
    subject.empty_cache()
    assert (figures("current"), figures("peak"), figures("freed")) == ([0] * 3, whole, whole)
    subject.reset_peak_stats()
    subject.reset_accumulated_stats()
    assert figures("peak") == figures("allocated") == figures("freed") == [0] * 3


@of_2_15
def test_v_16_memory_of_ranges_counts(start):
    subject = start(settings=ON)
    scope(subject)
    take(subject, 4 * MIB)
    name = "reserved_bytes_by_private_pools.0_1.all.current"
    assert subject.stats()[name] == 20 * MIB


# -- what ours says and does for itself -----------------------------------------------------------


def test_a_rejection_is_told_to_observers_and_to_the_caller():
    device = bfc.SimulatedSubAllocator("200 MiB")
    allocator = bfc.CachingAllocator(device, settings=THROWS)
    told: list[tuple[int, ...]] = []
    allocator.attach_oom_rejection_observer(lambda *figures: told.append(figures))
    kept = allocator.allocate("150 MiB")
    with pytest.raises(bfc.OutOfMemoryError, match=r"oom:True, with 150\.00 MiB"):
        allocator.allocate("99 MiB")
    assert told == [(0, 100 * MIB, 150 * MIB, 200 * MIB)]
    assert device.calls == [("alloc", 150 * MIB, kept.ptr)]
    with pytest.raises(TypeError, match="a function"):
        allocator.attach_oom_rejection_observer(3)
    observer = told.clear
    with pytest.raises(ValueError, match="not an observer of rejections"):
        allocator.detach_oom_rejection_observer(observer)


def test_a_rejection_waits_for_nobody():
    """Neither for other threads' frees nor for the garbage collector."""
    allocator = bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("200 MiB"), settings=THROWS, retry_seconds=100.0
    )
    assert allocator.try_allocate("201 MiB") is None
    assert allocator.memory_stats()["num_oom_rejections"] == 1


def test_a_request_above_the_reserve_is_told_so():
    allocator = bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("100 MiB"),
        settings=f"{ON},expandable_segments_reserve:0.5",
    )
    with pytest.raises(bfc.OutOfMemoryError, match=r"expandable_segments_reserve, with 50\.00 MiB"):
        allocator.allocate("70 MiB")
    assert "reserve" not in [name for name, _, _ in allocator.sub_allocator.calls]


def test_ours_does_not_count_a_full_range_in_the_age_unless_strict():
    """The fault of V-10g, mended."""
    freed = {}
    for strict in (True, False):
        device = bfc.SimulatedSubAllocator("200 MiB")
        allocator = bfc.CachingAllocator(
            device,
            settings=f"{ON},expandable_segments_reserve:0.2,garbage_collection_threshold:0.3",
            strict=strict,
        )
        allocator.set_memory_fraction(0.9)
        allocator.deallocate_raw(allocator.allocate_raw(40 * MIB))
        allocator.set_settings("expandable_segments:False,garbage_collection_threshold:0.3")
        for block in [allocator.allocate_raw(nbytes * MIB) for nbytes in (30, 32)]:
            allocator.deallocate_raw(block)
        allocator.allocate_raw(38 * MIB, 2)
        freed[strict] = [nbytes for name, nbytes, _ in device.calls if name == "free"]
    assert freed[True] == []
    assert freed[False] != []


def test_the_order_is_kept_where_memory_is_stitched():
    """Stitching has addresses of its own, and places as before."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB", reuse=True), stitch=True)
    blocks = [allocator.allocate_raw(4 * MIB) for _ in range(6)]
    for block in blocks[1::2]:
        allocator.deallocate_raw(block)
    assert allocator.allocate_raw(4 * MIB) == blocks[1]
    allocator.check()
