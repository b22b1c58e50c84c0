"""`leak_check`: what is live at the end of a block, and the lines that allocated it."""

from __future__ import annotations

import threading

import pytest

import bfc
from bfc.testing import Leak, LeakError, leak_check

MIB = 1 << 20
POLICIES = [bfc.BFCAllocator, bfc.CachingAllocator]


@pytest.fixture(params=POLICIES, ids=["bfc", "caching"])
def allocator(request, simulated):
    with request.param(simulated()) as made:
        yield made


def forget(allocator: bfc.Allocator, nbytes: int) -> int:
    return allocator.allocate_raw(nbytes)  # the line that is named


def sizes(leaks: list[Leak]) -> list[int]:
    return sorted(leak.nbytes for leak in leaks)


def test_what_is_freed_is_no_leak(allocator) -> None:
    kept = allocator.allocate_raw(100)
    with leak_check(allocator) as check:
        allocator.deallocate_raw(allocator.allocate_raw(1000))
        allocator.allocate(1000).free()
        allocator.allocate(1000)  # collected
        allocator.deallocate_many(allocator.allocate_many([1, 2, 3]))
        assert check.found() == []
    allocator.deallocate_raw(kept)


def test_the_error_names_the_lines_and_the_sizes(allocator) -> None:
    with pytest.raises(LeakError) as raised, leak_check(allocator):  # noqa: PT012
        for _ in range(2):
            ptr = forget(allocator, 3 * MIB)
        small = forget(allocator, 100)
    leaks = raised.value.leaks
    assert sizes(leaks) == [100, 3 * MIB, 3 * MIB]
    assert {ptr, small} <= {leak.ptr for leak in leaks}
    assert [frame.name for frame in leaks[0].frames] == [
        "forget",
        "test_the_error_names_the_lines_and_the_sizes",
    ]
    text = str(raised.value)
    assert "3 allocations, 6.00 MiB, still live" in text
    assert "2 allocations, 6.00 MiB, the first at" in text
    assert "return allocator.allocate_raw(nbytes)  # the line that is named" in text
    assert text.index("6.00 MiB, the first") < text.index("100 B, the first")


def test_buffers_and_many_are_named_too(allocator) -> None:
    with pytest.raises(LeakError) as raised, leak_check(allocator):
        kept = allocator.allocate(5000), allocator.allocate_many([1, 2, 3])
    assert sizes(raised.value.leaks) == [1, 2, 3, 5000]
    assert all(leak.frames[0].filename == __file__ for leak in raised.value.leaks)
    del kept


def test_an_error_comes_through_as_it_is(allocator) -> None:
    with pytest.raises(KeyError), leak_check(allocator):
        raise KeyError(forget(allocator, 100))


def test_checks_may_be_nested(allocator) -> None:
    with leak_check(allocator) as outer:
        first = forget(allocator, 100)
        with leak_check(allocator) as inner:
            second = forget(allocator, 200)
            assert [leak.ptr for leak in inner.found()] == [second]
            assert inner.found()[0].frames == outer.found()[1].frames
            allocator.deallocate_raw(second)
        assert [leak.ptr for leak in outer.found()] == [first]
        allocator.deallocate_raw(first)


def test_nothing_is_noted_once_the_check_is_over(allocator) -> None:
    with leak_check(allocator) as check:
        pass
    kept = forget(allocator, 100)
    assert check._frames == {}
    assert check.found()[0].frames == ()
    allocator.deallocate_raw(kept)


def test_what_waits_for_a_stream_is_freed(simulated) -> None:
    source = simulated()
    with bfc.CachingAllocator(source) as allocator:
        source.hold(2)
        with leak_check(allocator) as check:
            ptr = allocator.allocate_raw(1000)
            allocator.record_stream(ptr, 2)
            allocator.deallocate_raw(ptr)
        assert check.found() == []
        assert allocator.stats().bytes_waiting_for_streams == 1024
        source.finish(2)


def test_what_a_closed_allocator_held_is_given_back(simulated) -> None:
    allocator = bfc.BFCAllocator(simulated())
    with leak_check(allocator) as check:
        forget(allocator, 100)
        allocator.close()
    assert check.found() == []


def test_what_a_replay_leaves_has_no_lines(allocator) -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [100, 200, 0])
    with pytest.raises(LeakError, match="not from Python") as raised, leak_check(allocator):
        trace.replay(allocator)
    assert sizes(raised.value.leaks) == [200]


def test_notes_of_what_was_freed_are_dropped(allocator) -> None:
    with leak_check(allocator) as check:
        kept = forget(allocator, 77)
        for _ in range(10_000):
            allocator.deallocate_raw(allocator.allocate_raw(100))
        assert len(check._frames) < 2000
        assert sizes(check.found()) == [77]
        assert check.found()[0].frames
        allocator.deallocate_raw(kept)


def test_allocations_of_other_threads_are_named(allocator) -> None:
    with leak_check(allocator) as check:
        thread = threading.Thread(target=forget, args=(allocator, 100))
        thread.start()
        thread.join()
        (leak,) = check.found()
        assert leak.frames[0].name == "forget"
        allocator.deallocate_raw(leak.ptr)


def test_an_error_of_the_noter_takes_the_allocation_back(allocator) -> None:
    def noter(allocation_id: int) -> None:
        raise KeyboardInterrupt

    allocator._swap_noter(noter)
    for allocate in (allocator.allocate_raw, allocator.allocate):
        with pytest.raises(KeyboardInterrupt):
            allocate(100)
    assert allocator._swap_noter(None) is noter
    assert allocator.stats().bytes_in_use == 0
    allocator.check()


def test_only_an_allocator_can_be_checked() -> None:
    with pytest.raises(TypeError, match="takes an allocator, not SimulatedSubAllocator"):
        leak_check(bfc.SimulatedSubAllocator(1))
