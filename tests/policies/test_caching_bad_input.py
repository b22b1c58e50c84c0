"""Hooks that misbehave, pools that end at the wrong moment, and numbers at the edge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from closing import close_all

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
SIDE = 3
Make = Callable[..., "bfc.CachingAllocator"]
HOW = pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators; at the end each must be sound, and its device must get everything back."""
    allocators: list[bfc.CachingAllocator] = []

    def start(mebibytes: int = 1024, **options: object) -> bfc.CachingAllocator:
        allocators.append(bfc.CachingAllocator(Misbehaving(mebibytes * MIB), **options))
        return allocators[-1]

    yield start
    close_all(allocators)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `sys.unraisablehook` was told."""
    texts: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda entry: texts.append(str(entry.exc_value)))
    return texts


def nothing_is_lost(allocator: bfc.CachingAllocator) -> None:
    """It is sound, nothing is live or waits, everything goes back, and it serves again."""
    allocator.empty_cache()
    allocator.check()
    stats = allocator.memory_stats()
    current = {name: value for name, value in stats.items() if name.endswith(".current")}
    assert set(current.values()) == {0}, current
    assert allocator.sub_allocator.live_bytes == 0
    allocator.deallocate_raw(allocator.allocate_raw(512))


# -- observers and callbacks ----------------------------------------------------------------------


def close(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    allocator.close()


def free(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    while held:
        allocator.deallocate_raw(held.pop())


def release(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    pool.release()


def empty(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    allocator.empty_cache()


def grow(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    with contextlib.suppress(bfc.OutOfMemoryError):
        held.append(allocator.allocate_raw(12 * MIB, SIDE))


def enter(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    with contextlib.suppress(RuntimeError), bfc.use_mem_pool(pool):
        grow(allocator, held, pool)


def settle(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    allocator.set_settings("max_split_size_mb:32,garbage_collection_threshold:0.1")
    allocator.set_memory_fraction(0.5)


def stop(allocator: bfc.CachingAllocator, held: list[int], pool: bfc.MemPool) -> None:
    raise KeyboardInterrupt


ACTIONS = [free, release, empty, grow, enter, settle, stop, close]


@HOW
@pytest.mark.parametrize("nbytes", [25 * MIB, 50 * MIB], ids=["served after", "refused"])
@pytest.mark.parametrize("hook", ["callback", "observer"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_a_hook_may_do_anything(make, action, hook, nbytes, strict) -> None:
    allocator = make(60, strict=strict)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        allocator.deallocate_raw(allocator.allocate_raw(15 * MIB))
    held = [allocator.allocate_raw(24 * MIB)]

    def run(*facts: int) -> bool:
        action(allocator, held, pool)
        return True

    attach = allocator.add_free_memory_callback if hook == "callback" else None
    (attach or allocator.attach_oom_observer)(run)
    allowed = (bfc.OutOfMemoryError, bfc.ClosedError, KeyboardInterrupt)
    with contextlib.suppress(*allowed):
        held.append(allocator.allocate_raw(nbytes))
    allocator.check()
    if allocator.closed:
        return
    if hook == "callback":
        allocator.remove_free_memory_callback(run)
    else:
        allocator.detach_oom_observer(run)
    free(allocator, held, pool)
    pool.release()
    nothing_is_lost(allocator)


@pytest.mark.parametrize("kind", ["observer", "callback"])
def test_what_is_attached_is_a_function_and_what_is_detached_was_attached(make, kind) -> None:
    allocator = make()
    if kind == "observer":
        attach, detach = allocator.attach_oom_observer, allocator.detach_oom_observer
    else:
        attach, detach = allocator.add_free_memory_callback, allocator.remove_free_memory_callback
    with pytest.raises(TypeError, match=rf"{kind} is a function, not NoneType"):
        attach(None)
    with pytest.raises(ValueError, match=rf"print> is not an? .*{kind} of this allocator"):
        detach(print)
    attach(print)
    attach(print)
    detach(print)
    detach(print)
    with pytest.raises(ValueError, match=rf"{kind} of this allocator"):
        detach(print)


def test_a_pool_that_ends_while_memory_is_asked_for_gets_it_all_the_same(make) -> None:
    """Its region would belong to nobody: it goes back with the next emptying."""
    allocator = make()
    pool = bfc.MemPool(allocator)
    scope = bfc.use_mem_pool(pool)

    def leave() -> None:
        scope.__exit__(None, None, None)
        pool.release()

    allocator.add_free_memory_callback(leave)
    scope.__enter__()
    ptr = allocator.allocate_raw(30 * MIB)
    allocator.remove_free_memory_callback(leave)
    assert [region.pool_id for region in allocator.snapshot().regions] == [pool.id]
    allocator.deallocate_raw(ptr)
    assert allocator.empty_cache() == 30 * MIB


# -- streams that are destroyed -------------------------------------------------------------------


def freed_in_a_scope(allocator: bfc.CachingAllocator, pool: bfc.MemPool) -> None:
    with bfc.use_mem_pool(pool):
        for nbytes in (30 * MIB, 40 * MIB):
            ptr = allocator.allocate_raw(nbytes)
            allocator.record_stream(ptr, SIDE)
            allocator.deallocate_raw(ptr)


def test_a_stream_that_is_destroyed_before_its_events_loses_nothing(make, reported) -> None:
    """Under the rules of 2.11, a scope puts the events off; they are tried again by whoever empties
    the cache."""
    allocator = make(strict=True, torch="2.11")
    device = allocator.sub_allocator
    device.hold(SIDE)
    pool = bfc.MemPool(allocator)
    freed_in_a_scope(allocator, pool)
    device.on("fence", raises=bfc.SubAllocatorError("stream 3 was destroyed"))
    allocator.deallocate_raw(allocator.allocate_raw(512))
    assert reported == ["stream 3 was destroyed"] * 2
    allocator.deallocate_raw(allocator.allocate_raw(30 * MIB))
    assert len(reported) == 2, "an allocation does not try them again"
    assert allocator.stats().bytes_waiting_for_streams == 70 * MIB
    allocator.check()
    device.off()
    pool.release()
    assert allocator.stats().bytes_waiting_for_streams == 0
    nothing_is_lost(allocator)


def test_a_free_whose_stream_was_destroyed_can_be_made_again(make) -> None:
    allocator = make()
    device = allocator.sub_allocator
    device.hold(SIDE)
    ptr = allocator.allocate_raw(30 * MIB)
    allocator.record_stream(ptr, SIDE)
    device.on("fence", raises=bfc.SubAllocatorError("stream 3 was destroyed"))
    for _ in range(2):
        with pytest.raises(bfc.SubAllocatorError, match="destroyed"):
            allocator.deallocate_raw(ptr)
        assert allocator.requested_size(ptr) == 30 * MIB
        allocator.check()
    device.off()
    allocator.deallocate_raw(ptr)
    nothing_is_lost(allocator)


def test_closing_waits_for_what_a_scope_has_put_off(make) -> None:
    allocator = make(strict=True)
    device = allocator.sub_allocator
    device.hold(SIDE)
    pool = bfc.MemPool(allocator)
    finished = []
    device.finish = lambda stream: finished.append((stream, device.live_bytes))
    with bfc.use_mem_pool(pool):
        ptr = allocator.allocate_raw(30 * MIB)
        allocator.record_stream(ptr, SIDE)
        allocator.deallocate_raw(ptr)
        allocator.close()
    assert finished
    assert finished[0] == (SIDE, 30 * MIB)


# -- settings at the edge -------------------------------------------------------------------------

MOST = (1 << 44) - 1  # in MiB: 2**64 - 2**20 bytes


@HOW
@pytest.mark.parametrize(
    "options",
    [
        {"max_split_size_mb": MOST},
        {"max_split_size_mb": 32, "max_non_split_rounding_mb": MOST},
        {"max_split_size_mb": MOST, "max_non_split_rounding_mb": MOST},
        {"garbage_collection_threshold": 0.999999},
    ],
    ids=str,
)
def test_settings_of_the_largest_numbers_place_as_far_ones_do(make, options, strict) -> None:
    """No sum of theirs wraps: beside 2**40 bytes, which nothing here reaches, nothing differs."""
    near = {name: min(value, 1 << 20) for name, value in options.items()}
    one, other = make(strict=strict, **options), make(strict=strict, **near)
    for allocator in (one, other):
        kept = [allocator.allocate_raw(size * MIB) for size in (1, 3, 40, 100, 31, 33)]
        for ptr in kept[1:]:
            allocator.deallocate_raw(ptr)
        for size in (2, 20, 32, 34, 90, 99, 500):
            allocator.allocate_raw(size * MIB)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(900 * MIB)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw((1 << 60) - 1)
    assert one.sub_allocator.calls == other.sub_allocator.calls
    assert one.snapshot().regions == other.snapshot().regions


@HOW
@pytest.mark.parametrize("limit", [None, 512 * MIB, (1 << 63) - 1], ids=str)
def test_a_segment_of_all_addresses_is_refused_in_words(make, limit, strict) -> None:
    allocator = make(large_segment_size_mb=MOST, strict=strict, memory_limit=limit)
    small = allocator.allocate_raw(512)
    for _ in range(3):
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(2 * MIB)
    assert allocator.allocate_raw(12 * MIB), "it has a segment of its own size"
    allocator.deallocate_raw(small)
    allocator.check()
    reserved = allocator.memory_stats()["reserved_bytes.all.current"]
    assert reserved == allocator.sub_allocator.live_bytes <= 14 * MIB


@HOW
@pytest.mark.parametrize("nbytes", [(1 << 60) - 1, 1 << 60, (1 << 63) - 1])
def test_a_request_of_all_addresses_is_refused_in_words(make, nbytes, strict) -> None:
    allocator = make(strict=strict, roundup_power2_divisions=8, max_split_size_mb=MOST)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(nbytes)
    nothing_is_lost(allocator)


@pytest.mark.parametrize("state", ["closed", "half made"])
def test_a_size_that_is_refused_untried_meets_a_closed_allocator(state: str) -> None:
    allocator = bfc.CachingAllocator.__new__(bfc.CachingAllocator)
    if state == "closed":
        allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        allocator.close()
    with pytest.raises(bfc.errors.ClosedError):
        allocator.allocate_raw(2**60)


def test_a_size_that_is_refused_untried_is_not_waited_for() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    allocator = bfc.CachingAllocator(device, retry_seconds=600)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(2**60)
    assert device.calls == []
