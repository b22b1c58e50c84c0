"""Training runs that were recorded on a GPU: every block where PyTorch placed it there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bfc

TRACES = Path(__file__).parents[1] / "bench" / "traces"
ALLOCATIONS = {"gpu_decomfl": 7946, "gpu_lm_small": 36}


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
    with bfc.CachingAllocator(source, strict=strict) as allocator:
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


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_each_segment_is_asked_for_before_the_recorded_event(name: str) -> None:
    """The same by single calls, which also shows when the device was asked."""
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key].tolist() for key in arrays.files if key != "meta"}
    source = Recorded(list(run["segment_address"]))
    live: dict[int, int] = {}
    grew = []
    with bfc.CachingAllocator(source, strict=True) as allocator:
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
