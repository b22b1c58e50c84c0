"""What a BFCAllocator gives to graphs: placed as an allocator places that has nothing else to do,
while all others are served as if there were no graphs."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest
from graph_histories import GraphHistory, Key, base_of

import bfc
from bfc_slow_models.tensorflow_model import Model

MIB = 1 << 20
CAPTURED, SIDE, OUTSIDE = 7, 8, 9
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(30)


class ModelAlone:
    """The slow model. The streams of a graph have one growth between them."""

    def __init__(
        self, key: Key, options: dict[str, Any], habits: dict[str, Any], growth: dict[int, int]
    ) -> None:
        self.device = bfc.SimulatedSubAllocator(1 << 60, base=base_of(key), **habits)
        self.model = Model(self.device, allow_growth=True, **options)
        self.growth, self.pool = growth, key[0]

    def allocate(self, nbytes: int) -> int | None:
        before = self.growth.get(self.pool, self.model.first_size)
        self.model.next_region_size = before
        address = self.model.allocate(nbytes)
        self.growth[self.pool] = self.model.next_region_size
        return address

    def free(self, address: int) -> None:
        self.model.free(address)

    def chunks(self) -> list[tuple[int, int, bool]]:
        rows = [(chunk.ptr, chunk.size, chunk.in_use) for chunk in self.model.chunks()]
        return sorted(rows)

    def calls(self) -> list[tuple[str, int, int | None]]:
        return self.device.calls

    def release(self) -> None:
        self.model.next_region_size = self.growth.get(self.pool, self.model.first_size)
        self.model.release_free_regions()
        if self.pool == 0:
            self.growth[0] = self.model.next_region_size


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_graphs_and_others_are_served_as_if_each_were_alone(seed: int) -> None:
    print(f"repeat with BFC_SEED={seed}")
    growth: dict[int, int] = {}
    history = GraphHistory(
        random.Random(seed),
        lambda key, options, habits: ModelAlone(key, options, habits, growth),
        release=lambda alone: alone.release(),  # type: ignore[attr-defined]
    )
    history.play(400)


class Machine:
    """A simulated device, an allocator on it whose memory grows, and a capture of its stream 7."""

    def __init__(self, **options: Any) -> None:
        habits = {"alignment": 256, "supports_coalescing": True}
        self.device = bfc.SimulatedSubAllocator("1 GiB", **habits)
        self.allocator = bfc.BFCAllocator(self.device, **{"allow_growth": True, **options})

    def take(self, nbytes: int, stream: int = CAPTURED) -> int:
        return self.allocator.allocate_raw(nbytes, stream=stream)

    def regions(self) -> list[tuple[bool, int]]:
        """Whether each is a graph's, and its bytes."""
        found = self.allocator.snapshot().regions
        return [(region.pool_id != (0, 0), region.size) for region in found]


def test_a_graphs_region_is_never_joined_to_another_that_it_touches() -> None:
    machine = Machine()
    one = machine.take(MIB, stream=0)
    with machine.allocator.capture(CAPTURED) as pool:
        inside = machine.take(MIB)
        machine.allocator.deallocate_raw(inside)
    machine.take(2 * MIB, stream=0)
    with machine.allocator.capture(SIDE) as other:
        machine.take(MIB, SIDE)
    assert machine.regions() == [
        (False, 2 * MIB),
        (True, 2 * MIB),
        (False, 4 * MIB),
        (True, 2 * MIB),
    ]
    machine.allocator.deallocate_raw(one)
    assert machine.allocator.empty_cache() == 2 * MIB
    pool.release()
    assert machine.allocator.empty_cache() == 2 * MIB
    other.release()
    machine.allocator.check()


def test_one_that_takes_all_of_its_limit_at_once_says_what_a_graph_needs() -> None:
    machine = Machine(allow_growth=False)
    machine.take(MIB, stream=0)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.device.captures.begin(CAPTURED)
        with pytest.raises(bfc.OutOfMemoryError, match=r"regions of its own.*allow_growth=True"):
            machine.take(MIB)
        machine.device.captures.end(CAPTURED)
    pool.release()
    machine.allocator.check()


def test_a_graph_that_comes_first_leaves_the_rest_of_the_limit() -> None:
    machine = Machine(allow_growth=False)
    with machine.allocator.capture(CAPTURED) as pool:
        machine.take(MIB)
    machine.take(MIB, stream=0)
    assert machine.regions() == [(True, 2 * MIB), (False, (1 << 30) - 2 * MIB)]
    pool.release()


def test_what_a_graph_frees_with_a_timing_counter_is_merged_by_the_frontier() -> None:
    machine = Machine()
    machine.allocator.set_timing_counter(bfc.SharedCounter())
    with machine.allocator.capture(CAPTURED) as pool:
        blocks = [machine.take(MIB) for _ in range(2)]
        machine.allocator.deallocate_many(blocks)
        assert machine.take(2 * MIB) not in blocks  # each waits for the frontier
        machine.allocator.set_safe_frontier(10)
        assert machine.take(2 * MIB) == blocks[0]
    machine.allocator.check()
    pool.release()


def test_a_graph_is_given_no_place_of_a_plan() -> None:
    trace = bfc.Trace([0, 1] * 3, [0, 0] * 3, [3 * MIB, 0] * 3)
    plan = bfc.Plan.from_trace(trace, marks=[0, 2, 4], fallback="bfc")
    machine = Machine(plan=plan)
    with machine.allocator.step("train"):
        with machine.allocator.capture(CAPTURED) as pool:
            inside = machine.take(3 * MIB)
        assert machine.take(3 * MIB, stream=0) != inside
    (region,) = pool.snapshot().regions
    assert region.ptr == inside
    pool.release()
    machine.allocator.check()


def test_a_trace_replayed_in_a_capture_gets_the_graphs_memory() -> None:
    machine = Machine()
    trace = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [MIB, 2 * MIB, 0, MIB])
    with machine.allocator.capture(CAPTURED) as pool:
        inside = trace.replay(machine.allocator)
    outside = trace.replay(machine.allocator)
    spans = [range(it.ptr, it.ptr + it.size) for it in pool.snapshot().regions]
    assert all(any(int(at) in span for span in spans) for at in inside.addresses if at)
    assert not any(int(at) in span for at in outside.addresses for span in spans)
    machine.allocator.check()
    pool.release()


def test_memory_of_a_graph_grows_where_it_is() -> None:
    machine = Machine()
    with machine.allocator.capture(CAPTURED) as pool:
        buffer = machine.allocator.allocate(MIB // 2, stream=CAPTURED)
        assert machine.allocator.try_extend(buffer, MIB)
        assert not machine.allocator.try_extend(buffer, 3 * MIB)  # its region ends before
    pool.release()


def test_a_pool_begun_by_hand_serves_the_streams_that_it_names() -> None:
    machine, pool = Machine(), (0, 5)
    machine.allocator.begin_allocate_to_pool(pool, OUTSIDE)
    inside = machine.take(MIB, OUTSIDE)
    outside = machine.take(MIB, SIDE)
    machine.allocator.end_allocate_to_pool(pool)
    found = {
        chunk.ptr: region.pool_id
        for region in machine.allocator.snapshot().regions
        for chunk in region.chunks
    }
    assert (found[inside], found[outside]) == (pool, (0, 0))
    machine.allocator.deallocate_many([inside, outside])
    machine.allocator.empty_cache()
    assert machine.regions() == [(True, 2 * MIB)]
    machine.allocator.release_pool(pool)
    machine.allocator.empty_cache()
    assert machine.regions() == []


def test_hits_of_other_threads_stay_out_of_the_graph() -> None:
    """While a capture is open, hits look for their pool: here thousands, in two threads."""
    machine = Machine(stream=CAPTURED)
    machine.allocator.deallocate_raw(machine.take(MIB))
    found: list[int] = []

    def elsewhere() -> None:
        for _ in range(2000):
            found.append(machine.take(1000, OUTSIDE))
            machine.allocator.deallocate_raw(found[-1])

    with machine.allocator.capture(CAPTURED) as pool:
        machine.device.captures.begin(CAPTURED)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        inside = [machine.take(1000) for _ in range(500)]
        machine.allocator.deallocate_many(inside)
        thread.join()
        machine.device.captures.end(CAPTURED)
    spans = [range(it.ptr, it.ptr + it.size) for it in pool.snapshot().regions]
    assert all(any(at in span for span in spans) for at in inside)
    assert not any(at in span for at in found for span in spans)
    machine.allocator.check()
    pool.release()
