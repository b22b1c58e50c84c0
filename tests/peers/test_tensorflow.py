"""Against TensorFlow 2.21's compiled BFC: every address, every call to the device, every statistic.

`BFC_SEED=n pytest -m peers -k random` repeats one random history.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from graph_histories import GraphHistory, Key, base_of

import bfc
from bench.peers.tensorflow import TensorFlowBFC, build

pytestmark = pytest.mark.peers

TRACES = sorted((Path(__file__).parents[2] / "bench" / "traces").glob("*.npz"))
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(400)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEVICE_OPTIONS = ("capacity", "base", "alignment", "gap", "supports_coalescing", "max_bytes")
#: TensorFlow 2.21 leaves these 0.
OURS_ALONE = {"largest_free_block_bytes", "bytes_reserved", "peak_bytes_reserved"}


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build()


class Pair:
    """Both allocators, told the same."""

    def __init__(self, **options: Any) -> None:
        ours = {name: options[name] for name in options if name in DEVICE_OPTIONS}
        self.device = bfc.SimulatedSubAllocator(ours.pop("capacity"), **ours)
        rest = {
            name: options[name]
            for name in options
            if name not in DEVICE_OPTIONS and name != "timing_counter"
        }
        self.ours = bfc.BFCAllocator(self.device, strict=True, **rest)
        self.theirs = TensorFlowBFC(**options)
        if options.get("timing_counter"):
            self.ours.set_timing_counter(bfc.SharedCounter())

    def allocate(self, nbytes: int, freed_before: int = 0) -> int:
        try:
            address = self.ours.allocate_raw(nbytes, freed_before=freed_before)
        except bfc.OutOfMemoryError:
            address = 0
        assert address == self.theirs.allocate_raw(nbytes, freed_before)
        if address:
            for question in ("requested_size", "allocated_size", "allocation_id"):
                assert getattr(self.ours, question)(address) == getattr(self.theirs, question)(
                    address
                )
        return address

    def deallocate(self, address: int) -> None:
        self.ours.deallocate_raw(address)
        self.theirs.deallocate_raw(address)

    def compare(self) -> None:
        assert self.device.calls == self.theirs.calls
        ours, theirs = self.ours.stats(), self.theirs.stats()
        for field in theirs.keys() - OURS_ALONE:
            assert getattr(ours, field) == theirs[field], field
        assert [theirs[field] for field in OURS_ALONE] == [0, 0, 0]
        chunks = [
            (chunk.ptr, chunk.size, chunk.in_use, chunk.bin_num)
            for chunk in self.ours.snapshot().chunks()
        ]
        assert chunks == [
            (chunk["address"], chunk["size"], chunk["in_use"], chunk["bin"])
            for chunk in self.theirs.memory_map()
        ]

    def compare_dumps(self) -> None:
        """TensorFlow's own message reads our dump whole, and TensorFlow makes the same one."""
        ours = self.ours.snapshot().to_tensorflow()
        read, theirs = self.theirs.read_dump(ours), self.theirs.memory_dump()
        exact = float(ours["stats"].pop("fragmentationMetric"))
        for dump in (read, theirs):  # of single precision
            found = float(dump["stats"].pop("fragmentationMetric"))
            assert found == pytest.approx(exact, nan_ok=True)
        assert read == ours
        for dump in (ours, theirs):
            del dump["allocatorName"]
            for chunk in dump["chunk"]:
                if not chunk["inUse"]:
                    del chunk["requestedSize"]  # TensorFlow's is what was asked for last
        assert ours == theirs

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        assert self.device.calls == self.theirs.calls


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("growth", [False, True])
@pytest.mark.parametrize("room", [80.0, 0.9])
def test_recorded_traces_are_placed_alike(path: Path, growth: bool, room: float) -> None:
    trace = bfc.Trace.load(path).closed()
    peak = trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator("80 GiB"))).peak_bytes_in_use
    limit = 80 * GIB if room > 1 else int(peak * room)
    pair = Pair(capacity=1 << 44, memory_limit=limit, allow_growth=growth)
    for _ in range(2):
        ours = trace.replay(pair.ours)
        addresses, _seconds = pair.theirs.replay(trace.op, trace.id, trace.size)
        assert (ours.addresses == addresses).all()
    assert (ours.failed > 0) == (room < 1)
    pair.ours.check()
    pair.compare()
    pair.close()


def random_options(rng: random.Random) -> dict[str, Any]:
    """Every option: growing and fixed, limits and devices that bite, gaps, adjoining regions,
    collection, slack."""
    limit = rng.choice(
        [
            rng.randrange(8 * KIB, 64 * KIB),
            rng.randrange(64 * KIB, 16 * MIB),
            rng.randrange(16 * MIB, GIB),
        ]
    )
    capacity = rng.choice(
        [1 << 50, limit, max(1, limit * rng.randrange(40, 100) // 100), 2 * limit]
    )
    joins = rng.random() < 0.4
    return {
        "memory_limit": limit,
        "capacity": capacity,
        "allow_growth": rng.random() < 0.7,
        "garbage_collection": rng.random() < 0.6,
        "fragmentation_fraction": rng.choice([0.0, 0.0, 0.01, 0.05, 0.3, 1.0]),
        "alignment": rng.choice([256, 4 * KIB, 2 * MIB]),
        "gap": 0 if joins else rng.choice([0, 256, 4 * KIB, 100]),
        "supports_coalescing": joins,
        "max_bytes": rng.choice([None, None, None, max(2 * MIB, limit // 3)]),
        "timing_counter": rng.random() < 0.3,
    }


def is_a_hazard(options: dict[str, Any]) -> bool:
    """Where upstream hangs or corrupts itself (TensorFlow's behaviour, CC-39 and 2.7): nothing
    to compare."""
    small_slack = 0 < options["fragmentation_fraction"] * options["memory_limit"] < 256
    collects_stamped = options["timing_counter"] and options["garbage_collection"]
    return small_slack or collects_stamped


def random_size(rng: random.Random, limit: int) -> int:
    """Never below 2305: there upstream may ask for the same size for ever (CC-40)."""
    kind = rng.random()
    if kind < 0.05:
        return 0
    if kind < 0.6:
        return rng.randrange(2400, max(2401, limit // 20))
    return (
        rng.randrange(2400, max(2401, limit // 2))
        if kind < 0.95
        else limit + rng.randrange(-600, 600)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_are_placed_alike(seed: int) -> None:
    rng = random.Random(seed)
    options = random_options(rng)
    while is_a_hazard(options):
        options = random_options(rng)
    print(f"repeat with BFC_SEED={seed}: {options}")
    pair = Pair(**options)
    live: list[int] = []
    frees = frontier = 0
    for step in range(rng.choice([60, 200, 600])):
        action = rng.random()
        if action < 0.03:
            pair.device.fail_at(1)
            pair.theirs.fail_at(1)
        elif action < 0.06 and options["timing_counter"]:
            frontier = rng.randrange(frontier, frees + 2)
            pair.ours.set_safe_frontier(frontier)
            pair.theirs.set_safe_frontier(frontier)
        elif action < 0.45 and live:
            pair.deallocate(live.pop(rng.randrange(len(live))))
            frees += 1
        else:
            constrained = options["timing_counter"] and rng.random() < 0.3
            address = pair.allocate(
                max(0, random_size(rng, options["memory_limit"])),
                rng.randrange(0, frees + 2) if constrained else 0,
            )
            if address:
                live.append(address)
        if step % 10 == 0:
            pair.compare()
    pair.compare()
    pair.compare_dumps()
    pair.ours.check()
    pair.close()


def test_owners_steps_and_counts_are_read_by_tensorflows_message() -> None:
    pair = Pair(capacity=GIB, memory_limit=MIB)
    pair.ours.record_history()
    with bfc.owner("dense/matmul", step=17):
        address = pair.allocate(1000)
    pair.deallocate(pair.allocate(500))
    read = pair.theirs.read_dump(pair.ours.snapshot().to_tensorflow())
    (chunk,) = (chunk for chunk in read["chunk"] if chunk["inUse"])
    assert chunk["address"] == str(address)
    assert (chunk["opName"], chunk["stepId"], chunk["actionCount"]) == ("dense/matmul", "17", "1")
    assert [it["size"] for it in read["snapShot"]] == ["1000", "1500", "1000"]
    with pytest.raises(ValueError, match="no MemoryDump"):
        pair.theirs.read_dump({"chunks": []})
    pair.close()


def test_a_long_random_history_is_placed_alike_at_scale() -> None:
    from bench.histories import churn

    trace = churn(20_000, 200_000, seed=int(os.environ.get("BFC_SEED", "11"))).closed()
    pair = Pair(capacity=8 * GIB, memory_limit=3 * GIB, allow_growth=True)
    ours = trace.replay(pair.ours)
    addresses, _seconds = pair.theirs.replay(trace.op, trace.id, trace.size)
    assert (ours.addresses == addresses).all()
    pair.compare()
    pair.close()


class CompiledAlone:
    """TensorFlow's allocator over a device of its own."""

    def __init__(self, key: Key, options: dict[str, Any], habits: dict[str, Any]) -> None:
        self.theirs = TensorFlowBFC(
            allow_growth=True, base=base_of(key), capacity=1 << 60, **options, **habits
        )

    def allocate(self, nbytes: int) -> int | None:
        return self.theirs.allocate_raw(nbytes)

    def free(self, address: int) -> None:
        self.theirs.deallocate_raw(address)

    def chunks(self) -> list[tuple[int, int, bool]]:
        return [(row["address"], row["size"], row["in_use"]) for row in self.theirs.memory_map()]

    def calls(self) -> list[tuple[str, int, int | None]]:
        return self.theirs.calls


@pytest.mark.parametrize("seed", SEEDS[:100])
def test_a_graph_is_given_what_tensorflow_alone_would_give_it(seed: int) -> None:
    """So is everybody else, while graphs are captured. Each pool has one stream here: TensorFlow
    has one set of regions."""
    print(f"repeat with BFC_SEED={seed}")
    rng = random.Random(seed)
    history = GraphHistory(rng, CompiledAlone, streams=(rng.choice([7, 8]),))
    history.play(300)
    for alone in history.beside.values():
        assert isinstance(alone, CompiledAlone)
        alone.theirs.close()
