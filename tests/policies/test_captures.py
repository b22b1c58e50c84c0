"""Captures of graphs: private pools, what is put off, and what a graph's structure proves. The
cases of "PyTorch's behaviour, 2.15", over a simulated device; both policies keep the promises."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import bfc
from bfc.allocators._captured import captured_streams
from bfc.testing import Misbehaving

MIB = 1 << 20
CAPTURED, SIDE, OUTSIDE, OTHER = 7, 8, 9, 10


Policy = type[bfc.CachingAllocator] | type[bfc.BFCAllocator]

both = pytest.mark.parametrize("policy", [bfc.CachingAllocator, bfc.BFCAllocator])


def allocator_on(
    device: bfc.SubAllocator, policy: Policy = bfc.CachingAllocator, **options: Any
) -> Any:
    """One whose memory grows: a BFCAllocator would else take all of its limit at once."""
    if policy is bfc.BFCAllocator:
        options.setdefault("allow_growth", True)
    return policy(device, **options)


class Stream:
    """A stream of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Machine:
    """A simulated device, and an allocator on it."""

    def __init__(
        self, capacity: str = "1 GiB", policy: Policy = bfc.CachingAllocator, **options: Any
    ) -> None:
        self.device = bfc.SimulatedSubAllocator(capacity)
        self.allocator = allocator_on(self.device, policy, **options)
        self.graph = self.device.captures

    def take(self, size: int, stream: int = CAPTURED) -> int:
        return self.allocator.allocate_raw(size, stream=stream)

    def free(self, address: int, here: int | None = None) -> None:
        if here is None:
            return self.allocator.deallocate_raw(address)
        with bfc.use_stream(here):
            self.allocator.deallocate_raw(address)
        return None

    def states(self) -> list[str]:
        return [chunk.state for chunk in self.allocator.snapshot().chunks()]

    def pools(self) -> list[tuple[int, int]]:
        return [region.pool_id for region in self.allocator.snapshot().regions]

    def waits(self) -> int:
        return self.allocator.memory_stats()["num_sync_all_streams"]


@pytest.fixture(params=[bfc.CachingAllocator, bfc.BFCAllocator])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    it = Machine(policy=request.param)
    yield it
    it.allocator.check()


@pytest.fixture
def reusing() -> Iterator[Machine]:
    it = Machine(settings="graph_capture_record_stream_reuse:True")
    yield it
    it.allocator.check()


def capture_beside_a_thread(machine: Machine, work: Callable[[], None]) -> bfc.GraphPool:
    """Captures a stream that another has joined, while a thread does its work. Returns the pool."""
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.graph.wait(SIDE, on=CAPTURED)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        machine.graph.end(CAPTURED)
    return pool


# -- the pool of a graph --------------------------------------------------------------------------


def test_what_a_capture_allocates_is_the_graphs_alone(machine: Machine) -> None:
    cached = machine.take(12 * MIB)
    machine.free(cached)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        inside = machine.take(12 * MIB)
        machine.graph.end(CAPTURED)
    assert inside != cached
    machine.free(inside)
    assert machine.take(12 * MIB) == cached  # and not what the graph uses
    assert machine.take(12 * MIB) != inside
    assert pool.id[1] == 0
    assert pool.use_count() == 1
    machine.allocator.empty_cache()
    assert pool.id in machine.pools()
    pool.release()
    machine.allocator.empty_cache()
    assert pool.id not in machine.pools()


def test_streams_that_join_a_capture_use_its_pool_in_every_thread(machine: Machine) -> None:
    found: list[tuple[int, int]] = []

    def elsewhere() -> None:
        machine.take(3 * MIB, SIDE)
        found.append(machine.pools()[-1])
        machine.take(3 * MIB, OUTSIDE)
        found.append(machine.pools()[-1])

    pool = capture_beside_a_thread(machine, elsewhere)
    assert found == [pool.id, (0, 0)]
    pool.release()


def test_the_newest_scope_that_takes_a_stream_serves_it() -> None:
    """As PyTorch's filters do: a MemPool takes what its thread asks for, and a capture the streams
    that belong to it. What belongs to none goes to the newest capture of the thread, too."""
    machine = Machine()
    mem_pool = bfc.MemPool(machine.allocator)

    def pool_for(stream: int) -> tuple[int, int]:
        address = machine.take(MIB, stream)
        (found,) = [
            it.pool_id
            for it in machine.allocator.snapshot().regions
            if it.ptr <= address < it.ptr + it.size
        ]
        return found

    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.graph.wait(SIDE, on=CAPTURED)
        with bfc.use_mem_pool(mem_pool):
            assert {pool_for(it) for it in (CAPTURED, SIDE, OUTSIDE, 0)} == {mem_pool.id}
        assert {pool_for(it) for it in (CAPTURED, SIDE, OUTSIDE, 0)} == {pool.id}
        machine.graph.end(CAPTURED)
    with bfc.use_mem_pool(mem_pool), machine.allocator.capture(CAPTURED, pool=pool) as again:
        machine.graph.begin(CAPTURED)
        machine.graph.wait(SIDE, on=CAPTURED)
        assert {pool_for(it) for it in (CAPTURED, SIDE)} == {pool.id}
        machine.graph.end(CAPTURED)
    for it in (pool, again, mem_pool):
        it.release()


@both
def test_a_stream_that_joined_the_capture_of_another_thread_is_served_by_that(
    policy: Policy,
) -> None:
    """Also where the thread that asks is in a capture of its own, and would have a hit there."""
    machine = Machine(policy=policy)
    go, done = threading.Event(), threading.Event()
    pools: list[bfc.GraphPool] = []

    def elsewhere() -> None:
        with machine.allocator.capture(OTHER) as pool:
            pools.append(pool)
            machine.graph.begin(OTHER)
            machine.graph.wait(SIDE, on=OTHER)
            go.set()
            done.wait(60)
            machine.graph.end(OTHER)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert go.wait(60)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.free(machine.take(MIB, CAPTURED))
        for on, expected in ((SIDE, pools[0]), (OUTSIDE, pool), (CAPTURED, pool), (SIDE, pools[0])):
            address = machine.take(MIB, on)
            (found,) = [
                it.pool_id
                for it in machine.allocator.snapshot().regions
                if it.ptr <= address < it.ptr + it.size
            ]
            assert found == expected.id, on
        machine.graph.end(CAPTURED)
    done.set()
    thread.join()
    for it in (pool, pools[0]):
        it.release()


def test_a_shared_pool_goes_when_the_last_graph_is_gone(machine: Machine) -> None:
    with machine.allocator.capture(CAPTURED) as first:
        one = machine.take(12 * MIB)
        machine.free(one)
    with machine.allocator.capture(SIDE, pool=first) as second:
        pass
    with machine.allocator.capture(CAPTURED, pool=second) as third:
        assert machine.take(12 * MIB) == one
    machine.free(one)
    assert first.id == second.id == third.id
    assert third.use_count() == 3
    for pool in (first, third):
        pool.release()
        pool.release()  # does nothing
        machine.allocator.empty_cache()
        assert pool.id in machine.pools()
    second.release()
    machine.allocator.empty_cache()
    assert machine.pools() == []


def test_a_pool_can_be_released_with_its_graph(machine: Machine) -> None:
    class Graph:
        pass

    graph = Graph()
    with machine.allocator.capture(CAPTURED) as pool:
        pass
    pool.release_with(graph)
    assert not pool.released
    del graph
    gc.collect()
    assert pool.released


def test_a_pool_that_is_dropped_is_kept_and_told_of(machine: Machine) -> None:
    with machine.allocator.capture(CAPTURED) as pool:
        machine.free(machine.take(12 * MIB))
    kept = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="collected, but not released"):
        kept.clear()
    machine.allocator.empty_cache()
    assert machine.pools() != []  # the graph may live on


def test_a_capture_that_fails_keeps_nothing(machine: Machine) -> None:
    scope = machine.allocator.capture(CAPTURED)
    pool = scope.__enter__()
    machine.graph.begin(CAPTURED)
    machine.free(machine.take(12 * MIB))
    scope.__exit__(ValueError, ValueError("mine"), None)
    assert pool.released
    machine.graph.end(CAPTURED)
    machine.allocator.empty_cache()
    assert machine.pools() == []
    with machine.allocator.capture(CAPTURED) as pool:
        pass
    pool.release()


# -- what is put off ------------------------------------------------------------------------------


def test_v_2h_a_free_in_a_capture_waits_for_its_end() -> None:
    machine = Machine(strict=True)
    machine.allocator.mark_capture_begin()
    machine.graph.begin(CAPTURED)
    block = machine.take(12 * MIB)
    machine.device.hold(SIDE)
    with bfc.use_stream(CAPTURED):
        machine.allocator.record_stream(block, SIDE)
    machine.free(block, here=CAPTURED)
    assert machine.take(12 * MIB) != block
    machine.graph.end(CAPTURED)
    machine.allocator.mark_capture_end()
    assert machine.take(12 * MIB) == block  # its own use is dropped


@pytest.mark.parametrize("case", ["another stream current", "not marked"])
def test_v_2i_and_j_nothing_else_is_put_off(case: str) -> None:
    machine = Machine(strict=True)
    if case != "not marked":
        machine.allocator.mark_capture_begin()
    machine.graph.begin(CAPTURED)
    current = OUTSIDE if case != "not marked" else CAPTURED
    block = machine.take(12 * MIB, OUTSIDE)
    machine.allocator.record_stream(block, SIDE)
    machine.free(block, here=current)
    assert machine.take(12 * MIB, OUTSIDE) == block


def test_v_2k_and_l_nothing_is_waited_for_or_emptied() -> None:
    machine = Machine("100 MiB", strict=True)
    machine.free(machine.take(80 * MIB, OUTSIDE))
    machine.allocator.mark_capture_begin()
    machine.graph.begin(CAPTURED)
    with pytest.raises(bfc.OutOfMemoryError):
        machine.take(60 * MIB)
    with bfc.use_stream(CAPTURED):
        assert machine.allocator.empty_cache() == 0
    assert machine.waits() == 0
    machine.graph.end(CAPTURED)
    machine.allocator.mark_capture_end()
    machine.take(60 * MIB)
    assert machine.waits() == 1


def test_v_2m_a_use_from_before_the_capture_is_waited_for_after_it(machine: Machine) -> None:
    block = machine.take(12 * MIB, OUTSIDE)
    machine.allocator.record_stream(block, SIDE)
    machine.device.hold(SIDE)
    machine.allocator.mark_capture_begin()
    machine.graph.begin(CAPTURED)
    machine.free(block, here=CAPTURED)
    machine.graph.end(CAPTURED)
    machine.allocator.mark_capture_end()
    assert machine.take(12 * MIB, OUTSIDE) != block
    machine.device.finish(SIDE)
    assert machine.take(12 * MIB, OUTSIDE) == block


def test_a_use_by_a_stream_that_does_not_capture_is_never_dropped(machine: Machine) -> None:
    """Upstream drops it, and hands memory out that the stream still uses."""
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        block = machine.take(12 * MIB)
        machine.device.hold(OUTSIDE)
        machine.allocator.record_stream(block, OUTSIDE)
        machine.free(block)
        machine.graph.end(CAPTURED)
    with machine.allocator.capture(CAPTURED, pool=pool) as second:
        assert machine.take(12 * MIB) != block
    pool.release()
    second.release()


def test_a_buffer_that_is_dropped_in_a_capture_is_put_off_too(machine: Machine) -> None:
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.graph.wait(SIDE, on=CAPTURED)
        buffer = machine.allocator.allocate(12 * MIB, stream=CAPTURED)
        address = buffer.ptr
        machine.allocator.record_stream(buffer, SIDE)
        del buffer
        gc.collect()
        assert machine.take(12 * MIB) != address
        machine.graph.end(CAPTURED)
    machine.take(512, OUTSIDE)
    with machine.allocator.capture(CAPTURED, pool=pool) as second:
        assert machine.take(12 * MIB) == address
    pool.release()
    second.release()


# -- what the structure of a graph proves ---------------------------------------------------------


def test_v_20_memory_is_used_again_once_the_streams_have_joined(reusing: Machine) -> None:
    with reusing.allocator.capture(CAPTURED) as pool:
        reusing.graph.begin(CAPTURED)
        reusing.graph.work(CAPTURED)
        reusing.graph.wait(SIDE, on=CAPTURED)
        block = reusing.take(12 * MIB)
        reusing.allocator.record_stream(block, SIDE)
        reusing.graph.work(SIDE)
        reusing.free(block)
        reusing.graph.work(CAPTURED)
        assert reusing.take(12 * MIB) != block
        reusing.graph.wait(CAPTURED, on=SIDE)
        assert reusing.take(12 * MIB, SIDE) != block  # of another stream
        assert reusing.take(12 * MIB) == block
        reusing.graph.end(CAPTURED)
    pool.release()


def test_v_20_not_while_one_of_the_streams_does_not_capture(reusing: Machine) -> None:
    with reusing.allocator.capture(CAPTURED) as pool:
        reusing.graph.begin(CAPTURED)
        reusing.graph.work(CAPTURED)
        block = reusing.take(12 * MIB)
        reusing.device.hold(OUTSIDE)
        reusing.allocator.record_stream(block, OUTSIDE)
        reusing.free(block)
        reusing.graph.work(CAPTURED)
        assert reusing.take(12 * MIB) != block
        reusing.graph.end(CAPTURED)
    pool.release()


def test_v_20c_what_is_left_is_freed_at_the_end_of_the_scope(reusing: Machine) -> None:
    with reusing.allocator.capture(CAPTURED) as pool:
        reusing.graph.begin(CAPTURED)
        reusing.graph.wait(SIDE, on=CAPTURED)
        reusing.graph.work(SIDE)
        block = reusing.take(12 * MIB)
        reusing.allocator.record_stream(block, SIDE)
        reusing.free(block)
        assert "waiting" in reusing.states()
        reusing.graph.end(CAPTURED)
    assert "waiting" not in reusing.states()
    pool.release()


def proves(graph: dict[int, set[int]], ends: set[int], markers: set[int]) -> bool:
    """The slow statement of the rule: from the ends, every marker is reached backwards."""
    seen, todo = set(), list(ends)
    while todo:
        node = todo.pop()
        seen.add(node)
        todo += graph[node] - seen
    return markers <= seen


@pytest.mark.parametrize("seed", range(6))
def test_reuse_follows_the_graph_whatever_its_shape(seed: int) -> None:
    """Random forks, joins, work, uses and frees on four streams. A block is handed out again if,
    and only if, the graph orders all that used it before what its stream does next."""
    rng = random.Random(seed)
    machine = Machine(settings="graph_capture_record_stream_reuse:True")
    streams, live, freed = [1, 2, 3, 4], {}, {}
    graph: dict[int, set[int]] = {}
    with machine.allocator.capture(1) as pool:
        machine.graph.begin(1)
        for stream in streams[1:]:
            machine.graph.wait(stream, on=1)
        for step in range(400):
            stream = rng.choice(streams)
            match rng.choice(["work", "wait", "take", "use", "free"]):
                case "work":
                    node = machine.graph.work(stream)
                    graph[node] = set(machine.graph.dependencies(node))
                case "wait":
                    machine.graph.wait(stream, on=rng.choice(streams))
                case "use" if live:
                    address = rng.choice(list(live))
                    live[address][1].add(stream)
                    machine.allocator.record_stream(address, stream)
                case "free" if live:
                    address = rng.choice(list(live))
                    made_on, users = live.pop(address)
                    machine.free(address)
                    users = users - {made_on}
                    terminals = (set(machine.graph.terminals(it)) for it in (made_on, *users))
                    markers = set().union(*terminals)
                    freed[address] = made_on, markers if users else set(), not users
                case "take":
                    ends = set(machine.graph.terminals(stream))
                    safe = {
                        address
                        for address, (made_on, markers, at_once) in freed.items()
                        if made_on == stream
                        and (at_once or (markers and ends and proves(graph, ends, markers)))
                    }
                    address = machine.take(12 * MIB, stream)
                    assert (address in freed) == bool(safe), (seed, step)
                    assert address in safe or not safe, (seed, step)
                    for other in safe - {address}:  # they are free now, whatever comes
                        freed[other] = stream, set(), True
                    freed.pop(address, None)
                    live[address] = stream, set()
        machine.graph.end(1)
    pool.release()
    machine.allocator.check()


# -- bad input ------------------------------------------------------------------------------------


def test_misuse_is_refused_in_words(machine: Machine) -> None:
    allocator = machine.allocator
    with pytest.raises(RuntimeError, match="no capture is marked"):
        allocator.mark_capture_end()
    with pytest.raises(RuntimeError, match="not in use"):
        allocator.end_allocate_to_pool((5, 0))
    with pytest.raises(RuntimeError, match="released already, or never made"):
        allocator.release_pool((5, 0))
    with pytest.raises(TypeError, match="GraphPool"):
        allocator.capture(CAPTURED, pool=(5, 0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a stream is an int"):
        allocator.capture("7")  # type: ignore[arg-type]
    with allocator.capture(CAPTURED) as pool:
        with pytest.raises(RuntimeError, match="stream 0x7 is captured already"):
            allocator.capture(CAPTURED).__enter__()
        with pytest.raises(RuntimeError, match="in use already"):
            allocator.capture(SIDE, pool=pool).__enter__()
        with pytest.raises(RuntimeError, match="being captured into it"):
            pool.release()
    assert pool.use_count() == 1
    pool.release()
    with pytest.raises(RuntimeError, match="cannot be shared any more"):
        allocator.capture(CAPTURED, pool=pool).__enter__()
    other = Machine(policy=type(allocator))
    with other.allocator.capture(CAPTURED) as foreign:
        pass
    with pytest.raises(ValueError, match="another allocator"):
        allocator.capture(CAPTURED, pool=foreign).__enter__()
    foreign.release()
    scope = allocator.capture(CAPTURED)
    with pytest.raises(RuntimeError, match="not entered"):
        scope.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("pool", "streams", "error", "words"),
    [
        ((1.5, 0), "all", TypeError, "two integers, such as"),
        (("1", 0), "all", TypeError, "two integers, such as"),
        ((1, 0, 0), "all", TypeError, "two integers, such as"),
        (7, "all", TypeError, "two integers, such as"),
        ((-1, 0), "all", ValueError, "from 0 to 2"),
        ((0, 1 << 64), "all", ValueError, "from 0 to 2"),
        ((0, 0), "all", ValueError, "the default pool"),
        ((1 << 62, 1), "all", ValueError, "belong to tags"),
        ((1, 0), "every", ValueError, "'all', 'thread', 'none' or a stream"),
        ((1, 0), 7.5, TypeError, "a stream is an int"),
        ((1, 0), -7, ValueError, "a stream handle lies between"),
    ],
)
def test_what_is_no_pool_or_no_stream_is_refused_in_words(
    machine: Machine, pool: Any, streams: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        machine.allocator.begin_allocate_to_pool(pool, streams)
    if words.startswith(("two", "from")) and streams == "all":
        for call in (machine.allocator.end_allocate_to_pool, machine.allocator.release_pool):
            with pytest.raises(error, match=words):
                call(pool)
    assert not machine.allocator.allocate(1000).ptr % 256
    assert machine.pools() == [(0, 0)]


def test_a_scope_of_one_stream_takes_every_name_of_it(machine: Machine) -> None:
    """An object that has the handle, and of the default stream the handle 1."""
    machine.allocator.begin_allocate_to_pool((5, 0), Stream(CAPTURED))
    machine.take(MIB)
    machine.allocator.end_allocate_to_pool((5, 0))
    device = bfc.SimulatedSubAllocator("1 GiB")
    device.default_stream_alias = 1  # as CUDA's
    allocator = allocator_on(device, type(machine.allocator))
    allocator.begin_allocate_to_pool((1 << 63, 2**64 - 1), 1)
    allocator.allocate_raw(1000)
    assert machine.pools() == [(5, 0)]
    assert [it.pool_id for it in allocator.snapshot().regions] == [(1 << 63, 2**64 - 1)]


def test_an_allocator_may_close_in_a_capture(machine: Machine) -> None:
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        block = machine.take(12 * MIB)
        machine.allocator.record_stream(block, SIDE)
        machine.free(block)
        machine.allocator.close()
        with pytest.raises(bfc.ClosedError):
            machine.take(512)
    with pytest.raises(bfc.InvalidPointerError):
        machine.free(block)
    pool.release()
    assert machine.device.live == {}
    with pytest.raises(bfc.ClosedError):
        machine.allocator.capture(CAPTURED).__enter__()


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_device_that_refuses_in_a_capture_loses_nothing(machine: Machine, when: int) -> None:
    """A refusal is final there: nothing is given back for another try."""
    cached = machine.take(12 * MIB, OUTSIDE)
    machine.free(cached)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        made = [machine.take(12 * MIB) for _ in range(when - 1)]
        machine.device.fail_at(1)
        if (buffer := machine.allocator.try_allocate(40 * MIB, stream=CAPTURED)) is not None:
            buffer.free()  # a BFCAllocator asks for less
        machine.graph.end(CAPTURED)
    assert machine.take(12 * MIB, OUTSIDE) == cached
    for block in made:
        machine.free(block)
    machine.free(cached)
    pool.release()
    machine.allocator.empty_cache()
    assert machine.device.live == {}


MAPPED = [
    (bfc.CachingAllocator, {"stitch": True}),
    (bfc.CachingAllocator, {"settings": "expandable_segments:True"}),
    (bfc.BFCAllocator, {"virtual_memory": True}),
]
mapped = pytest.mark.parametrize(("policy", "options"), MAPPED)


@mapped
def test_a_graph_that_has_memory_takes_none_in_a_tag(
    policy: Policy, options: dict[str, Any]
) -> None:
    """PyTorch's policy lets a graph's pool that has none yet sleep with the tag."""
    machine = Machine(policy=policy, **options)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.take(12 * MIB)
        with (
            machine.allocator.tag("weights"),
            pytest.raises(RuntimeError, match=r"it can belong to one|has memory of no tag"),
        ):
            machine.take(12 * MIB)
    pool.release()


@mapped
def test_a_tag_takes_nothing_of_a_stream_that_has_joined_a_capture(
    policy: Policy, options: dict[str, Any]
) -> None:
    """Whichever thread asks: the memory would be put to sleep with the tag."""
    machine = Machine(policy=policy, **options)
    faults: list[BaseException] = []

    def elsewhere() -> None:
        machine.take(12 * MIB, SIDE)
        with machine.allocator.tag("weights"):
            machine.take(12 * MIB, OUTSIDE)
            try:
                machine.take(12 * MIB, SIDE)
            except RuntimeError as fault:
                faults.append(fault)

    pool = capture_beside_a_thread(machine, elsewhere)
    assert re.search("it can belong to one|has memory of no tag", str(faults[0]))
    pool.release()


@mapped
def test_mapped_memory_of_a_graph_stays_where_it_is(
    policy: Policy, options: dict[str, Any]
) -> None:
    machine = Machine("200 MiB", policy, **options)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        block = machine.take(30 * MIB)
        machine.free(block)
        machine.graph.end(CAPTURED)
    others = []
    while (buffer := machine.allocator.try_allocate(12 * MIB, stream=OUTSIDE)) is not None:
        others.append(buffer)
    machine.allocator.empty_cache()
    assert all(not block <= it.ptr < block + 30 * MIB for it in others)
    with machine.allocator.capture(CAPTURED, pool=pool) as second:
        assert machine.take(30 * MIB) == block
    pool.release()
    second.release()


# -- what a review has found ----------------------------------------------------------------------


def test_a_use_from_before_the_capture_is_waited_for_even_if_it_was_repeated_in_it(
    machine: Machine,
) -> None:
    block = machine.take(12 * MIB, OUTSIDE)
    machine.allocator.record_stream(block, CAPTURED)
    machine.device.hold(CAPTURED)  # its work on the block is unfinished
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.allocator.record_stream(block, CAPTURED)
        machine.free(block)
        machine.graph.end(CAPTURED)
    assert machine.take(12 * MIB, OUTSIDE) != block
    machine.device.finish(CAPTURED)
    assert machine.take(12 * MIB, OUTSIDE) == block
    pool.release()


def test_a_scope_that_was_ended_by_hand_leaves_no_mark(machine: Machine) -> None:
    scope = machine.allocator.capture(CAPTURED)
    pool = scope.__enter__()
    machine.allocator.end_allocate_to_pool(pool.id)
    with pytest.raises(RuntimeError, match="not in use"):
        scope.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="no capture is marked"):
        machine.allocator.mark_capture_end()
    pool.release()


class NeverDone:
    """A fence that writes down which threads ask it."""

    def __init__(self) -> None:
        self.asking: list[threading.Thread] = []

    def done(self) -> bool:
        self.asking.append(threading.current_thread())
        return False

    def wait(self) -> None:
        pass


@both
@pytest.mark.parametrize("when", range(4))
def test_another_threads_allocation_does_not_let_a_capture_ask_fences(
    policy: Policy, when: int
) -> None:
    """It comes after one of the looks at the capture, before the frees that are due."""
    device, fence = Misbehaving("1 GiB", asynchronous=True), NeverDone()
    device.on("fence", returns=fence)
    device.on("wait", returns=None)
    allocator = allocator_on(device, policy)
    shared = allocator.allocate_raw(3 * MIB, stream=OUTSIDE)
    allocator.record_stream(shared, SIDE)
    allocator.deallocate_raw(shared)
    with allocator.capture(CAPTURED) as pool:
        device.captures.begin(CAPTURED)
        fence.asking.clear()  # a BFCAllocator has asked at the free

        def elsewhere() -> None:
            allocator.allocate_raw(512, stream=OUTSIDE)

        def interrupt() -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

        device.on("capture_id", when + 1, then=interrupt)
        allocator.allocate_raw(MIB, stream=CAPTURED)
        assert threading.main_thread() not in fence.asking
        device.captures.end(CAPTURED)
    pool.release()


def test_what_is_free_in_a_graphs_pool_is_the_graphs() -> None:
    """A large request in the capture does not give back what an earlier part of the graph used."""
    device = bfc.SimulatedSubAllocator("64 MiB", reuse=True)
    with bfc.CachingAllocator(device, max_split_size_mb=21) as allocator:
        with allocator.capture(CAPTURED) as pool:
            device.captures.begin(CAPTURED)
            used = allocator.allocate_raw(30 * MIB, stream=CAPTURED)
            allocator.deallocate_raw(used)
            with pytest.raises(bfc.OutOfMemoryError):
                allocator.allocate_raw(65 * MIB, stream=CAPTURED)
            device.captures.end(CAPTURED)
        assert allocator.allocate_raw(30 * MIB, stream=OUTSIDE) != used
        pool.release()


@both
def test_the_captures_of_one_thread_each_keep_to_their_streams(policy: Policy) -> None:
    machine = Machine(policy=policy)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        with machine.allocator.capture(SIDE) as other:
            machine.graph.begin(SIDE)
            machine.free(machine.take(MIB))
            machine.graph.end(SIDE)
        machine.graph.end(CAPTURED)
    assert machine.pools() == [pool.id]
    other.release()
    machine.allocator.empty_cache()
    assert machine.pools() == [pool.id]
    pool.release()


def test_emptying_makes_the_frees_that_a_capture_has_put_off(machine: Machine) -> None:
    outside = machine.take(MIB)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        machine.free(outside)
        machine.graph.end(CAPTURED)
    pool.release()
    assert machine.allocator.empty_cache() > 0
    assert machine.allocator.stats().bytes_in_use == 0


@both
def test_nothing_waits_in_a_capture(policy: Policy) -> None:
    machine = Machine("64 MiB", policy=policy, retry_seconds=3600)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.graph.begin(CAPTURED)
        kept = machine.take(40 * MIB)
        with pytest.raises(bfc.OutOfMemoryError):
            machine.take(40 * MIB)
        machine.graph.end(CAPTURED)
    machine.free(kept)
    pool.release()


@pytest.mark.usefixtures("quiet_collector")
@both
@pytest.mark.parametrize("n", range(12))
def test_a_capture_that_could_not_be_entered_is_not_open(policy: Policy, n: int) -> None:
    """With Python's n-th allocation failing: another try finds nothing in its way."""
    _testcapi = pytest.importorskip("_testcapi")
    machine = Machine(policy=policy)
    machine.allocator.record_history()
    capture = machine.allocator.capture(CAPTURED)
    _testcapi.set_nomemory(n, n + 1)
    try:
        pool = capture.__enter__()
    except MemoryError:
        _testcapi.remove_mem_hooks()
        assert captured_streams(machine.allocator) == []
        with machine.allocator.capture(CAPTURED) as pool:
            pass
    else:
        _testcapi.remove_mem_hooks()
        capture.__exit__(None)
    pool.release()
