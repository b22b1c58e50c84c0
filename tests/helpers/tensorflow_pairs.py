"""TensorFlow's compiled BFC beside ours: both are told the same, and asked the same."""

from __future__ import annotations

import random
from typing import Any, Protocol

import pytest

import bfc
from bench.peers.tensorflow import NIGHTLY, RELEASE, EndPolicy, TensorFlowBFC

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Whose rules each version of the original has.
RULES = {RELEASE: "2.21", NIGHTLY: "2.23"}
DEVICE_OPTIONS = ("capacity", "base", "alignment", "gap", "supports_coalescing", "max_bytes")
#: The figures that are 0 in each version.
UNSET = {
    RELEASE: {"largest_free_block_bytes", "bytes_reserved", "peak_bytes_reserved"},
    NIGHTLY: {"bytes_reserved", "peak_bytes_reserved"},
}


def arguments_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of our allocator, but for its device, from the options of the original's."""
    rest = {name: options[name] for name in options if name not in DEVICE_OPTIONS}
    rest.pop("timing_counter", None)
    if not rest.pop("spatial_partitioning", False):
        return rest
    rest["enable_spatial_partitioning"] = True
    initial = rest.pop("initial_region", 0)
    for end in ("lower", "upper"):
        rest[f"{end}_end_policy"] = end_policy_of(rest.pop(f"{end}_end", EndPolicy.EXACT_GAP))
    return rest | ({"initial_region_bytes": initial} if rest["allow_growth"] else {})


def end_policy_of(bits: EndPolicy) -> bfc.EndPolicy:
    return bfc.EndPolicy(
        "descending" if bits & EndPolicy.DESCENDING else "ascending",
        "exact" if bits & EndPolicy.EXACT_HOLES else "retain_padding",
        "exact" if bits & EndPolicy.EXACT_GAP else "retain_padding",
    )


class Pair:
    """Both allocators, told the same."""

    def __init__(self, version: str = RELEASE, **options: Any) -> None:
        ours = {name: options[name] for name in options if name in DEVICE_OPTIONS}
        self.device = bfc.SimulatedSubAllocator(ours.pop("capacity"), **ours)
        rest = arguments_of(options)
        self.ours = bfc.BFCAllocator(self.device, strict=True, tensorflow=RULES[version], **rest)
        self.theirs = TensorFlowBFC(version=version, **options)
        self.version = version
        if options.get("timing_counter"):
            self.ours.set_timing_counter(bfc.SharedCounter())

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 64, upper: bool = False
    ) -> int:
        more: dict[str, Any] = {"allocation_end": "upper"} if upper else {}
        try:
            address = self.ours.allocate_raw(
                nbytes, freed_before=freed_before, alignment=alignment, **more
            )
        except bfc.OutOfMemoryError:
            address = 0
        assert address == self.theirs.allocate_raw(
            nbytes, freed_before, alignment=alignment, upper=upper
        )
        if address:
            for question in ("requested_size", "allocated_size", "allocation_id"):
                assert getattr(self.ours, question)(address) == getattr(self.theirs, question)(
                    address
                )
        return address

    def deallocate(self, address: int) -> None:
        self.ours.deallocate_raw(address)
        self.theirs.deallocate_raw(address)

    def fail_at(self, n: int) -> None:
        self.device.fail_at(n)
        self.theirs.fail_at(n)

    def set_safe_frontier(self, count: int) -> None:
        self.ours.set_safe_frontier(count)
        self.theirs.set_safe_frontier(count)

    def compare(self) -> None:
        assert self.device.calls == self.theirs.calls
        ours, theirs = self.ours.stats(), self.theirs.stats()
        assert theirs.pop("peak_allocated_bytes") == ours.peak_bytes_in_use
        unset = UNSET[self.version]
        for field in theirs.keys() - unset:
            assert getattr(ours, field) == theirs[field], field
        assert not any(theirs[field] for field in unset)
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


def partitioned_options(rng: random.Random) -> dict[str, Any]:
    """The same for memory with two ends, each with a policy of its own."""
    options = random_options(rng) | {"timing_counter": False, "spatial_partitioning": True}
    if options["allow_growth"]:
        limit = options["memory_limit"] // 256
        options["garbage_collection"] = False
        options["initial_region"] = 256 * rng.choice([limit, limit // 2, rng.randrange(1, limit)])
    for end in ("lower_end", "upper_end"):
        options[end] = rng.choice([EndPolicy.EXACT_GAP, EndPolicy(rng.randrange(8))])
    return options


def is_a_hazard(options: dict[str, Any]) -> bool:
    """Where upstream hangs or corrupts itself (TensorFlow's behaviour, CC-39 and 2.7): nothing
    to compare."""
    small_slack = 0 < options["fragmentation_fraction"] * options["memory_limit"] < 256
    collects_stamped = options["timing_counter"] and options["garbage_collection"]
    return small_slack or collects_stamped


def random_size(rng: random.Random, limit: int) -> int:
    """Never below 2305: there TensorFlow 2.21 may ask for the same size for ever (CC-40)."""
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


class Subject(Protocol):
    """What a history is played on."""

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 64, upper: bool = False
    ) -> int: ...
    def deallocate(self, address: int) -> None: ...
    def fail_at(self, n: int) -> None: ...
    def set_safe_frontier(self, count: int) -> None: ...
    def compare(self) -> None: ...


def options_of(rng: random.Random, partitioned: bool = False) -> dict[str, Any]:
    make = partitioned_options if partitioned else random_options
    options = make(rng)
    while is_a_hazard(options):
        options = make(rng)
    return options


def play(
    rng: random.Random,
    subject: Subject,
    options: dict[str, Any],
    alignments: tuple[int, ...] = (64,),
) -> int:
    """One random history. How many allocations and frees it was."""
    live: list[int] = []
    allocations = frees = frontier = 0
    limit = options["memory_limit"]
    for step in range(rng.choice([60, 200, 600])):
        action = rng.random()
        if action < 0.03:
            subject.fail_at(1)
        elif action < 0.06 and options["timing_counter"]:
            frontier = rng.randrange(frontier, frees + 2)
            subject.set_safe_frontier(frontier)
        elif action < 0.45 and live:
            subject.deallocate(live.pop(rng.randrange(len(live))))
            frees += 1
        else:
            constrained = options["timing_counter"] and rng.random() < 0.3
            address = subject.allocate(
                max(0, random_size(rng, limit)),
                rng.randrange(0, frees + 2) if constrained else 0,
                rng.choice([it for it in alignments if it <= limit]),
                bool(options.get("spatial_partitioning")) and rng.random() < 0.5,
            )
            allocations += 1
            if address:
                live.append(address)
        if step % 10 == 0:
            subject.compare()
    subject.compare()
    return allocations + frees


def play_on_both(
    seed: int, version: str, alignments: tuple[int, ...] = (64,), partitioned: bool = False
) -> int:
    """One random history on the original and on ours. How many allocations and frees it was."""
    rng = random.Random(seed)
    options = options_of(rng, partitioned)
    print(f"repeat with BFC_SEED={seed}: {options}")
    pair = Pair(version, **options)
    operations = play(rng, pair, options, alignments)
    pair.compare_dumps()
    pair.ours.check()
    pair.close()
    return operations
