"""Requests from two ends of one region (XLA's spatial partitioning): beside the slow model, in
worked cases, and what is refused.

`BFC_SEED=n` repeats one history.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from tensorflow_pairs import DEVICE_OPTIONS, arguments_of, options_of, play

import bfc
from bfc_slow_models.partitioned_model import PartitionedModel
from bfc_slow_models.tensorflow_model import layout_of

KIB, MIB = 1 << 10, 1 << 20
BASE = 1 << 40
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(60)
ALIGNMENTS = (64, 64, 256, 4096, 65536, 2 * MIB)


def pool(limit: str = "1 MiB", **options: Any) -> bfc.BFCAllocator:
    chosen = {"tensorflow": "2.23", "enable_spatial_partitioning": True} | options
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(1 << 50), memory_limit=limit, **chosen)


def growing(joins: bool) -> bfc.BFCAllocator:
    """From a first region of 1 MiB, on a device whose blocks follow each other."""
    return bfc.BFCAllocator(
        bfc.SimulatedSubAllocator(1 << 50, alignment=256, supports_coalescing=joins),
        memory_limit="64 MiB",
        tensorflow="2.23",
        enable_spatial_partitioning=True,
        allow_growth=True,
        garbage_collection=False,
        initial_region_bytes="1 MiB",
    )


def tags(allocator: bfc.BFCAllocator) -> list[tuple[str, int, bool]]:
    return [(it.tag, it.size // KIB, it.in_use) for it in allocator.snapshot().chunks()]


class Twins:
    """Ours, and the model."""

    def __init__(self, options: dict[str, Any], strict: bool) -> None:
        device = {name: options[name] for name in options if name in DEVICE_OPTIONS}
        capacity = device.pop("capacity")
        self.devices = [bfc.SimulatedSubAllocator(capacity, **device) for _ in range(2)]
        chosen = arguments_of(options) | {"strict": strict, "tensorflow": "2.23"}
        self.ours = bfc.BFCAllocator(self.devices[0], **chosen)
        del chosen["enable_spatial_partitioning"]
        self.model = PartitionedModel(self.devices[1], **chosen)
        if options["timing_counter"]:
            self.ours.set_timing_counter(bfc.SharedCounter())
            self.model.set_timing_counter()

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 64, upper: bool = False
    ) -> int:
        end = "upper" if upper else "lower"
        expected = self.model.allocate(nbytes, freed_before, alignment, end) or 0
        try:
            place = self.ours.allocate_raw(
                nbytes, freed_before=freed_before, alignment=alignment, allocation_end=end
            )
        except bfc.OutOfMemoryError:
            place = 0
        assert place == expected
        assert place % alignment == 0
        return place

    def deallocate(self, address: int) -> None:
        self.ours.deallocate_raw(address)
        self.model.free(address)

    def fail_at(self, n: int) -> None:
        for device in self.devices:
            device.fail_at(n)

    def set_safe_frontier(self, count: int) -> None:
        self.ours.set_safe_frontier(count)
        self.model.set_safe_frontier(count)

    def compare(self) -> None:
        assert layout_of(self.ours) == self.model.layout()
        ours = [it.tag for it in self.ours.snapshot().chunks()]
        assert ours == [it.tag for it in self.model.chunks()]
        assert self.devices[0].calls == self.devices[1].calls
        assert self.ours.stats() == self.model.stats()
        self.ours.check()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_agree_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    options = options_of(rng, True) | {"timing_counter": seed % 3 == 0}
    print(f"repeat with BFC_SEED={seed}: {options}")
    twins = Twins(options, strict=seed % 2 == 0)
    play(rng, twins, options, ALIGNMENTS)
    twins.ours.close()
    twins.model.close()
    assert twins.devices[0].calls == twins.devices[1].calls


def test_the_ends_grow_towards_each_other_and_the_gap_is_for_both() -> None:
    ours = pool()
    lower, upper = (
        ours.allocate_raw(100 * KIB),
        ours.allocate_raw(200 * KIB, allocation_end=bfc.AllocationEnd.UPPER),
    )
    assert (lower - BASE, upper - BASE) == (0, (1024 - 200) * KIB)
    assert tags(ours) == [("lower", 100, True), ("central_gap", 724, False), ("upper", 200, True)]
    snapshot = ours.snapshot()
    (gap,) = snapshot.free_chunks()
    assert gap.bin_num == -1  # XLA has it in no bin
    assert sum(it.total_chunks_in_bin for it in snapshot.bins) == 2
    ours.deallocate_raw(lower)
    assert ours.allocate_raw(824 * KIB, allocation_end="upper") == BASE


def test_a_hole_is_for_its_end_alone() -> None:
    ours = pool(strict=True)
    first, _ = [ours.allocate_raw(400 * KIB) for _ in range(2)]
    ours.deallocate_raw(first)
    assert tags(ours)[0] == ("lower", 400, False)
    with pytest.raises(bfc.OutOfMemoryError):
        ours.allocate_raw(300 * KIB, allocation_end="upper")
    assert ours.allocate_raw(300 * KIB) == first


def test_the_offsets_of_an_end_depend_on_its_own_requests_only() -> None:
    def offsets(others: int) -> list[int]:
        rng, noise = random.Random(1), random.Random(others)
        ours = pool("64 MiB")
        live: list[int] = []
        found: list[int] = []
        for _ in range(200):
            for _ in range(others and noise.randrange(3)):
                ours.allocate_raw(noise.randrange(1, 50 * KIB))
            if live and rng.random() < 0.45:
                ours.deallocate_raw(live.pop(rng.randrange(len(live))))
            else:
                size = rng.randrange(1, 300 * KIB)
                live.append(ours.allocate_raw(size, allocation_end="upper"))
                found.append(live[-1])
        return found

    assert offsets(0) == offsets(7) == offsets(8)


def test_only_the_upper_end_grows() -> None:
    ours = pool("64 MiB", allow_growth=True, garbage_collection=False, initial_region_bytes="8 MiB")
    ours.allocate_raw(5 * MIB)
    with pytest.raises(bfc.OutOfMemoryError):
        ours.allocate_raw(4 * MIB)
    assert ours.allocate_raw(4 * MIB, allocation_end="upper") >= BASE + 8 * MIB
    assert ours.stats().pool_bytes == 12 * MIB


def test_without_a_first_region_there_is_no_other() -> None:
    """As the nightly has it: history 3322721108 of the soak found that ours grew."""
    device = bfc.SimulatedSubAllocator("1 MiB")
    ours = bfc.BFCAllocator(
        device,
        memory_limit="1 MiB",
        strict=True,
        tensorflow="2.23",
        enable_spatial_partitioning=True,
        allow_growth=True,
        garbage_collection=False,
        initial_region_bytes=256,
    )
    device.fail_at(1)
    with pytest.raises(bfc.OutOfMemoryError):
        ours.allocate_raw(2400, allocation_end="upper")
    assert device.calls == [("alloc", 256, None)]
    assert ours.allocate_raw(2400, allocation_end="upper")


@pytest.mark.parametrize("joins", [True, False])
def test_the_gap_may_lie_in_what_extended_the_first_region(joins: bool) -> None:
    """As the nightly has it: a free chunk behind the lower end becomes the gap, in that region."""
    ours = growing(joins)
    ours.allocate_raw(MIB)  # all of the first region
    blocks = [ours.allocate_raw(MIB, allocation_end="upper") for _ in range(2)]
    for block in sorted(blocks):
        ours.deallocate_raw(block)
    ours.allocate_raw(MIB * 3 // 2, allocation_end="upper")
    assert tags(ours)[1:] == (
        [("central_gap", 512, False), ("upper", 1536, True)] if joins else [("upper", 2048, True)]
    )


def test_the_upper_end_does_not_extend_the_region_of_a_graph() -> None:
    ours = growing(joins=True)
    ours.allocate_raw(MIB)
    with ours.capture(7) as pool:
        kept = ours.allocate_raw(MIB, stream=7)
    ours.allocate_raw(MIB * 3, allocation_end="upper")
    assert [region.size // MIB for region in ours.snapshot().regions] == [1, 2, 4]
    assert tags(ours)[1:] == [("", 1024, True), ("", 1024, False), ("upper", 4096, True)]
    ours.deallocate_raw(kept)
    pool.release()
    ours.check()


def test_the_policies_of_ends() -> None:
    exact = bfc.EndPolicy("descending", "exact", "exact")
    ours = pool(upper_end_policy=exact)
    blocks = [ours.allocate_raw(100 * KIB, allocation_end="upper") for _ in range(5)]
    for block in blocks[::2]:
        ours.deallocate_raw(block)
    # the last block bordered on the gap; of the two holes the one at the higher address is first
    assert ours.allocate_raw(90 * KIB, allocation_end="upper") == blocks[0] + 10 * KIB


def test_a_history_has_the_ends_of_a_buffer_too() -> None:
    ours = pool()
    with ours.allocate("10 KiB", allocation_end="upper") as buffer:
        assert buffer.ptr == BASE + (1024 - 10) * KIB
    found = ours.try_allocate("2 MiB", allocation_end="upper")
    assert found is None
    ours.release_free_regions()
    assert ours.stats().pool_bytes == 0
    assert ours.allocate_raw(256, allocation_end="upper") > 0
    ours.check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensorflow": "2.21"}, "one end"),
        ({"virtual_memory": True}, "choose one"),
        ({"allow_growth": True}, "initial_region_bytes"),
        ({"allow_growth": True, "initial_region_bytes": "1 MiB"}, "garbage_collection=False"),
        (
            {"allow_growth": True, "garbage_collection": False, "initial_region_bytes": 100},
            "multiple of 256",
        ),
        (
            {"allow_growth": True, "garbage_collection": False, "initial_region_bytes": "2 GiB"},
            "up to the memory limit",
        ),
        ({"initial_region_bytes": "1 MiB"}, "allow_growth=True"),
        (
            {"enable_spatial_partitioning": False, "upper_end_policy": bfc.EndPolicy()},
            "enable_spatial_partitioning=True",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pool(**options)


def test_a_wrong_end_takes_nothing() -> None:
    ours = pool()
    plain = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    caching = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    for allocator, end, said in (
        (ours, "left", "'lower' or 'upper'"),
        (ours, 1, "'lower' or 'upper'"),
        (plain, "upper", "one end"),
        (caching, "upper", "enable_spatial_partitioning"),
    ):
        for request in (allocator.allocate_raw, allocator.allocate, allocator.try_allocate):
            with pytest.raises(ValueError, match=said):
                request(100, allocation_end=end)  # type: ignore[arg-type]
        assert allocator.stats().pool_bytes == 0
    assert plain.allocate_raw(100, allocation_end="lower") > 0


def test_wrong_policies_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="hole_order"):
        bfc.EndPolicy("downwards")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"bfc\.EndPolicy"):
        pool(lower_end_policy="exact")


def test_a_plan_and_two_ends_are_refused() -> None:
    trace = bfc.Trace([0, 1] * 3, [0] * 6, [768, 0] * 3)
    plan = bfc.Plan.from_trace(trace, marks=[0, 2, 4], fallback="bfc")
    with pytest.raises(ValueError, match="two ends"):
        pool(plan=plan)
    with pytest.raises(ValueError, match="two ends"):
        pool().use_plan(plan)
