"""Expandable segments that were recorded, also without the beginning: with the recorded
settings, blocks lie where they were, counted from the start of their reservation."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_recorder import random_size

import bfc

MIB = 1 << 20
ON = "expandable_segments:True"
DEVICE = 2 << 30


def facts(trace: bfc.Trace) -> dict[str, Any]:
    return trace.meta["torch"]


def recorded_settings(trace: bfc.Trace) -> str:
    return facts(trace)["settings"]["PYTORCH_CUDA_ALLOC_CONF"]


def run(allocator: Any, seed: int, steps: int = 600) -> None:
    """Random requests on two streams; half of them are freed."""
    dice = random.Random(seed)
    live: list[int] = []
    for _ in range(steps):
        if live and dice.random() < 0.5:
            allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            live.append(allocator.allocate_raw(random_size(dice), 2 * dice.randrange(2)))


class Streams:
    """`run` gives a stream by place."""

    def __init__(self, allocator: bfc.CachingAllocator) -> None:
        self.allocator = allocator
        self.deallocate_raw = allocator.deallocate_raw

    def allocate_raw(self, nbytes: int, stream: int) -> int:
        return self.allocator.allocate_raw(nbytes, stream=stream)


def record(path: Path, seed: int, *, entries: int = 1 << 20) -> tuple[bfc.Trace, list[int]]:
    """A trace, and where the reservations began that hold memory at its end."""
    source = bfc.SimulatedSubAllocator(DEVICE)
    with bfc.CachingAllocator(source, settings=ON, strict=True) as allocator:
        allocator.record_history(context=None, max_entries=entries)
        run(Streams(allocator), seed)
        allocator.dump(path)
        return bfc.Trace.from_torch(path), reservations(allocator)


def reservations(allocator: bfc.CachingAllocator) -> list[int]:
    found = {region.reserved for region in allocator.snapshot().regions}
    return sorted(reserved[0] for reserved in found if reserved is not None)


def replayed(trace: bfc.Trace, device: int) -> np.ndarray:
    """Where the replay with the recorded settings places what the history allocates."""
    source = bfc.SimulatedSubAllocator(device)
    with bfc.CachingAllocator(source, settings=recorded_settings(trace), strict=True) as allocator:
        return trace.replay(allocator).addresses[was_recorded(trace)]


def was_recorded(trace: bfc.Trace) -> np.ndarray:
    """The allocations of the history itself."""
    chosen = trace.op == 0
    chosen[: facts(trace)["first_recorded_event"]] = False
    return chosen


def within(addresses: np.ndarray, starts: Iterable[int]) -> np.ndarray:
    """Counted from the starts of reservations, of which each address takes the one below it."""
    below = np.array(sorted(starts), dtype=np.uint64)
    return addresses - below[np.searchsorted(below, addresses, side="right") - 1]


def wanted(trace: bfc.Trace) -> np.ndarray:
    return np.array(facts(trace)["addresses"], dtype=np.uint64)[was_recorded(trace)]


@pytest.mark.parametrize("seed", range(8))
def test_a_whole_history_is_repeated_to_the_byte(tmp_path: Path, seed: int):
    trace, _ = record(tmp_path / "run.pickle", seed)
    assert facts(trace)["first_recorded_event"] == 0
    assert facts(trace)["settings"]["expandable_segments"] is True
    assert {kind for kind, *_ in facts(trace)["segment_events"]} == {"segment_map"}
    assert np.array_equal(replayed(trace, DEVICE), wanted(trace))


def test_a_history_in_which_requests_take_memory_back_is_repeated(tmp_path: Path):
    """A request on another stream finds the device full of what is cached."""
    source = bfc.SimulatedSubAllocator("110 MiB")
    with bfc.CachingAllocator(source, settings=ON, strict=True) as allocator:
        allocator.record_history(context=None)
        for nbytes, stream in ((60, 2), (60, 4), (30, 2), (90, 6), (1, 4)):
            allocator.deallocate_raw(allocator.allocate_raw(nbytes * MIB, stream=stream))
        allocator.dump(tmp_path / "run.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "run.pickle")
    kinds = [kind for kind, *_ in facts(trace)["segment_events"]]
    assert kinds.count("segment_unmap") == 3
    assert np.array_equal(replayed(trace, source.total_bytes), wanted(trace))


@pytest.mark.parametrize("seed", range(8))
def test_a_history_without_its_beginning_is_repeated_within_its_reservations(
    tmp_path: Path, seed: int
):
    trace, starts = record(tmp_path / "run.pickle", seed, entries=200)
    assert facts(trace)["first_recorded_event"] > 0
    assert facts(trace)["segments_not_exact"] == facts(trace)["blocks_of_unsure_size"] == 0
    source = bfc.SimulatedSubAllocator(DEVICE)
    with bfc.CachingAllocator(source, settings=recorded_settings(trace), strict=True) as allocator:
        result = trace.replay(allocator)
        placed = within(result.addresses[was_recorded(trace)], reservations(allocator))
    assert np.array_equal(placed, within(wanted(trace), starts))


def test_addresses_without_memory_before_the_history_make_it_inexact(tmp_path: Path):
    """No request of a trace unmaps a hole: what lies behind it is laid out in it."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator(DEVICE), settings=ON) as allocator:
        addresses = [allocator.allocate_raw(20 * MIB) for _ in range(12)]
        for hole in (3, 4, 8):
            allocator.deallocate_raw(addresses[hole])
        allocator.release_free_regions()
        allocator.record_history(context=None)
        allocator.allocate_raw(40 * MIB)
        allocator.dump(tmp_path / "run.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "run.pickle")
    assert [address - addresses[0] for _, address, _ in facts(trace)["segments"]] == [
        0,
        100 * MIB,
        180 * MIB,
    ]
    assert facts(trace)["segments_not_exact"] == 3
    assert trace.size[was_recorded(trace)].tolist() == [40 * MIB]


@pytest.mark.parametrize("settings", ["", ON, "max_split_size_mb:64"])
def test_it_is_replayed_under_any_settings(tmp_path: Path, settings: str):
    trace, _ = record(tmp_path / "run.pickle", 1, entries=200)
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator(DEVICE), settings=settings) as allocator:
        assert trace.replay(allocator).failed == 0
        allocator.check()


# A history of the original ---------------------------------------------------------------------


class Original:
    """`run` on PyTorch's compiled allocator."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer
        self.deallocate_raw = peer.free

    def allocate_raw(self, nbytes: int, stream: int) -> int:
        address = self.peer.malloc(nbytes, stream)
        assert isinstance(address, int)
        return address


def content_of(peer: Any, entries: int) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` would make of it."""
    return {
        "segments": peer.snapshot(),
        "device_traces": [[dict(entry) for entry in peer.trace()][-entries:]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ON, "expandable_segments": True},
    }


@pytest.mark.peers
@pytest.mark.parametrize("entries", [1 << 20, 200])
@pytest.mark.parametrize("seed", range(4))
def test_a_history_of_the_original_is_repeated(seed: int, entries: int):
    from bench.peers.torch import TorchPeer

    with TorchPeer(settings=ON, capacity=DEVICE) as peer:
        peer.record_history(True)
        run(Original(peer), seed)
        content = content_of(peer, entries)
        reserved = [address for kind, _, address in peer.calls if kind == "reserve"]
    trace = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, protocol=4)))
    assert facts(trace)["segments_not_exact"] == 0
    source = bfc.SimulatedSubAllocator(DEVICE)
    with bfc.CachingAllocator(source, settings=recorded_settings(trace), strict=True) as allocator:
        result = trace.replay(allocator)
        placed = within(result.addresses[was_recorded(trace)], reservations(allocator))
    assert np.array_equal(placed, within(wanted(trace), reserved))
    assert len(placed) > 50
