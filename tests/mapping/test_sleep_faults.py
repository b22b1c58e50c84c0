"""Sources that fail while tags fall asleep or wake: all is as before, and a repeat succeeds.

Every call of every kind fails once, alone or together with the call that undoes it.
"""

from __future__ import annotations

import functools
import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

import own_interpreter
import pytest
from interrupts import signal_at, strike_at
from sleepers import KINDS, MIB, Block, Broken, fail_at, failing_host, recover
from stopped_thread import STOPPED, fork_meanwhile

import bfc

ON = "expandable_segments:True"
Make = Callable[[bfc.SubAllocator], bfc.Allocator]


def expandable(source: bfc.SubAllocator) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(source, settings=ON)


def stitched(source: bfc.SubAllocator) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB")


#: Of blocks in MiB; the second and the fourth are freed again.
SIZES = {expandable: (21, 25, 22, 23, 1), stitched: (4, 8, 4, 6, 2)}
#: The same in a script.
MADE = {
    expandable: f'bfc.CachingAllocator(source, settings="{ON}")',
    stitched: 'bfc.BFCAllocator(source, virtual_memory=True, page_size="4 MiB")',
}
BOTH = pytest.mark.parametrize("make", [expandable, stitched])
KEEP = pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])


class World:
    """Two tags, one of which has holes, and blocks without a tag."""

    def __init__(self, make: Make, keep: bool, source: bfc.SubAllocator | None = None) -> None:
        self.keep = keep
        self.source = failing_host() if source is None else source
        self.pool = make(self.source)
        with self.pool.tag("a"):
            blocks = [Block(self.pool, size * MIB, size) for size in SIZES[make]]
            blocks.pop(3).buffer.free()
            blocks.pop(1).buffer.free()
            if make is stitched:
                blocks.append(Block(self.pool, 12 * MIB, 9))  # of pages that lie apart
                assert self.pool.page_stats()["stitches"] == 1
            self.pool.empty_cache()
            blocks += [Block(self.pool, 1000, 1), Block(self.pool, 3 * MIB, 2, 1)]
        with self.pool.tag("b"):
            blocks += [Block(self.pool, SIZES[make][0] * MIB, 3)]
        self.tagged = blocks
        self.plain = [Block(self.pool, 3 * MIB, 4)]

    def sleep(self) -> None:
        if self.keep:
            self.pool.sleep(keep="host")
        else:
            self.pool.sleep()

    def wake(self) -> None:
        self.pool.wake()

    def state(self) -> tuple[Any, ...]:
        stats = self.pool.stats()
        return (self.pool.asleep, stats, self.source.live_bytes)

    def check(self) -> None:
        """Nothing is unaccounted for."""
        self.pool.check()
        if isinstance(self.pool, bfc.CachingAllocator):
            figures = self.pool.page_stats()
            assert figures["page_bytes"] == self.source.live_bytes
            lost = figures["lost_bytes"]
            assert self.pool.stats().bytes_reserved == self.source.live_bytes - lost
        for block in self.plain:
            block.check()

    def check_contents(self, of_dropped: bool = True) -> None:
        assert not self.pool.asleep
        for block in self.tagged:
            if self.keep or of_dropped:
                block.check()
            else:
                block.write()
            memoryview(block.buffer).release()

    def end(self) -> None:
        """The source has recovered: all goes on, and all goes back."""
        self.pool.wake()
        self.check_contents(of_dropped=False)
        self.sleep()
        assert self.source.live_bytes == self.pool.stats().bytes_reserved <= 20 * MIB
        self.pool.wake()
        self.check_contents(of_dropped=False)
        self.check()
        assert self.source.live_bytes == self.pool.stats().bytes_reserved
        self.pool.close()
        assert self.source.live_bytes == 0


@functools.cache
def calls_of(make: Make, kind: str, keep: bool, op: str) -> int:
    """How many calls of a kind an operation makes."""
    world = World(make, keep)
    if op == "wake":
        world.sleep()
    before = world.source.counts[kind]
    getattr(world, op)()
    made = world.source.counts[kind] - before
    world.end()
    return made


@pytest.mark.sampled(4)
@BOTH
@KEEP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sleep", "wake"])
def test_each_call_fails_once(make: Make, op: str, kind: str, keep: bool) -> None:
    count = calls_of(make, kind, keep, op)
    for number in range(1, count + 1):
        world = World(make, keep)
        if op == "wake":
            world.sleep()
        before = world.state()
        fail_at(world.source, kind, number)
        with pytest.raises(Broken):
            getattr(world, op)()
        assert world.source.failed == [kind]
        assert world.state() == before, f"{kind} {number}"
        world.check()
        if op == "sleep":
            world.check_contents(of_dropped=kind != "release" or number == 1)
        getattr(world, op)()
        world.check()
        recover(world.source)
        world.end()


@pytest.mark.long
@BOTH
def test_each_kind_of_call_is_made(make: Make) -> None:
    made = {
        (op, kind): calls_of(make, kind, True, op) for op in ("sleep", "wake") for kind in KINDS
    }
    needed = {"sleep": ["wait", "copy", "unmap", "release"]}
    needed["wake"] = ["create", "map", "set_access", "copy"]
    for op, kinds in needed.items():
        for kind in kinds:
            assert made[op, kind] >= 2, (op, kind)


#: An operation, what fails in it, and what fails while that is undone.
TWICE = [
    ("sleep", "unmap", "map"),
    ("sleep", "unmap", "set_access"),
    ("sleep", "release", "create"),
    ("sleep", "release", "map"),
    ("sleep", "release", "set_access"),
    ("sleep", "release", "copy"),
    ("wake", "create", "release"),
    ("wake", "map", "unmap"),
    ("wake", "map", "release"),
    ("wake", "set_access", "unmap"),
    ("wake", "set_access", "release"),
    ("wake", "copy", "unmap"),
    ("wake", "copy", "release"),
]


#: Where contents are dropped, nothing is copied.
TWICE_BY_KEEP = [
    pytest.param(*case, keep, id=f"{'-'.join(case)}-{'kept' if keep else 'dropped'}")
    for case in TWICE
    for keep in (True, False)
    if keep or "copy" not in case
]


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize(("op", "kind", "undoing", "keep"), TWICE_BY_KEEP)
def test_what_undoes_it_fails_as_well(
    make: Make, op: str, kind: str, undoing: str, keep: bool
) -> None:
    """The tags sleep then. Nothing is lost: what was kept comes back."""
    happened = 0
    before = calls_of(make, undoing, keep, op) if undoing == "copy" else 0
    for number in range(1, calls_of(make, kind, keep, op) + 1, 2):
        for second in (1, 2) if number == 1 else (1,):
            world = World(make, keep)
            if op == "wake":
                world.sleep()
            more = (number + second,) if kind == undoing else ()
            fail_at(world.source, kind, number, *more)
            if not more:
                fail_at(world.source, undoing, before + second)
            with pytest.raises(Broken) as caught:
                getattr(world, op)()
            notes = getattr(caught.value, "__notes__", [])
            asleep = op == "wake" or any("sleep all the same" in note for note in notes)
            assert world.pool.asleep == ({"a", "b"} if asleep else set())
            happened += len(world.source.failed) > 1
            recover(world.source)
            world.check()
            world.end()
    assert happened


@pytest.mark.long
@BOTH
@KEEP
def test_all_that_undoes_it_fails(make: Make, keep: bool) -> None:
    for op, kind in (("sleep", "unmap"), ("sleep", "release"), ("wake", "set_access")):
        for number in range(1, calls_of(make, kind, keep, op) + 1):
            world = World(make, keep)
            if op == "wake":
                world.sleep()
            fail_at(world.source, kind, *range(number, 100))
            for undoing in ("create", "map", "set_access", "unmap", "release"):
                if undoing != kind and not (op == "wake" and undoing in ("create", "map")):
                    late = op == "sleep" and kind == "release" and undoing == "unmap"
                    fail_at(world.source, undoing, *range(10 if late else 1, 100))
            with pytest.raises(Broken):
                getattr(world, op)()
            world.check()
            assert bool(world.pool.asleep) == (op == "wake" or kind == "release" or number > 1)
            if world.pool.asleep:
                with pytest.raises(Broken):
                    world.wake()
            world.check()
            recover(world.source)
            world.end()


@BOTH
@KEEP
def test_closing_after_all_has_failed(make: Make, keep: bool) -> None:
    for kind in ("unmap", "release"):
        world = World(make, keep)
        fail_at(world.source, kind, *range(2, 100))
        fail_at(world.source, "map", *range(1, 100))
        with pytest.raises(Broken):
            world.sleep()
        recover(world.source)
        world.pool.close()
        assert world.source.live_bytes == 0


@BOTH
def test_freeing_after_all_has_failed(make: Make) -> None:
    world = World(make, True)
    fail_at(world.source, "unmap", *range(2, 100))
    fail_at(world.source, "map", *range(1, 100))
    with pytest.raises(Broken):
        world.sleep()
    assert world.pool.asleep == {"a", "b"}
    recover(world.source)
    for block in world.tagged:
        block.buffer.free()
    world.tagged.clear()
    world.check()
    world.pool.wake()
    world.check()
    world.pool.empty_cache()
    assert world.source.live_bytes == world.pool.stats().bytes_reserved <= 20 * MIB
    world.end()


# -- interrupts ------------------------------------------------------------------------------------


def goes_so_far(make: Make, trace: Callable[..., Any], op: str) -> bool:
    """One of both with a trace function, contents and all. Whether that raised."""
    world = World(make, True, bfc.HostSubAllocator("1 GiB"))
    raised = False
    for step in ("sleep", "wake"):
        before = sys.gettrace()
        sys.settrace(trace if step == op else before)
        try:
            getattr(world, step)()
        except BaseException:
            sys.settrace(before)
            raised = True
        finally:
            sys.settrace(before)
        world.check()
        if not world.pool.asleep:
            world.check_contents()
    world.end()
    return raised


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("op", ["sleep", "wake"])
def test_a_ctrl_c_at_lines_of_a_source(make: Make, op: str) -> None:
    """It reaches the program, and nothing is lost."""
    for line in itertools.count(1, 41):
        try:
            raised = goes_so_far(make, signal_at(line), op)
        except BaseException as error:
            error.add_note(f"at line {line}")
            raise
        if not raised:
            break
    assert line > 30


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("op", ["sleep", "wake"])
def test_an_exception_at_each_line_of_a_source(make: Make, op: str) -> None:
    """On a simulated device, which undoes whatever is struck."""
    for line in itertools.count(1):
        device = bfc.SimulatedSubAllocator("400 MiB")
        pool = make(device)
        with pool.tag("a"):
            live = [pool.allocate_raw(size * MIB) for size in (25, 3, 26)]
        pool.deallocate_raw(live.pop(1))
        with pool.tag("b"):
            live.append(pool.allocate_raw(1000))
        raised = False
        for step in ("sleep", "wake"):
            before = pool.asleep
            sys.settrace(strike_at(line) if step == op else None)
            try:
                getattr(pool, step)()
            except BaseException as error:
                sys.settrace(None)
                raised = True
                notes = getattr(error, "__notes__", [])
                assert pool.asleep == before or notes, f"line {line}"
            finally:
                sys.settrace(None)
            pool.check()
            assert device.live_bytes >= pool.stats().bytes_reserved, f"line {line}"
        pool.wake()
        pool.check()
        accessible = device.accessible
        for address in live:
            end = address + pool.allocated_size(address)
            assert any(at <= address and end <= at + size for at, size in accessible)
        pool.sleep()
        assert device.live_bytes == 0
        pool.close()
        assert device.live_bytes == 0
        if not raised:
            break
    assert line > 30


@BOTH
def test_a_ctrl_c_while_contents_are_copied(make: Make) -> None:
    world = World(make, True)
    world.source.on("copy", first=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        world.sleep()
    assert world.pool.asleep == {"a", "b"}
    with pytest.raises(KeyboardInterrupt):
        world.wake()
    assert not world.pool.asleep
    world.check_contents()
    world.check()


# -- from inside, and from other threads -----------------------------------------------------------


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("kind", ["wait", "copy", "unmap", "release", "create", "map"])
def test_a_source_that_calls_its_allocator(make: Make, kind: str) -> None:
    """It is told in words that it cannot; frees and allocations can be made."""
    said = []

    def use() -> None:
        for call in (world.pool.sleep, world.pool.wake):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
        world.pool.allocate(3 * MIB).free()
        with world.pool.tag("a"), pytest.raises(bfc.AsleepError):
            world.pool.allocate(512)

    world = World(make, True)
    world.pool.allocate(3 * MIB).free()  # nothing can be mapped from inside
    if kind in ("create", "map"):
        world.sleep()
        world.source.on(kind, 1, first=use)
        world.wake()
    else:
        world.source.on(kind, 1, first=use)
        world.sleep()
    assert said
    assert all("called sleep() or wake()" in it for it in said)
    world.pool.wake()
    world.check_contents()
    world.end()


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("kind", ["copy", "unmap", "release"])
def test_a_source_that_closes_its_allocator(make: Make, kind: str) -> None:
    world = World(make, True)
    world.source.on(kind, 1, first=world.pool.close)
    world.sleep()
    assert world.pool.closed
    world.pool.close()
    assert world.source.live_bytes == 0


@pytest.mark.long
@BOTH
def test_threads_that_put_to_sleep_wake_and_allocate(make: Make) -> None:
    own_interpreter.run(
        f"""
import random
source = bfc.HostSubAllocator("2 GiB")
pool = {MADE[make]}
stop = time.monotonic() + 6
faults = []

def guarded(work):
    def run():
        try:
            while time.monotonic() < stop:
                work()
        except BaseException as error:
            faults.append(error)
            raise
    thread = threading.Thread(target=run)
    thread.start()
    return thread

with pool.tag("a"):
    fixed = pool.allocate("30 MiB")
memoryview(fixed)[:4] = b"abcd"
memoryview(fixed)[-4:] = b"wxyz"

def allocate():
    try:
        with pool.tag("a"):
            buffer = pool.allocate(random.randint(1, 5 << 20))
        with memoryview(buffer) as view:
            view[:1] = view[-1:] = b"x"
        buffer.free()
    except (bfc.AsleepError, BufferError):
        time.sleep(0.001)
    pool.allocate(3 << 20).free()

def nap():
    try:
        pool.sleep(keep="host")
    except BufferError:
        pass
    pool.wake()

def empty():
    pool.empty_cache()
    pool.stats()
    pool.snapshot()
    time.sleep(0.005)

threads = [guarded(work) for work in (allocate, allocate, nap, nap, empty)]
for thread in threads:
    thread.join()
assert not faults, faults
pool.wake()
pool.check()
assert bytes(fixed)[:4] == b"abcd" and bytes(fixed)[-4:] == b"wxyz"
pool.close()
assert source.live_bytes == 0
"""
    )


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@BOTH
def test_a_fork_while_tags_sleep(make: Make) -> None:
    """Both processes wake them, each with memory of its own."""
    own_interpreter.run(
        f"""
source = bfc.HostSubAllocator("1 GiB")
pool = {MADE[make]}
with pool.tag("a"):
    blocks = [pool.allocate(size << 20) for size in (3, 40, 5)]
for number, block in enumerate(blocks):
    memoryview(block)[-4:] = bytes([number] * 4)
pool.sleep(keep="host")

def use(mark):
    pool.wake()
    for number, block in enumerate(blocks):
        assert bytes(block)[-4:] == bytes([number] * 4)
        memoryview(block)[-4:] = bytes([mark] * 4)
    pool.sleep(keep="host")
    pool.wake()
    time.sleep(0.3)
    for block in blocks:
        assert bytes(block)[-4:] == bytes([mark] * 4)
    pool.check()
    pool.close()
    assert pool.sub_allocator.live_bytes == 0

wait = in_child(lambda: use(77))
use(88)
wait()
"""
    )


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("op", ["sleep", "wake"])
def test_a_fork_while_another_thread_puts_to_sleep_or_wakes(make: Make, op: str) -> None:
    """In the child, where that thread does not exist, the tags sleep. What was being copied out is
    lost, and waking says so."""
    own_interpreter.run(
        f"""
class Stopped(bfc.HostSubAllocator):
    kind, is_after = None, False
    inside, go = threading.Event(), threading.Event()

def around(name):
    def method(self, *arguments):
        hit, here = name == self.kind, self.is_after
        if hit:
            Stopped.kind = None
            if not here:
                self.inside.set(), self.go.wait(30)
        answer = getattr(bfc.HostSubAllocator, name)(self, *arguments)
        if hit and here:
            self.inside.set(), self.go.wait(30)
        return answer
    return method

KINDS = ["copy", "unmap", "release", "create", "map", "set_access"]
for name in KINDS:
    setattr(Stopped, name, around(name))

def go_on(pool, block, kind):
    pool.check()
    with pool.tag("a"):
        try:
            pool.allocate(512)
        except bfc.AsleepError:
            pass
    try:
        pool.sleep()
        assert pool.asleep == {{"a"}}, pool.asleep
        if "{op}" == "sleep":
            try:
                pool.wake()
                raise SystemExit("it woke")
            except bfc.AsleepError as error:
                assert "forked" in str(error)
            block.free()
        else:
            pool.wake()
            assert bytes(block)[-4:] == b"wxyz"
        pool.check()
        pool.allocate(3 << 20).free()
    finally:
        pool.close()

for kind in KINDS[:3] if "{op}" == "sleep" else KINDS[3:]:
    for is_after in (False, True):
        source = Stopped("1 GiB")
        pool = {MADE[make]}
        with pool.tag("a"):
            block = pool.allocate(45 << 20)
        memoryview(block)[-4:] = b"wxyz"
        if "{op}" == "wake":
            pool.sleep(keep="host")
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        Stopped.kind, Stopped.is_after = kind, is_after
        call = pool.wake if "{op}" == "wake" else lambda: pool.sleep(keep="host")
        thread = threading.Thread(target=call)
        thread.start()
        assert Stopped.inside.wait(30)
        def in_it():
            try:
                go_on(pool, block, kind)
            except BaseException:
                import traceback
                print(kind, is_after, file=sys.stderr)
                traceback.print_exc()
                raise
        wait = in_child(in_it)
        wait()
        Stopped.go.set()
        thread.join()
        pool.wake()
        assert bytes(block)[-4:] == b"wxyz"
        pool.check()
        pool.close()
        assert pool.sub_allocator.live_bytes == 0
"""
    )


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("op", ["wake", "close"])
def test_a_fork_while_what_could_not_be_unmapped_before_goes(make: Make, op: str) -> None:
    own_interpreter.run(
        f"""{STOPPED}
for kind in ("unmap", "release"):
    for is_after in (False, True):
        source = Stopped("256 MiB")
        pool = {MADE[make]}
        with pool.tag("a"):
            blocks = [pool.allocate(6 << 20), pool.allocate(1000)]
        source.fail_at(range(2, 9), "unmap")
        source.fail_at(1, "map")    # and what was unmapped cannot be mapped again
        with contextlib.suppress(bfc.SubAllocatorError):
            pool.sleep(drop=["a"])
        assert pool.asleep and source.mappings
        source.fail_at(0, "unmap")
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        Stopped.kind, Stopped.is_after = kind, is_after
        for block in blocks if "{op}" == "close" else ():
            block.free()
        thread = threading.Thread(target=pool.{op})
        thread.start()
        assert Stopped.inside.wait(30)

        def in_it():
            if "{op}" == "wake":
                pool.wake()
                assert not pool.asleep
                pool.check()
            pool.close()
            assert not source.live_bytes and not source.reservations

        wait = in_child(in_it)
        wait()
        Stopped.go.set()
        thread.join()
        pool.check()
        pool.close()
        assert not source.live_bytes
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [expandable, stitched])
def test_a_fork_at_any_call_while_another_thread_sleeps_and_wakes(make: Make) -> None:
    work = """
def work(allocator):
    with allocator.tag("a"):
        live = [allocator.allocate_raw(size << 20) for size in (4, 4, 2, 4, 4, 2, 4)]
        for ptr in live[::2]:
            allocator.deallocate_raw(ptr)
        allocator.deallocate_raw(allocator.allocate_raw(9 << 20))
    allocator.sleep(drop=["a"])
    for ptr in live[3::4]:
        allocator.deallocate_raw(ptr)
    allocator.wake()
    allocator.release_free_regions()
    allocator.sleep(drop=["a"])
"""
    made = f"lambda source: {MADE[make]}"
    fork_meanwhile(made, work, (12, 8, 1), ("map", "unmap", "release"), every=True)


@pytest.mark.parametrize("options", [{"settings": ON}, {"stitch": True}], ids=["expand", "stitch"])
def test_wake_needs_no_room_for_what_holds_nothing(options: dict[str, Any]) -> None:
    """Also where more is reserved than the limit allows by now."""
    with bfc.CachingAllocator(bfc.HostSubAllocator("256 MiB"), **options) as pool:
        with pool.tag("a"):
            block = pool.allocate("3 MiB")
        rest = pool.allocate("60 MiB")
        pool.sleep(drop=["a"])
        block.free()
        pool.set_memory_fraction(0.1)
        pool.wake("a")
        assert not pool.asleep
        rest.free()
        with pool.tag("a"):
            pool.allocate("3 MiB").free()


def test_wake_says_who_refused_and_how_much_is_missing() -> None:
    source = bfc.HostSubAllocator("128 MiB")
    with expandable(source) as pool, bfc.CachingAllocator(source) as other:
        with pool.tag("a"):
            block = pool.allocate("60 MiB")
        pool.sleep(drop=["a"])
        taken = other.allocate("100 MiB")
        with pytest.raises(bfc.OutOfMemoryError, match=r"asked for 60\.00 MiB") as full:
            pool.wake()
        assert "refused by    HostSubAllocator(128.00 MiB, 100.00 MiB live)" in str(full.value)
        with pytest.raises(bfc.OutOfMemoryError, match=r"100.00 MiB live\), asked last for 20.00"):
            pool.allocate("60 MiB")
        taken.free()
        other.release_free_regions()
        pool.wake()
        assert not pool.asleep
        pool.set_memory_fraction(0.6)
        with pytest.raises(bfc.OutOfMemoryError, match="refused by    the memory limit"):
            pool.allocate("90 MiB")
        block.free()
