"""How the pool grows and shrinks: what a sub-allocator is asked for, the limit, refusals, and
sub-allocators at fault."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from waiting import DEADLINE, Halt, called_by_others, joined, until

import bfc
from bfc.testing import Misbehaving

BASE = 1 << 40
MIB = 1 << 20
GIB = 1 << 30
ENOUGH = 1 << 50
Answer = object


def made(capacity: int = ENOUGH, *answers: Answer, **options: Any) -> Misbehaving:
    """A simulated device whose next answers are given.

    An answer is an exception to raise, what is done `instead`, or a value to return. With none left
    it is an ordinary device again. `given_back` lists every call of free.
    """
    device = Misbehaving(bfc.SimulatedSubAllocator(capacity, alignment=256, **options))
    device.given_back = []

    def give(ask: Callable[[int, int], None], address: int, nbytes: int) -> None:
        device.given_back.append((address, nbytes))
        ask(address, nbytes)

    device.on("free", instead=give)
    for number, answer in enumerate(answers, 1):
        if isinstance(answer, BaseException):
            device.on("alloc", number, raises=answer)
        elif callable(answer):
            device.on("alloc", number, instead=partial(answer, device.inner))
        else:
            device.on("alloc", number, returns=answer)
    return device


def received(nbytes: int) -> Callable[..., tuple[int, int] | None]:
    """An answer that hands out another number of bytes than was asked for."""
    return lambda inner, ask, alignment, _asked: ask(alignment, nbytes)


def at(offset: int) -> Callable[..., tuple[int, int]]:
    """An answer that hands out what was asked for, at an offset of its own choice."""

    def answer(inner: Any, ask: Any, alignment: int, nbytes: int) -> tuple[int, int]:
        assert alignment == 256
        inner.live[BASE + offset] = nbytes
        inner._block_bytes += nbytes
        return BASE + offset, nbytes

    return answer


def pool(limit: int, device: bfc.SubAllocator | None = None, **options) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(device or made(), memory_limit=limit, **options)


def growing(limit: int, device: bfc.SubAllocator | None = None, **options) -> bfc.BFCAllocator:
    return pool(limit, device, allow_growth=True, **options)


def asked(allocator: bfc.BFCAllocator) -> list[int]:
    return [nbytes for kind, nbytes, _ in allocator.sub_allocator.calls if kind == "alloc"]


def regions(allocator: bfc.BFCAllocator) -> list[tuple[int, int]]:
    return [(region.ptr - BASE, region.size) for region in allocator.snapshot().regions]


def refused(allocator: bfc.BFCAllocator, size: int) -> bool:
    try:
        allocator.allocate_raw(size)
    except bfc.OutOfMemoryError:
        return True
    return False


def fill_and_free(allocator: bfc.BFCAllocator, *sizes: int) -> None:
    allocator.deallocate_many([allocator.allocate_raw(size) for size in sizes])


def check_whole_and_usable(allocator: bfc.BFCAllocator) -> None:
    """Nothing counts as in use, the whole limit can be taken, and closing gives all of it back."""
    allocator.check()
    assert allocator.stats().bytes_in_use == 0
    allocator.release_free_regions()
    assert allocator.stats().pool_bytes == 0
    allocator.deallocate_raw(allocator.allocate_raw(allocator.memory_limit))
    assert allocator.stats().pool_bytes == allocator.memory_limit
    allocator.close()
    assert allocator.sub_allocator.live == {}


# -- what is asked for ----------------------------------------------------------------------------


def test_regions_double_while_they_are_taken_one_after_another():
    allocator = growing(GIB)
    for size in (1, 2 * MIB, 4 * MIB, 8 * MIB):
        allocator.allocate_raw(size)
    assert asked(allocator) == [2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB]
    assert allocator.next_region_size == 32 * MIB


def test_a_region_size_below_two_mebibytes_is_doubled_as_it_is():
    allocator = growing(1500)
    allocator.allocate_raw(700)
    assert asked(allocator) == [1280]
    assert allocator.next_region_size == 2 * 1536


def test_a_large_first_request_is_answered_by_the_next_power_of_two():
    allocator = growing(GIB)
    allocator.allocate_raw(33 * MIB)
    assert asked(allocator) == [64 * MIB]
    assert allocator.next_region_size == 64 * MIB


def test_a_fixed_pool_that_got_less_than_its_limit_goes_on_extending():
    allocator = pool(64 * MIB, made(max_bytes=40 * MIB))
    first = allocator.allocate_raw(30 * MIB)
    second = allocator.allocate_raw(20 * MIB)
    assert second - BASE == regions(allocator)[0][1]
    assert len(regions(allocator)) == 2
    assert allocator.stats().pool_bytes <= 64 * MIB
    allocator.deallocate_many([first, second])
    allocator.check()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("request_size", [1, 256, 2304, 2305, 100_000, 3 * MIB, 50 * MIB])
def test_every_attempt_is_smaller_than_the_one_before_and_holds_the_request(request_size, strict):
    allocator = pool(64 * MIB, made(0), strict=strict)
    assert refused(allocator, request_size)
    attempts = asked(allocator)
    assert attempts[0] == 64 * MIB
    assert all(before > after for before, after in itertools.pairwise(attempts))
    assert all(size % 256 == 0 and size >= request_size for size in attempts)
    rounded = -(-request_size // 256) * 256
    assert (attempts[-1] == rounded) or strict


def test_strict_gives_up_where_a_step_falls_below_the_request():
    allocator = pool(10 * MIB, made(max_bytes=6 * MIB), strict=True)
    assert refused(allocator, 6 * MIB)
    assert min(asked(allocator)) > 6 * MIB


def test_the_request_itself_is_asked_for_once_and_last():
    allocator = pool(10 * MIB, made(0))
    assert refused(allocator, 10 * MIB)
    assert asked(allocator) == [10 * MIB]
    assert refused(allocator, 9 * MIB)
    assert asked(allocator)[1:] == [10 * MIB, 9 * MIB]


def test_a_refused_call_is_followed_by_one_for_less():
    device = made()
    device.fail_at(2)
    allocator = growing(GIB, device)
    allocator.allocate_raw(2 * MIB)
    allocator.allocate_raw(2 * MIB)
    assert asked(allocator) == [2 * MIB, 4 * MIB, 3774976]
    assert allocator.next_region_size == 8 * MIB


def test_the_size_of_the_next_region_stays_raised_after_a_refusal():
    allocator = growing(GIB, made(max_bytes=MIB))
    assert refused(allocator, 100 * MIB)
    assert allocator.next_region_size == 128 * MIB


def test_a_request_above_what_the_limit_leaves_asks_nobody():
    allocator = growing(8 * MIB)
    allocator.allocate_raw(2 * MIB)
    assert refused(allocator, 6 * MIB + 1)
    assert asked(allocator) == [2 * MIB]
    assert allocator.next_region_size == 4 * MIB


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 1000 * MIB), (0.5, 500 * MIB), ("3 MiB", 3 * MIB), (12345, 12345), (2.0, 2000 * MIB)],
)
def test_a_limit_is_bytes_a_text_a_fraction_or_what_the_device_has(limit, expected):
    allocator = bfc.BFCAllocator(made(1000 * MIB), memory_limit=limit)
    assert allocator.memory_limit == allocator.stats().bytes_limit == expected


@pytest.mark.parametrize("limit", [1, 255])
@pytest.mark.parametrize("allow_growth", [False, True])
def test_a_limit_below_256_refuses_everything(limit, allow_growth):
    allocator = pool(limit, allow_growth=allow_growth)
    assert refused(allocator, 1)
    assert asked(allocator) == []


@pytest.mark.parametrize("allow_growth", [False, True])
def test_the_largest_limit_there_is_does_not_wrap(allow_growth):
    allocator = pool(2**63 - 1, made(8 * MIB), allow_growth=allow_growth)
    allocator.allocate_raw(MIB)
    assert refused(allocator, 2**62)
    assert refused(allocator, 2**63 - 257)
    assert 0 < allocator.stats().pool_bytes <= 8 * MIB
    allocator.check()


def test_the_pool_never_passes_its_limit_however_it_is_filled():
    allocator = growing(50 * MIB, made(gap=256))
    while not refused(allocator, 700_000):
        assert allocator.stats().pool_bytes <= 50 * MIB
    assert allocator.stats().pool_bytes == 50 * MIB


def test_a_batch_that_does_not_fit_leaves_nothing_behind():
    allocator = growing(8 * MIB)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_many([MIB, 2 * MIB, 64 * MIB])
    check_whole_and_usable(allocator)


# -- blocks of other sizes than asked for ---------------------------------------------------------


def test_all_of_a_block_that_is_larger_than_asked_is_used():
    allocator = pool(4 * MIB, made(ENOUGH, received(6 * MIB)))
    assert allocator.allocate_raw(5 * MIB // 2) == BASE
    assert regions(allocator) == [(0, 6 * MIB)]
    allocator.close()
    assert allocator.sub_allocator.given_back == [(BASE, 6 * MIB)]


def test_a_pool_past_its_limit_serves_what_fits_in_it_and_grows_no_more():
    allocator = pool(4 * MIB, made(ENOUGH, received(6 * MIB)))
    assert [allocator.allocate_raw(2 * MIB) - BASE for _ in range(3)] == [0, 2 * MIB, 4 * MIB]
    assert refused(allocator, 256)
    assert asked(allocator) == [6 * MIB]


@pytest.mark.parametrize("strict", [False, True])
def test_a_pool_past_its_limit_gives_nothing_back_for_a_request_above_the_limit(strict):
    device = made(ENOUGH, received(3 * MIB), received(3 * MIB), gap=256)
    allocator = growing(4 * MIB, device, strict=strict)
    fill_and_free(allocator, 2 * MIB, MIB)
    before = regions(allocator)
    assert [size for _, size in before] == [3 * MIB, 3 * MIB]
    assert refused(allocator, 5 * MIB)
    assert regions(allocator) == before


def test_a_block_smaller_than_asked_is_an_error_and_is_offered_back():
    device = made(ENOUGH, received(4 * MIB - 256))
    allocator = pool(4 * MIB, device)
    with pytest.raises(bfc.SubAllocatorError, match="at least what was asked for"):
        allocator.allocate_raw(256)
    assert device.given_back == [(BASE, 4 * MIB - 256)]
    check_whole_and_usable(allocator)


def test_strict_keeps_a_block_that_is_smaller_than_the_request_for_others():
    allocator = pool(4 * MIB, made(ENOUGH, received(MIB)), strict=True, garbage_collection=False)
    assert refused(allocator, 2 * MIB)
    allocator.check()
    assert regions(allocator) == [(0, MIB)]
    assert allocator.allocate_raw(MIB) == BASE
    allocator.close()
    assert allocator.sub_allocator.given_back == [(BASE, MIB)]


@pytest.mark.parametrize("size", [1, 100, 255, 256, 257, 1000, MIB + 1])
@pytest.mark.parametrize("collecting", [False, True])
def test_strict_counts_a_block_of_any_size_and_gives_it_back_as_it_came(size, collecting):
    device = made(ENOUGH, received(size))
    allocator = growing(64 * MIB, device, garbage_collection=collecting, strict=True)
    for wanted in (300, 1):
        refused(allocator, wanted)
        allocator.check()
    for chunk in allocator.snapshot().live_chunks():
        allocator.deallocate_raw(chunk.ptr)
    check_whole_and_usable(allocator)
    assert device.given_back.count((BASE, size)) == 1


# -- sub-allocators that break their contract -----------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("no context"),
        OSError("no device"),
        ValueError("odd"),
        bfc.SubAllocatorError("as agreed"),
        ZeroDivisionError(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("refusals", [0, 3])
def test_a_sub_allocator_that_raises_loses_nothing(fault, refusals):
    allocator = pool(8 * MIB, made(ENOUGH, *[None] * refusals, fault))
    with pytest.raises(bfc.SubAllocatorError) as raised:
        allocator.allocate_raw(MIB)
    assert fault in (raised.value, raised.value.__cause__)
    check_whole_and_usable(allocator)


def test_a_keyboard_interrupt_passes_through_and_loses_nothing():
    allocator = pool(8 * MIB, made(ENOUGH, None, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        allocator.allocate_raw(MIB)
    check_whole_and_usable(allocator)


def test_a_memory_error_is_a_refusal_like_any_other():
    allocator = pool(8 * MIB, made(ENOUGH, MemoryError(), MemoryError()))
    allocator.deallocate_raw(allocator.allocate_raw(MIB))
    assert asked(allocator) == [6795008]
    check_whole_and_usable(allocator)


@pytest.mark.parametrize(
    "garbage",
    [
        5,
        "two mebibytes",
        b"",
        (),
        (BASE,),
        (BASE, MIB, 0),
        (BASE, None),
        (None, MIB),
        ("1", MIB),
        (BASE, 1.5),
        (float(BASE), MIB),
        object(),
        False,
    ],
    ids=lambda answer: str(answer) if type(answer) is not object else "object()",
)
def test_an_answer_that_is_no_block_is_an_error_and_loses_nothing(garbage):
    allocator = pool(8 * MIB, made(ENOUGH, garbage))
    with pytest.raises(bfc.SubAllocatorError, match="must return"):
        allocator.allocate_raw(MIB)
    check_whole_and_usable(allocator)


@pytest.mark.parametrize(
    "block",
    [
        (BASE + 1, MIB),
        (BASE + 128, MIB),
        (0, MIB),
        (-256, MIB),
        (BASE, 0),
        (BASE, -256),
        (2**64 - 256, 512),
        (2**64, 256),
        (BASE, 2**64),
    ],
    ids=str,
)
def test_an_impossible_block_is_offered_back_once_and_loses_nothing(block):
    device = made(ENOUGH, block)
    allocator = pool(8 * MIB, device)
    with pytest.raises(bfc.SubAllocatorError, match="multiple of 256"):
        allocator.allocate_raw(MIB)
    assert device.given_back == [block]
    check_whole_and_usable(allocator)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (8 * MIB, 2 * MIB),  # the same block again
        (8 * MIB, 256),
        (9 * MIB, 256),  # inside
        (10 * MIB - 256, 4 * MIB),  # over the end
        (8 * MIB - 256, 512),  # over the start
        (0, 32 * MIB),  # all of it, and more
    ],
)
@pytest.mark.parametrize("coalescing", [False, True])
def test_a_block_that_overlaps_another_is_not_used(offset, size, coalescing):
    device = made(
        ENOUGH,
        at(8 * MIB),
        (BASE + offset, size),
        base=BASE + 64 * MIB,
        supports_coalescing=coalescing,
    )
    allocator = growing(64 * MIB, device, strict=True)  # which takes small blocks, too
    first = allocator.allocate_raw(2 * MIB)
    with pytest.raises(bfc.SubAllocatorError, match="overlaps"):
        allocator.allocate_raw(MIB)
    allocator.check()
    assert regions(allocator) == [(8 * MIB, 2 * MIB)]
    assert device.given_back == []
    assert allocator.allocate_raw(MIB) == BASE + 64 * MIB
    assert allocator.requested_size(first) == 2 * MIB


@pytest.mark.parametrize("offset", [6 * MIB, 10 * MIB])
def test_a_block_that_only_touches_another_is_used(offset):
    allocator = growing(4 * MIB, made(ENOUGH, at(8 * MIB), at(offset)))
    allocator.allocate_raw(2 * MIB)
    assert allocator.allocate_raw(2 * MIB) == BASE + offset
    allocator.check()


def test_a_limit_is_whole_again_after_many_faults():
    faults = [RuntimeError("again"), "garbage", (BASE + 1, MIB), None, (0, 0)] * 40
    allocator = growing(8 * MIB, made(ENOUGH, *faults))
    for _ in faults:
        try:
            allocator.allocate_raw(8 * MIB)
        except (bfc.SubAllocatorError, bfc.OutOfMemoryError):
            allocator.check()
    check_whole_and_usable(allocator)


# -- regions that touch ---------------------------------------------------------------------------


def joining_device() -> Misbehaving:
    """Gives 2 MiB at +6 MiB, then 4 MiB at +0, then the 2 MiB between them."""
    places = at(6 * MIB), at(0), at(4 * MIB)
    return made(ENOUGH, *places, supports_coalescing=True)


def test_a_block_below_a_region_is_not_joined_to_it():
    allocator = growing(8 * MIB, joining_device())
    allocator.allocate_raw(2 * MIB)
    allocator.allocate_raw(4 * MIB)
    assert regions(allocator) == [(0, 4 * MIB), (6 * MIB, 2 * MIB)]


def test_a_block_that_closes_a_hole_is_joined_to_the_lower_region_only():
    allocator = growing(8 * MIB, joining_device())
    for size in (2 * MIB, 4 * MIB, 2 * MIB):
        allocator.allocate_raw(size)
    assert regions(allocator) == [(0, 6 * MIB), (6 * MIB, 2 * MIB)]
    allocator.check()


def test_joined_blocks_are_given_back_as_one_range():
    device = made(supports_coalescing=True)
    allocator = growing(GIB, device)
    ptrs = [allocator.allocate_raw(size) for size in (2 * MIB, 4 * MIB, 8 * MIB)]
    assert regions(allocator) == [(0, 14 * MIB)]
    allocator.deallocate_many(ptrs)
    assert allocator.release_free_regions() == 14 * MIB
    assert device.given_back == [(BASE, 14 * MIB)]
    assert device.live == {}


# -- giving back ----------------------------------------------------------------------------------


def test_releasing_gives_back_the_free_regions_and_starts_small_again():
    device = made(gap=4096)
    allocator = growing(GIB, device)
    a, b, c = (allocator.allocate_raw(size) for size in (2 * MIB, 4 * MIB, 8 * MIB))
    allocator.deallocate_many([c, a])
    assert allocator.release_free_regions() == 10 * MIB
    assert device.given_back == [(a, 2 * MIB), (c, 8 * MIB)]
    assert list(device.live) == [b]
    assert allocator.next_region_size == 2 * MIB
    assert allocator.release_free_regions() == 0


def test_collecting_does_not_make_the_next_region_small_again():
    allocator = growing(8 * MIB, made(gap=4096))
    fill_and_free(allocator, 2 * MIB, 4 * MIB, 2 * MIB)
    allocator.allocate_raw(8 * MIB)
    assert allocator.next_region_size == 32 * MIB


def test_regions_that_were_collected_are_gone_even_if_the_driver_then_refuses():
    device = made(gap=4096)
    allocator = growing(8 * MIB, device)
    fill_and_free(allocator, 2 * MIB, 4 * MIB, 2 * MIB)
    device.on("alloc", returns=None)
    assert refused(allocator, 7 * MIB)
    assert (allocator.stats().pool_bytes, device.live) == (0, {})
    device.off("alloc")
    check_whole_and_usable(allocator)


def test_what_a_driver_would_not_take_back_is_offered_again_at_the_next_release():
    device = made(gap=4096)
    allocator = growing(GIB, device)
    a, b = (allocator.allocate_raw(size) for size in (2 * MIB, 4 * MIB))
    allocator.deallocate_many([a, b])
    device.on("free", 1, raises=OSError("the driver is gone"))
    with pytest.raises(bfc.SubAllocatorError, match="1 of 2"):
        allocator.release_free_regions()
    allocator.check()
    assert list(device.live) == [a]
    assert refused(allocator, GIB)  # what the device still holds counts against the limit
    assert allocator.release_free_regions() == 2 * MIB
    assert device.live == {}
    check_whole_and_usable(allocator)


def test_what_a_driver_would_not_take_back_is_offered_again_by_close():
    device = made()
    allocator = growing(GIB, device)
    allocator.allocate_raw(2 * MIB)
    device.on("free", 1, raises=OSError("the driver is gone"))
    with pytest.raises(bfc.SubAllocatorError):
        allocator.close()
    assert allocator.closed
    allocator.close()
    assert device.live == {}


def test_a_driver_that_fails_while_collecting_leaves_the_allocator_usable():
    device = made(gap=4096)
    allocator = growing(8 * MIB, device)
    fill_and_free(allocator, 2 * MIB, 4 * MIB, 2 * MIB)
    device.on("free", 1, raises=OSError("the driver is gone"))
    with pytest.raises(bfc.SubAllocatorError):
        allocator.allocate_raw(8 * MIB)
    allocator.check()
    assert allocator.release_free_regions() == 2 * MIB
    check_whole_and_usable(allocator)


# -- several at once ------------------------------------------------------------------------------


@pytest.fixture
def slow() -> Iterator[Misbehaving]:
    """A device whose first alloc does not answer before `halt` lets it go."""
    device = made()
    device.halt = Halt()
    device.on("alloc", first=device.halt)
    yield device
    device.halt.go.set()


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs a function in a thread. Its result, or the error it raised, is appended to the list."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@pytest.mark.parametrize("strict", [False, True])
def test_a_second_thread_is_not_refused_while_the_first_one_takes_the_pool(slow, strict):
    allocator = pool(64 * MIB, slow, strict=strict)
    first, first_result = in_thread(lambda: allocator.allocate_raw(MIB))
    assert slow.halt.inside.wait(DEADLINE)
    has_looked = called_by_others(allocator)
    second, second_result = in_thread(lambda: allocator.allocate_raw(MIB))
    until(has_looked)
    slow.halt.go.set()
    joined(first)
    joined(second)
    assert sorted([*first_result, *second_result], key=str) == [BASE, BASE + MIB]


def test_memory_can_be_freed_and_looked_at_while_a_sub_allocator_is_asked(slow):
    allocator = growing(64 * MIB, slow)
    slow.halt.go.set()
    ptr = allocator.allocate_raw(2 * MIB)
    slow.halt.go.clear()
    slow.halt.inside.clear()
    thread, result = in_thread(lambda: allocator.allocate_raw(3 * MIB))
    assert slow.halt.inside.wait(DEADLINE)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_in_use == 0
    assert allocator.allocate_raw(MIB) == ptr
    allocator.check()
    slow.halt.go.set()
    joined(thread)
    assert allocator.requested_size(result[0]) == 3 * MIB
    allocator.check()


def test_a_block_that_arrives_after_close_is_given_back(slow):
    allocator = pool(64 * MIB, slow)
    thread, result = in_thread(lambda: allocator.allocate_raw(MIB))
    assert slow.halt.inside.wait(DEADLINE)
    allocator.close()
    slow.halt.go.set()
    joined(thread)
    assert isinstance(result[0], bfc.ClosedError)
    assert slow.live == {}


def test_threads_that_extend_at_once_stay_within_the_limit():
    """The device takes a moment for each call, so that they come together."""
    device = made(gap=4096)
    most = asked_now = 0

    def alloc(ask: Callable[[int, int], Any], alignment: int, nbytes: int) -> Any:
        nonlocal most, asked_now
        asked_now += nbytes
        most = max(most, device.live_bytes + asked_now)
        time.sleep(0.001)
        asked_now -= nbytes
        return ask(alignment, nbytes)

    device.on("alloc", instead=alloc)
    allocator = growing(40 * MIB, device)

    def work() -> None:
        for _ in range(10):
            try:
                ptr = allocator.allocate_raw(3 * MIB)
            except bfc.OutOfMemoryError:
                continue
            time.sleep(0.0005)
            allocator.deallocate_raw(ptr)
            allocator.release_free_regions()

    threads = [in_thread(work) for _ in range(6)]
    for thread, _ in threads:
        joined(thread)
    assert [results for _, results in threads] == [[None]] * 6
    assert most <= 40 * MIB
    check_whole_and_usable(allocator)


@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator, bfc.PinnedAllocator])
def test_a_block_against_the_contract_that_does_not_go_back_is_offered_again_at_the_end(policy):
    source = Misbehaving("1 GiB")
    source.on("alloc", instead=lambda ask, alignment, nbytes: ask(alignment, nbytes - 1))
    source.on("free", raises=ValueError("not now"))
    allocator = policy(source)
    with pytest.raises(bfc.SubAllocatorError, match="at least what was asked for"):
        allocator.allocate("4 MiB")
    source.off()
    allocator.close()
    assert source.live_bytes == 0
