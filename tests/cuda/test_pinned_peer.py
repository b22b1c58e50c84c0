"""`PinnedAllocator` on the CUDA driver beside PyTorch's own policy: the same calls of the driver,
in the same order. A host allocation counts by its place among them, as addresses differ.

`BFC_SEED=n pytest -m peers tests/cuda/test_pinned_peer.py` repeats one random history.
"""

from __future__ import annotations

import itertools
import os
import random
from contextlib import ExitStack
from typing import Any

import pytest
import raw_cuda

import bfc
from bench.peers.server import Call, Operation
from bench.peers.torch_host import VERSIONS, TorchHostPeer
from bfc.testing import cuda_emulator as emulator

pytestmark = pytest.mark.peers

SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(40)
MIB = 1 << 20
STREAMS = 3


def draw(dice: random.Random, length: int) -> list[Operation]:
    operations: list[Operation] = []
    live: list[int] = []
    for slot in range(length):
        chance = dice.random()
        if chance < 0.4 or not live:
            power = 1 << dice.randrange(0, 19)
            nbytes = dice.choice([0, power - 1, power, power + 1, dice.randint(1, MIB)])
            operations.append(("allocate", nbytes, slot))
            live.append(slot)
        elif chance < 0.65:
            operations.append(("free", live.pop(dice.randrange(len(live)))))
        elif chance < 0.8:
            operations.append(("record_event", dice.choice(live), dice.randrange(STREAMS)))
        elif chance < 0.97:
            operations.append((dice.choice(["hold", "finish"]), dice.randrange(STREAMS)))
        else:
            operations.append(("empty_cache",))
    return operations


def run_on_driver(
    driver: emulator.Driver, operations: list[Operation], settings: str
) -> list[tuple[Any, ...]]:
    """The calls of the driver that concern host memory and events."""
    start = len(driver.calls)
    with ExitStack() as stack:
        streams = [stack.enter_context(raw_cuda.stream()) for _ in range(STREAMS)]
        allocator = bfc.PinnedAllocator(bfc.CUDASubAllocator(kind="pinned"), settings)
        pointers: dict[int, int] = {}
        for name, *arguments in operations:
            if name == "allocate":
                pointers[arguments[1]] = allocator.allocate_raw(arguments[0])
            elif name == "free":
                allocator.deallocate_raw(pointers[arguments[0]])
            elif name == "record_event":
                allocator.record_event(pointers[arguments[0]], None, streams[arguments[1]])
            elif name == "hold":
                driver.hold(streams[arguments[0]])
            elif name == "finish":
                driver.release(streams[arguments[0]])
            else:
                allocator.empty_cache()
        calls = driver.calls[start:]
        driver.release_all()
        allocator.close()
    return [found for call in calls if (found := in_short(call, streams)) is not None]


def in_short(call: emulator.Call, streams: list[int]) -> tuple[Any, ...] | None:
    if call.name == "cuMemHostAlloc":
        return ("host_malloc", call.nbytes, call.address)
    if call.name == "cuMemFreeHost":
        return ("host_free", call.address)
    if call.name == "cuEventRecord":
        return ("event_record", streams.index(call.stream))
    if call.name == "cuEventQuery":
        return ("event_query", int(call.result == 0))
    return None


def of_the_peer(call: Call) -> tuple[Any, ...]:
    name, first, second = call
    short = {
        "host_malloc": (first, second),
        "host_free": (second,),
        "event_record": (second,),
        "event_query": (second,),
    }
    return (name, *short[name])


def by_place(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """An address becomes the number of its allocation."""
    places: dict[int, int] = {}
    numbers = itertools.count()
    out: list[tuple[Any, ...]] = []
    for name, *words in calls:
        if name in ("host_malloc", "host_free"):
            address = words.pop()
            if name == "host_malloc":
                places[address] = next(numbers)
            words.append(places[address])
        out.append((name, *words))
    return out


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("reserve", [0, 2])
def test_the_driver_is_called_as_by_the_original(
    version: str, reserve: int, emulated: emulator.Driver
) -> None:
    for seed in SEEDS:
        operations = draw(random.Random(seed), 150)
        with TorchHostPeer(version) as peer:
            peer.reserve(reserve * MIB)
            peer.run(operations)
            theirs = by_place([of_the_peer(call) for call in peer.calls])
        text = f"pinned_reserve_segment_size_mb:{reserve}" if reserve else ""
        ours = by_place(run_on_driver(emulated, operations, text))
        again = f"BFC_SEED={seed} pytest -m peers tests/cuda/test_pinned_peer.py -k {version}"
        assert theirs == ours, again
        assert len(theirs) > 10, again
