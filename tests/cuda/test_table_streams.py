"""Uses by streams, frees behind them and tags, as a program of C++ makes them through the table of
`bfc_allocator.h`: as PyTorch does after `install`."""

from __future__ import annotations

import contextvars
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import raw_cuda
import waiting
from closing import close_all
from cpp import built_library
from table_player import ALLOCATE, FREE, RECORD, SOURCE, Player
from torch_table import FAILED, OK, Table

import bfc
from bfc.testing import cuda_emulator

MIB = 1 << 20
POLICIES: dict[str, Callable[..., Any]] = {
    "caching": bfc.CachingAllocator,
    "stitching": partial(bfc.CachingAllocator, stitch=True),
    "expandable": partial(bfc.CachingAllocator, settings="expandable_segments:True"),
}
#: The driver's calls for an event, and those around them.
CALLS = ("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize")
CALLS += ("cuStreamIsCapturing", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode")
unless_it_recounts = pytest.mark.skipif(
    os.environ.get("BFC_DEBUG") == "2", reason="it checks after each change, with the GIL"
)


class Counting(bfc.CachingAllocator):
    """Counts the requests that Python serves: all others took no GIL."""

    misses = 0

    def allocate_raw(self, *arguments: Any, **named: Any) -> int:
        self.misses += 1
        return super().allocate_raw(*arguments, **named)


@pytest.fixture(scope="session")
def player_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_library(SOURCE, tmp_path_factory.mktemp("player"))


Make = Callable[..., tuple[Any, Player]]


@pytest.fixture
def make(player_library: Path) -> Iterator[Make]:
    """Makes pools, each with its player."""
    made: list[tuple[Any, Player]] = []

    def one(policy: Callable[..., Any] = bfc.CachingAllocator, **options: Any) -> Any:
        pool = policy(bfc.CUDASubAllocator(), **({"memory_limit": "256 MiB"} | options))
        made.append((pool, Player(player_library, Table(pool))))
        return made[-1]

    yield one
    close_all([pool for pool, _player in made])


def waits(pool: Any) -> int:
    return int(pool.stats().bytes_waiting_for_streams)


# -- the GIL ---------------------------------------------------------------------------------------


@unless_it_recounts
@pytest.mark.parametrize("policy", POLICIES)
def test_no_use_no_free_and_no_hit_takes_the_gil(make: Make, emulated, side, policy: str) -> None:
    """While memory waits for a stream, as it comes back, and with a tag open in this thread."""
    pool, player = make(POLICIES[policy])
    player.play(*[(ALLOCATE, slot, 3 * MIB) for slot in range(4)])
    player.play(*[(FREE, slot) for slot in range(3)])
    emulated.hold(side)
    reserved = pool.stats().bytes_reserved
    one = [(RECORD, 3, 0, side), (FREE, 3), (ALLOCATE, 0, 3 * MIB), (ALLOCATE, 1, 3 * MIB)]
    assert player.made_without_gil(*one) == len(one)
    assert waits(pool) == 3 * MIB
    with pool.tag("weights"):
        two = [(FREE, 0), (ALLOCATE, 0, 3 * MIB), (RECORD, 0, 0, side), (FREE, 0)]
        assert player.made_without_gil(*two) == len(two)
        assert waits(pool) == 6 * MIB
    emulated.release(side)
    three = [(ALLOCATE, slot, 3 * MIB) for slot in (0, 2, 3)]
    assert player.made_without_gil(*three) == len(three)
    assert waits(pool) == 0
    assert pool.stats().bytes_reserved == reserved, "what has waited is used again"
    player.play(*[(FREE, slot) for slot in range(4)])


@unless_it_recounts
def test_no_hit_takes_the_gil_in_a_scope_where_2_11_asks_no_event(
    make: Make, emulated, side
) -> None:
    """What has waited for a stream comes back behind the scope."""
    pool, player = make(torch="2.11")
    player.play(*[(ALLOCATE, slot, 3 * MIB) for slot in range(3)])
    emulated.hold(side)
    player.play((RECORD, 0, 0, side), (FREE, 0))
    emulated.release(side)
    with bfc.use_mem_pool(bfc.MemPool(pool)):
        player.play((ALLOCATE, 0, 3 * MIB), (FREE, 0))
        with emulated.counting() as calls:
            assert player.made_without_gil(*[(ALLOCATE, 0, 3 * MIB), (FREE, 0)] * 5) == 10
            pool.mark_capture_begin()  # as PyTorch's scopes of 2.11 do
            assert player.made_without_gil(*[(ALLOCATE, 0, 3 * MIB), (FREE, 0)] * 5) == 10
            pool.mark_capture_end()
        assert "cuEventQuery" not in calls
        assert waits(pool) == 3 * MIB
    assert player.made_without_gil((ALLOCATE, 0, 3 * MIB)) == 1
    assert waits(pool) == 0
    player.play(*[(FREE, slot) for slot in range(3)])


@unless_it_recounts
@pytest.mark.parametrize("policy", ["stitching", "expandable"])
def test_a_hit_in_a_tag_takes_no_gil(make: Make, policy: str) -> None:
    options = dict(POLICIES[policy].keywords)  # type: ignore[attr-defined]
    pool, player = make(Counting, **options)

    def two(first: int) -> int:
        """How many of two requests went through Python. Both stay live."""
        before = pool.misses
        player.play((ALLOCATE, first, 1000), (ALLOCATE, first + 1, 1000))
        return int(pool.misses - before)

    with pool.tag("kv"):
        assert two(0) == 1, "the first finds no memory"
        assert two(2) == 0
        with pool.tag(None):
            assert two(4) == 1
            assert two(6) == 0
        inherited = contextvars.copy_context()
        asked = inherited.run(lambda: (two(8), two(10)))
        assert asked == (1, 0), "Python is asked once what a context has inherited"
        assert two(12) == 0
    with pool.tag("weights"):
        assert inherited.run(lambda: (two(14), two(16))) == (1, 0)
    figures = pool.stats().by_owner
    assert figures["kv"] == (4 + 2 + 2 + 2) * 1024, "and what was left is inherited no more"
    assert figures[""] == 8 * 1024
    pool.sleep(drop=["kv"])
    assert pool.stats().bytes_asleep > 0
    with pool.tag("kv"):
        result, why, _ptr = player.table.try_allocate(1000)
    assert result == FAILED
    assert "kv' sleeps" in why
    pool.wake("kv")
    player.play(*[(FREE, slot) for slot in range(18)])


def test_a_thread_of_its_own_is_in_no_tag(make: Make) -> None:
    """As autograd's are: those of Python without a context, and those that Python does not know."""
    pool, player = make(POLICIES["stitching"])
    with pool.tag("kv"):
        player.play((ALLOCATE, 0, 1000))
        player.play_elsewhere((ALLOCATE, 1, 1000))
        thread = threading.Thread(target=player.play, args=((ALLOCATE, 2, 1000),))
        thread.start()
        waiting.joined(thread)
    assert pool.stats().by_owner == {"kv": 1024, "": 2048}
    player.play(*[(FREE, slot) for slot in range(3)])


# -- the same as from Python, and as a model says --------------------------------------------------


class Queues:
    """What was freed and waits, as PyTorch's `process_events` goes through it."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.queues: dict[int, deque[list[Any]]] = {}
        self.held_from: dict[int, int] = {}

    def free(self, size: int, streams: set[int]) -> None:
        left = [len(streams), size]
        for stream in streams:
            self.queues.setdefault(stream, deque()).append([left, stream in self.held])

    def let_go(self, stream: int) -> None:
        self.held.discard(stream)
        for entry in self.queues.get(stream, ()):
            entry[1] = False

    def ask(self) -> None:
        for queue in self.queues.values():
            while queue and not queue[0][1]:
                queue.popleft()[0][0] -= 1

    @property
    def waits(self) -> int:
        lefts = {id(left): left for queue in self.queues.values() for left, _held in queue}
        return sum(size for left, size in lefts.values() if left)


class Places:
    """Addresses as (number of the region, offset), which two pools can have in common."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.starts = pool, {}

    def of(self, ptr: int) -> tuple[int, int]:
        regions = self.pool.snapshot().regions
        for region in sorted(regions, key=lambda region: region.ptr):
            if region.ptr not in self.starts:
                self.starts[region.ptr] = len(self.starts)
        region = next(region for region in regions if region.ptr <= ptr < region.ptr + region.size)
        return self.starts[region.ptr], ptr - region.ptr


class Twins:
    """A pool that is called through the table, and one that is called from Python."""

    def __init__(self, make: Make, emulated: Any, streams: tuple[int, ...], seed: int) -> None:
        self.draw, self.emulated, self.streams = random.Random(seed), emulated, streams
        (self.pool, self.player), (self.other, _unused) = make(), make()
        self.places = Places(self.pool), Places(self.other)
        self.model = Queues()
        self.live: list[tuple[int, int, int, int, set[int]]] = []

    def allocate(self) -> None:
        size = self.draw.choice([self.draw.randrange(1, 4096), self.draw.randrange(1, 3 * MIB)])
        on = self.draw.choice((0, *self.streams))
        one = self.player.table.allocate(size, on)
        other = int(self.other.allocate_raw(size, on))
        self.model.ask()
        assert self.places[0].of(one) == self.places[1].of(other)
        rounded = (size + 511) // 512 * 512
        split = next(c for c in self.pool.snapshot().live_chunks() if c.ptr == one).size
        self.live.append((one, other, max(rounded, split), on, set()))

    def record(self) -> None:
        one, other, _size, on, uses = self.draw.choice(self.live)
        stream = self.draw.choice((0, *self.streams))
        assert self.player.table.record_stream(one, stream) == (OK, "")
        self.other.record_stream(other, stream)
        if stream != on:
            uses.add(stream)

    def free(self) -> None:
        one, other, size, _on, uses = self.live.pop(self.draw.randrange(len(self.live)))
        assert self.player.table.free(one) == OK
        self.other.deallocate_raw(other)
        if uses:
            self.model.free(size, uses)

    def hold(self) -> None:
        stream = self.draw.choice(self.streams)
        if stream in self.model.held:
            self.emulated.release(stream)
            self.model.let_go(stream)
        else:
            self.emulated.hold(stream)
            self.model.held.add(stream)

    def step(self) -> None:
        choice = self.draw.random()
        if choice < 0.4 or not self.live:
            self.allocate()
        elif choice < 0.65:
            self.record()
        elif choice < 0.92:
            self.free()
        else:
            self.hold()
        assert waits(self.pool) == waits(self.other) == self.model.waits
        assert self.pool.memory_stats() == self.other.memory_stats()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_what_waits_and_what_is_served_are_the_same_as_from_python(
    make: Make, emulated, seed: int
) -> None:
    with raw_cuda.stream() as one, raw_cuda.stream() as two:
        twins = Twins(make, emulated, (one, two), seed)
        for step in range(400):
            try:
                twins.step()
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {step}")
                raise
        emulated.release_all()
        for ptr, other, *_rest in twins.live:
            twins.player.table.free(ptr)
            twins.other.deallocate_raw(other)
        twins.pool.release_free_regions()
        assert waits(twins.pool) == 0


class Fenced(bfc.CUDASubAllocator):
    """Counts the fences that it makes."""

    made = 0

    def fence(self, stream: int) -> Any:
        self.made += 1
        return super().fence(stream)


def test_fences_of_a_subclass_are_not_passed_over(player_library: Path, emulated, side) -> None:
    source = Fenced()
    with bfc.CachingAllocator(source, memory_limit="256 MiB") as pool:
        player = Player(player_library, Table(pool))
        emulated.hold(side)
        player.play((ALLOCATE, 0, 1000), (RECORD, 0, 0, side), (FREE, 0))
        assert (source.made, waits(pool)) == (1, 1024)
        emulated.release(side)
        player.play((ALLOCATE, 0, 1000), (FREE, 0))
        assert waits(pool) == 0


def test_uses_that_python_notes_are_waited_for_as_well(make: Make, emulated, side) -> None:
    pool, player = make()
    with raw_cuda.stream() as other:
        for first, then in ((pool, player.table), (player.table, pool)):
            ptr = player.table.allocate(1000)
            first.record_stream(ptr, side)
            then.record_stream(ptr, other)
            emulated.hold(side)
            emulated.hold(other)
            player.table.free(ptr)
            emulated.release(side)
            player.table.free(player.table.allocate(1000))
            assert waits(pool) == 1024, "the other stream may still use it"
            emulated.release(other)
            assert player.table.allocate(1000) == ptr
            assert waits(pool) == 0
            player.table.free(ptr)


def test_a_consumer_is_waited_for_as_well(make: Make, emulated, side) -> None:
    """A DLPack consumer on one stream, after another stream was noted without the GIL."""
    pool, player = make()
    player.play((ALLOCATE, 0, 1000), (FREE, 0))
    with raw_cuda.stream() as other:
        buffer = pool.allocate(1000)
        ptr = buffer.ptr
        assert player.table.record_stream(ptr, other) == (OK, "")
        view = buffer.__dlpack__(stream=side)
        emulated.hold(side)
        emulated.hold(other)
        del view, buffer
        for stream in (side, other):
            player.table.free(player.table.allocate(1000))
            assert waits(pool) == 1024
            emulated.release(stream)
        assert player.table.allocate(1000) == ptr
        player.table.free(ptr)


# -- captures --------------------------------------------------------------------------------------


def test_a_capture_puts_a_free_off_and_asks_no_event(make: Make, emulated, side) -> None:
    pool, player = make()
    with raw_cuda.stream() as captured:
        for slot, stream in ((0, side), (1, captured)):
            player.play((ALLOCATE, slot, 1000), (RECORD, slot, 0, stream))
        emulated.hold(side)
        player.play((FREE, 0))
        pool.mark_capture_begin()
        raw_cuda.begin_capture(captured)
        emulated.release(side)
        with emulated.counting() as calls:
            player.play((FREE, 1), (ALLOCATE, 2, 1000, captured))
        assert not {name for name in calls if name.startswith("cuEvent")}
        assert waits(pool) == 2048
        player.play((RECORD, 2, 0, side), (FREE, 2))
        raw_cuda.call("cuGraphDestroy", raw_cuda.call("cuStreamEndCapture", captured))
        pool.mark_capture_end()
        for _ in range(2):
            player.play((ALLOCATE, 3, 1000), (FREE, 3))
        assert waits(pool) == 0


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_once_loses_nothing(make: Make, emulated, side, name: str, monkeypatch):
    """At each place where it is called."""
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    pool, player = make(memory_limit="4 MiB")
    reached = 0
    for place in range(1, 60):
        emulated.clear()
        emulated.fail(name, "CUDA_ERROR_UNKNOWN", at=place)
        emulated.hold(side)
        player.table.try_allocate(3 * MIB)
        ptrs = [player.table.try_allocate(size)[2] for size in (1000, 2000)]
        for ptr in filter(None, ptrs):
            player.table.record_stream(ptr, side)
            player.table.free(ptr)
        emulated.release(side)
        again = [player.table.try_allocate(size)[2] for size in (1000, 2000)]
        was_reached = emulated.count(name) >= place
        emulated.clear()
        for chunk in pool.snapshot().live_chunks():
            player.table.free(chunk.ptr)
        pool.release_free_regions()
        pool.check()
        assert pool.stats().bytes_in_use == 0, f"{name} at its call {place}: {ptrs}, {again}"
        assert pool.snapshot().regions == ()
        reached += was_reached
        if not was_reached:
            break
    assert reached > 0 or name == "cuEventSynchronize"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_threads_free_behind_streams_beside_all_that_python_does(
    make: Make, emulated, seed: int
) -> None:
    pool, player = make(memory_limit="40 MiB")
    ended = threading.Event()
    with raw_cuda.stream() as one, raw_cuda.stream() as two:

        def disturb() -> None:
            draw = random.Random(seed)
            while not ended.is_set():
                stream = draw.choice((one, two))
                emulated.hold(stream)
                pool.memory_stats()
                pool.snapshot()
                emulated.release(stream)
                draw.choice((pool.empty_cache, pool.check, pool.release_free_regions))()

        disturber = threading.Thread(target=disturb, daemon=True)
        disturber.start()
        try:
            assert player.hammer(3, 2000, seed, (0, one, two)) == 0, f"seed {seed}"
        finally:
            ended.set()
            waiting.joined(disturber)
        pool.release_free_regions()
        assert pool.stats().bytes_in_use == 0
        pool.check()


IN_A_PROCESS = """
import ctypes, os, sys
sys.path.insert(0, "tests/helpers")
import bfc, raw_cuda
from torch_table import Table
driver = cuda_emulator.load()
pool = bfc.CachingAllocator(bfc.CUDASubAllocator())
table = Table(pool)
with raw_cuda.current():
    side = int(raw_cuda.call("cuStreamCreate", 1))
ptr = table.allocate(1000)
table.record_stream(ptr, side)
driver.hold(side)
table.free(ptr)
"""


def test_a_process_ends_with_frees_that_wait() -> None:
    done = cuda_emulator.script(IN_A_PROCESS)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_leaves_what_waits_to_the_parent() -> None:
    done = cuda_emulator.script(
        IN_A_PROCESS
        + """
child = os.fork()
if child == 0:
    result, why, _ptr = table.try_allocate(1000)
    ok = "forked" in why and pool.stats().bytes_waiting_for_streams == 1024
    pool.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
driver.release(side)
assert table.allocate(1000) == ptr
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
