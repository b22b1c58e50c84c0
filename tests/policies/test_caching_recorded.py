"""Training runs that were recorded on a GPU: every block where PyTorch placed it there."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc

TRACES = Path(__file__).parents[2] / "bench" / "traces"
ALLOCATIONS = {"gpu_decomfl": 7946, "gpu_lm_small": 36}
#: Histories of PyTorch's own format, by their recorded allocations: see the README beside them.
SNAPSHOTS = {
    "rec_bcrafton_snapshot": 2162,
    "rec_magma27_snapshot": 1721,
    "rec_silmont2000_memory_forward_bf16_128": 937,
    "rec_wedsonlin_medium_128_inference": 1280,
    "rec_wedsonlin_medium_128_training": 6526,
    "rec_wedsonlin_medium_256_inference": 1280,
    "rec_wedsonlin_medium_256_training": 6624,
    "rec_wedsonlin_medium_512_inference": 1666,
    "rec_wedsonlin_medium_512_training": 7591,
}


class Recorded(bfc.SubAllocator):
    """A device that gives the segments of a recorded run, in their order, and says what it was
    asked for."""

    device = bfc.Device("recorded")
    total_bytes = 80 << 30

    def __init__(self, addresses: list[int]) -> None:
        self.left = addresses[::-1]
        self.asked: list[int] = []
        self.live_bytes = 0

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        self.asked.append(nbytes)
        if not self.left:
            return None
        self.live_bytes += nbytes
        return self.left.pop(), nbytes

    def free(self, address: int, nbytes: int) -> None:
        self.live_bytes -= nbytes


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_a_run_on_a_gpu_is_repeated_to_the_byte(name: str, strict: bool) -> None:
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key] for key in arrays.files if key != "meta"}
    source = Recorded(run["segment_address"].tolist())
    with bfc.CachingAllocator(source, strict=strict, torch="2.11") as allocator:
        result = bfc.Trace.load(TRACES / f"{name}.npz").replay(allocator)
        allocates = run["op"] == 0
        assert np.count_nonzero(allocates) == ALLOCATIONS[name]
        wrong = np.flatnonzero((result.addresses != run["address"]) & allocates)
        assert wrong.tolist() == []
        assert source.asked == run["segment_size"].tolist()
        assert source.left == []
        stats = allocator.memory_stats()
        assert stats["reserved_bytes.all.peak"] == run["segment_size"].sum()
        assert stats["num_alloc_retries"] == stats["num_ooms"] == result.failed == 0
        allocator.check()
    assert source.live_bytes == 0


@pytest.mark.parametrize(("name", "elsewhere"), [("gpu_lm_small", 5), ("gpu_decomfl", 2113)])
def test_a_later_pytorch_would_have_placed_some_blocks_elsewhere(name: str, elsewhere: int) -> None:
    """As many as the compiled allocator of 2.15.0 did with these addresses of segments."""
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key] for key in arrays.files if key != "meta"}
    source = Recorded(run["segment_address"].tolist())
    with bfc.CachingAllocator(source, strict=True, torch="2.15") as allocator:
        result = bfc.Trace.load(TRACES / f"{name}.npz").replay(allocator)
    wrong = (result.addresses != run["address"]) & (run["op"] == 0)
    assert np.count_nonzero(wrong) == elsewhere


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_each_segment_is_asked_for_before_the_recorded_event(name: str) -> None:
    """The same by single calls, which also shows when the device was asked."""
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key].tolist() for key in arrays.files if key != "meta"}
    source = Recorded(list(run["segment_address"]))
    live: dict[int, int] = {}
    grew = []
    with bfc.CachingAllocator(source, strict=True, torch="2.11") as allocator:
        events = zip(run["op"], run["id"], run["size"], run["address"], strict=True)
        for event, (op, number, nbytes, address) in enumerate(events):
            asked = len(source.asked)
            if op:
                allocator.deallocate_raw(live.pop(number))
            else:
                live[number] = allocator.allocate_raw(nbytes)
                assert live[number] == address, event
            grew += [event] * (len(source.asked) - asked)
        assert grew == run["segment_event"]


class RecordedBySize(Recorded):
    """A device that gives the recorded segments of each size in their order: a snapshot does not
    tell in which order segments of different sizes came."""

    def __init__(self, segments: list[list[int]], events: list[list[Any]]) -> None:
        super().__init__([])
        self.of_size: defaultdict[int, deque[int]] = defaultdict(deque)
        for _number, address, nbytes in segments:
            self.of_size[nbytes].append(address)
        for kind, _event, address, nbytes, _stream in events:
            assert kind == "segment_alloc"  # none of these runs gives a segment back
            assert address in self.of_size[nbytes]  # so that it is listed already

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        self.left = [self.of_size[nbytes].popleft()] if self.of_size[nbytes] else []
        return super().alloc(alignment, nbytes)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_of_a_gpu_is_repeated_to_the_byte(name: str, strict: bool) -> None:
    trace = bfc.Trace.load(Path(__file__).parents[1] / "recordings" / f"{name}.npz")
    recorded = trace.meta["torch"]
    source = RecordedBySize(recorded["segments"], recorded["segment_events"])
    with bfc.CachingAllocator(source, strict=strict, torch="2.11") as allocator:
        result = trace.replay(allocator)
        was_recorded = trace.op == 0
        was_recorded[: recorded["first_recorded_event"]] = False
        assert np.count_nonzero(was_recorded) == SNAPSHOTS[name]
        wrong = result.addresses[was_recorded] != np.array(recorded["addresses"])[was_recorded]
        assert np.flatnonzero(wrong).tolist() == []
        assert not any(source.of_size.values())  # every recorded segment was asked for
        assert result.failed == 0
    assert source.live_bytes == 0
