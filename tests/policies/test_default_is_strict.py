"""The default is strict up to strict's first refusal: the same addresses, and the same calls of the
driver.

`BFC_SEED=n` repeats the histories of one seed, `BFC_HISTORIES=n` runs seeds up to n.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from caching_subject import Ours
from torch_histories import PROFILES, History, make_history, run_alone

import bfc
from bench.peers.server import Operation
from bench.peers.torch import NEWEST

KIB, MIB = 1 << 10, 1 << 20
SIDE = 4


def seeds(few: int) -> range:
    if "BFC_SEED" in os.environ:
        return range(int(os.environ["BFC_SEED"]), int(os.environ["BFC_SEED"]) + 1)
    return range(int(os.environ.get("BFC_HISTORIES", few)))


def with_held_work(capacity: int, **options: Any) -> tuple[bfc.SimulatedSubAllocator, Any]:
    device = bfc.SimulatedSubAllocator(capacity)
    device.hold(SIDE)
    return device, bfc.CachingAllocator(device, **options)


def used_on_the_side(allocator: bfc.Allocator, address: int) -> None:
    allocator.record_stream(address, SIDE)
    allocator.deallocate_raw(address)


# PyTorch's policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_what_streams_gave_back_is_looked_at_only_after_the_device_was_asked(strict: bool) -> None:
    device, allocator = with_held_work(100 * MIB, strict=strict)
    first, second = allocator.allocate_raw(8 * MIB), allocator.allocate_raw(8 * MIB)
    assert second == first + 8 * MIB
    allocator.deallocate_raw(allocator.allocate_raw(80 * MIB, stream=2))
    used_on_the_side(allocator, second)
    again = allocator.allocate_raw(8 * MIB)
    assert device.calls[-2:] == [("free", 80 * MIB, device.calls[1][2]), ("alloc", 20 * MIB, again)]
    assert again > second


@pytest.mark.parametrize("strict", [False, True])
def test_a_scope_keeps_what_other_streams_used_until_a_refusal(strict: bool) -> None:
    device, allocator = with_held_work(60 * MIB, strict=strict, torch="2.11")
    with bfc.use_mem_pool(bfc.MemPool(allocator)):
        block = allocator.allocate_raw(30 * MIB)
        used_on_the_side(allocator, block)
        device.finish(SIDE)
        assert allocator.allocate_raw(30 * MIB) == block + 30 * MIB
        if strict:
            with pytest.raises(bfc.OutOfMemoryError):
                allocator.allocate_raw(30 * MIB)
        else:
            assert allocator.allocate_raw(30 * MIB) == block


class Default(Ours):
    """But for the switch that collects where upstream does not."""

    def __init__(self, *, settings: str | None = None, torch: str = NEWEST, **device: Any) -> None:
        super().__init__(settings=settings, torch=torch, **device)
        self.allocator = bfc.CachingAllocator(
            self.device, settings=settings or "", collect_without_limit=False, torch=torch
        )


def without_emptying_in_a_scope(operations: list[Operation]) -> Iterator[Operation]:
    """Strict keeps what was freed in the default pools then; a user who asks for it gets it."""
    opened = 0
    for operation in operations:
        opened += (operation[0] == "begin_pool") - (operation[0] == "end_pool")
        if operation[0] != "empty_cache" or not opened:
            yield operation


def up_to_a_refusal(answers: list[Any]) -> list[Any]:
    for index, answer in enumerate(answers):
        if answer in ("a failure: oom", "a failure: internal", "a failure: value"):
            return answers[:index]
    return answers


def compared(history: History) -> int:
    """How many operations both answered alike."""
    told: list[Operation] = []
    for operation in without_emptying_in_a_scope(history.operations):
        told += [operation, ("calls",)] if operation[0] == "malloc" else [operation]
    strict = up_to_a_refusal(run_alone(Ours, history, told))
    default = run_alone(Default, history, told)
    for index, (one, other) in enumerate(zip(strict, default, strict=False)):
        assert one == other, (
            f"{told[index]!r} is answered differently by the default; repeat with "
            f"BFC_SEED={history.seed} pytest {__file__} -k {history.profile}"
        )
    return len(strict)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_caching_policy_is_strict_up_to_a_refusal(profile: str) -> None:
    lengths = [compared(make_history(profile, seed)) for seed in seeds(12)]
    assert sum(lengths) > 20 * len(lengths), lengths


# TensorFlow's policy ------------------------------------------------------------------------------


def test_just_what_is_needed_is_asked_for_only_where_strict_refuses() -> None:
    """The region that is free goes back first, as upstream has it."""
    made: list[tuple[list[Any], int]] = []
    for strict in (True, False):
        device = bfc.SimulatedSubAllocator(10 * MIB)
        allocator = bfc.BFCAllocator(device, memory_limit="1 GiB", allow_growth=True, strict=strict)
        allocator.deallocate_raw(allocator.allocate_raw(3 * MIB))
        address = allocator.allocate_raw(6 * MIB)
        made.append((list(device.calls), address))
    assert made[0] == made[1]
    assert ("free", 4 * MIB) in [call[:2] for call in made[0][0]]


class Pair:
    """A strict allocator and a default one, on a device each, told the same."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.device_options: dict[str, Any] = {
            "capacity": rng.choice((6 * MIB, 10 * MIB, 37 * MIB + 512, 100 * MIB)),
            "gap": rng.choice((0, 0, 512)),
            "supports_coalescing": rng.random() < 0.3,
            "max_bytes": rng.choice((None, None, 3 * MIB, 20 * MIB)),
        }
        self.options: dict[str, Any] = {
            "memory_limit": rng.choice((None, 8 * MIB, 33 * MIB + 5, 200 * MIB, 1 << 30)),
            "allow_growth": rng.random() < 0.85,
            "garbage_collection": rng.random() < 0.8,
            "fragmentation_fraction": rng.choice((0.0, 0.0, 0.01, 0.2)),
        }
        self.devices = [bfc.SimulatedSubAllocator(**self.device_options) for _ in range(2)]
        self.allocators = [
            bfc.BFCAllocator(device, strict=strict, **self.options)
            for device, strict in zip(self.devices, (True, False), strict=True)
        ]
        self.live: list[int] = []
        self.counted = self.rng.random() < 0.3
        if self.counted:
            self.each(lambda one: one.set_timing_counter(bfc.SharedCounter()))
        self.frees = 0

    def each(self, do: Callable[[Any], Any]) -> list[Any]:
        return [do(one) for one in self.allocators]

    def size(self) -> int:
        capacity = self.device_options["capacity"]
        return self.rng.randrange(1, self.rng.choice((4 * KIB, capacity // 20, capacity // 3)))

    def allocate(self) -> bool:
        """Whether strict did not refuse it."""
        nbytes, stream = self.size(), self.rng.choice((0, 0, 0, 2, SIDE))
        limited = self.counted and self.rng.random() < 0.3
        before = self.rng.randrange(self.frees + 1) if limited else None
        try:
            address = self.allocators[0].allocate_raw(nbytes, stream, freed_before=before)
        except bfc.OutOfMemoryError:
            return False
        other = self.allocators[1].allocate_raw(nbytes, stream, freed_before=before)
        assert address == other, f"{nbytes} bytes on stream {stream}: {address:#x}, {other:#x}"
        self.live.append(address)
        return True

    def free(self) -> None:
        if self.live:
            address = self.live.pop(self.rng.randrange(len(self.live)))
            self.each(lambda one: one.deallocate_raw(address))
            self.frees += 1

    def use(self) -> None:
        if self.live:
            address, stream = self.rng.choice(self.live), self.rng.choice((2, SIDE))
            self.each(lambda one: one.record_stream(address, stream))

    def steer(self) -> None:
        name, argument = self.rng.choice(("hold", "finish")), self.rng.choice((2, SIDE))
        if self.rng.random() < 0.2:
            name, argument = "fail_at", self.rng.randrange(1, 3)
        for device in self.devices:
            getattr(device, name)(argument)

    def release(self) -> None:
        assert len(set(self.each(lambda one: one.release_free_regions()))) == 1

    def advance(self) -> None:
        if self.counted:
            frontier = self.rng.randrange(self.frees + 2)
            self.each(lambda one: one.set_safe_frontier(frontier))

    def run(self, steps: int) -> int:
        """How many steps it took to strict's refusal."""
        weights = {self.free: 5.0, self.use: 0.7, self.steer: 0.7, self.advance: 0.3}
        weights[self.release] = 0.05
        for step in range(steps):
            if self.rng.random() < 0.4:
                if not self.allocate():
                    return step
            else:
                self.rng.choices(list(weights), list(weights.values()))[0]()
            assert self.devices[0].calls == self.devices[1].calls
            first, second = self.each(lambda one: one.stats())
            assert first == second
        return steps


def test_the_bfc_policy_is_strict_up_to_a_refusal() -> None:
    lengths: list[int] = []
    for seed in seeds(600):
        pair = Pair(random.Random(f"bfc {seed}"))
        try:
            lengths.append(pair.run(120))
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{pair.device_options} {pair.options}\n"
                f"repeat with BFC_SEED={seed} pytest {__file__} -k bfc_policy"
            ) from None
    assert sum(lengths) > 20 * len(lengths), lengths
