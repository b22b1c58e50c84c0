"""Training runs that were recorded on a GPU: every block where PyTorch placed it there."""

from __future__ import annotations

import gzip
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.testing import Misbehaving

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


def test_the_documents_count_the_allocations_of_these_runs() -> None:
    runs = [*ALLOCATIONS.values(), *SNAPSHOTS.values()]
    assert len(runs) == 11
    root = Path(__file__).parents[2]
    for name in ("README.md", "docs/how-to/pytorch.md", "docs/behaviour/pytorch.md"):
        assert f"{sum(runs):,} allocations" in " ".join((root / name).read_text().split()), name


def recorded(next_address: Callable[[int], int | None]) -> Misbehaving:
    """A device that gives the segments of a recorded run: `next_address` gets the size of each."""
    source = Misbehaving(80 << 30)

    def alloc(_ask: object, _alignment: int, nbytes: int) -> tuple[int, int] | None:
        address = next_address(nbytes)
        return None if address is None else (address, nbytes)

    source.on("alloc", instead=alloc)
    source.on("free", returns=None)
    return source


class InOrder:
    """The segments of a run in their order, and what was asked for."""

    def __init__(self, addresses: list[int]) -> None:
        self.left = addresses[::-1]
        self.asked: list[int] = []

    def __call__(self, nbytes: int) -> int | None:
        self.asked.append(nbytes)
        return self.left.pop() if self.left else None


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_a_run_on_a_gpu_is_repeated_to_the_byte(name: str, strict: bool) -> None:
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key] for key in arrays.files if key != "meta"}
    segments = InOrder(run["segment_address"].tolist())
    source = recorded(segments)
    with bfc.CachingAllocator(source, strict=strict, torch="2.11") as allocator:
        result = bfc.Trace.load(TRACES / f"{name}.npz").replay(allocator)
        allocates = run["op"] == 0
        assert np.count_nonzero(allocates) == ALLOCATIONS[name]
        wrong = np.flatnonzero((result.addresses != run["address"]) & allocates)
        assert wrong.tolist() == []
        assert segments.asked == run["segment_size"].tolist()
        assert segments.left == []
        stats = allocator.memory_stats()
        assert stats["reserved_bytes.all.peak"] == run["segment_size"].sum()
        assert stats["num_alloc_retries"] == stats["num_ooms"] == result.failed == 0
        allocator.check()
    assert source.live == {}


@pytest.mark.parametrize(("name", "elsewhere"), [("gpu_lm_small", 5), ("gpu_decomfl", 2113)])
def test_a_later_pytorch_would_have_placed_some_blocks_elsewhere(name: str, elsewhere: int) -> None:
    """As many as the compiled allocator of 2.15.0 did with these addresses of segments."""
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key] for key in arrays.files if key != "meta"}
    segments = InOrder(run["segment_address"].tolist())
    with bfc.CachingAllocator(recorded(segments), strict=True, torch="2.15") as allocator:
        result = bfc.Trace.load(TRACES / f"{name}.npz").replay(allocator)
    wrong = (result.addresses != run["address"]) & (run["op"] == 0)
    assert np.count_nonzero(wrong) == elsewhere


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_each_segment_is_asked_for_before_the_recorded_event(name: str) -> None:
    """The same by single calls, which also shows when the device was asked."""
    with np.load(TRACES / f"{name}.npz") as arrays:
        run = {key: arrays[key].tolist() for key in arrays.files if key != "meta"}
    segments = InOrder(list(run["segment_address"]))
    live: dict[int, int] = {}
    grew = []
    with bfc.CachingAllocator(recorded(segments), strict=True, torch="2.11") as allocator:
        events = zip(run["op"], run["id"], run["size"], run["address"], strict=True)
        for event, (op, number, nbytes, address) in enumerate(events):
            asked = len(segments.asked)
            if op:
                allocator.deallocate_raw(live.pop(number))
            else:
                live[number] = allocator.allocate_raw(nbytes)
                assert live[number] == address, event
            grew += [event] * (len(segments.asked) - asked)
        assert grew == run["segment_event"]


def by_size(segments: list[list[int]], events: list[list[Any]]) -> defaultdict[int, deque[int]]:
    """The segments of each size in their order: a snapshot does not tell in which order segments
    of different sizes came."""
    left: defaultdict[int, deque[int]] = defaultdict(deque)
    for _number, address, nbytes in segments:
        left[nbytes].append(address)
    for kind, _event, address, nbytes, _stream in events:
        assert kind == "segment_alloc"  # none of these runs gives a segment back
        assert address in left[nbytes]  # so that it is listed already
    return left


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_of_a_gpu_is_repeated_to_the_byte(name: str, strict: bool) -> None:
    trace = bfc.Trace.load(Path(__file__).parents[1] / "recordings" / f"{name}.npz")
    run = trace.meta["torch"]
    left = by_size(run["segments"], run["segment_events"])
    source = recorded(lambda nbytes: left[nbytes].popleft() if left[nbytes] else None)
    with bfc.CachingAllocator(source, strict=strict, torch="2.11") as allocator:
        result = trace.replay(allocator)
        was_recorded = trace.op == 0
        was_recorded[: run["first_recorded_event"]] = False
        assert np.count_nonzero(was_recorded) == SNAPSHOTS[name]
        wrong = result.addresses[was_recorded] != np.array(run["addresses"])[was_recorded]
        assert np.flatnonzero(wrong).tolist() == []
        assert not any(left.values())  # every recorded segment was asked for
        assert result.failed == 0
    assert source.live == {}


#: Runs of our own on an H200 with PyTorch 2.11, and the most that PyTorch reserved and allocated:
#: graphs that share a pool and are dropped in turns, a training that is captured, and a training
#: on two streams with inputs of many lengths.
OURS = {
    "gpu_graphs": (452984832, 359824384),
    "gpu_train_graph": (727711744, 553024000),
    "gpu_streams": (738197504, 564677632),
}
OURS_EXPANDABLE = {
    "gpu_graphs_expandable": (490733568, 358658560),
    "gpu_train_graph_expandable": (782237696, 549142528),
    "gpu_streams_expandable": (641728512, 561802240),
}


def our_run(name: str) -> bfc.Trace:
    with gzip.open(Path(__file__).parents[1] / "recordings" / f"{name}.pickle.gz") as file:
        return bfc.Trace.from_torch(file)


def peaks(allocator: bfc.CachingAllocator) -> tuple[int, int]:
    stats = allocator.memory_stats()
    return stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]


@pytest.mark.parametrize("name", OURS)
def test_a_captured_program_on_a_gpu_is_repeated_to_the_byte(name: str) -> None:
    """PyTorch 2.11 names no pools in its entries, and says neither when a graph was captured nor
    when it was gone. Segments come and go, and the driver gives them at any addresses."""
    trace = our_run(name)
    run = trace.meta["torch"]
    taken = [it for it in run["segment_events"] if it[0] == "segment_alloc"]
    segments = InOrder([address for _kind, _event, address, _size, _stream in taken])
    with bfc.CachingAllocator(recorded(segments), strict=True, torch="2.11") as allocator:
        result = trace.replay(allocator)
        wrong = (result.addresses != run["addresses"]) & (trace.op == 0)
        assert np.flatnonzero(wrong).tolist() == []
        assert segments.asked == [size for _kind, _event, _address, size, _stream in taken]
        assert peaks(allocator) == OURS[name]
        assert result.failed == 0


@pytest.mark.parametrize("name", OURS_EXPANDABLE)
def test_each_range_of_a_run_on_a_gpu_is_repeated_to_the_byte(name: str) -> None:
    """A file does not say at which addresses ranges were reserved: within each, every block is
    where it was."""
    trace = our_run(name)
    device = bfc.SimulatedSubAllocator("140 GiB")
    settings = "expandable_segments:True"
    with bfc.CachingAllocator(device, settings=settings, strict=True, torch="2.11") as allocator:
        result = trace.replay(allocator)
        assert peaks(allocator) == OURS_EXPANDABLE[name]
    starts = np.array(sorted({call[2] for call in device.calls if call[0] == "reserve"}))
    made = trace.op == 0
    of_range = np.searchsorted(starts, result.addresses[made].astype(np.int64), "right")
    shift = (
        result.addresses[made].astype(np.int64) - np.array(trace.meta["torch"]["addresses"])[made]
    )
    assert len(set(zip(of_range.tolist(), shift.tolist(), strict=True))) == len(set(of_range))
    assert len(set(of_range)) > 3
