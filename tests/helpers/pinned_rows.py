"""PyTorch's corner cases 85 to 93 (PyTorch's behaviour, 7.7), for any source of host memory.

Each row takes a lane: its source; `stream()`, a new stream; `hold(stream)`, after which what is
queued there stays unfinished until `finish(stream)`. Row 93 needs a source that registers memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import bfc

KIB, MIB = 1 << 10, 1 << 20


class Lane(Protocol):
    source: bfc.SubAllocator

    def stream(self) -> int: ...
    def hold(self, stream: int) -> None: ...
    def finish(self, stream: int) -> None: ...


class SimulatedLane:
    def __init__(self) -> None:
        self.source = bfc.SimulatedSubAllocator("8 GiB")
        self._streams = 0

    def stream(self) -> int:
        self._streams += 1
        return 1000 + self._streams

    def hold(self, stream: int) -> None:
        self.source.hold(stream)

    def finish(self, stream: int) -> None:
        self.source.finish(stream)


def active(allocator: bfc.PinnedAllocator) -> tuple[float, float]:
    stats = allocator.host_memory_stats()
    return stats["active_requests.current"], stats["active_bytes.current"]


def row_85(lane: Lane) -> None:
    """A request becomes a power of two."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        for nbytes, block in ((40_960, 65_536), (81_920, 131_072), (1, 1), (65_536, 65_536)):
            ptr = allocator.allocate_raw(nbytes)
            assert allocator.allocated_size(ptr) == block
            assert allocator.requested_size(ptr) == nbytes
        assert allocator.host_memory_stats()["allocated_bytes.current"] == 65_536 * 2 + 131_072 + 1
        assert allocator.allocate_raw(0) == 0
        assert active(allocator)[0] == 4


def row_86(lane: Lane) -> None:
    """The block that was freed last is used first."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        first, second = allocator.allocate_raw(5000), allocator.allocate_raw(8192)
        allocator.deallocate_raw(first)
        allocator.deallocate_raw(second)
        assert allocator.allocate_raw(6000) == second
        assert allocator.allocate_raw(6000) == first
        assert allocator.host_memory_stats()["num_host_alloc"] == 2


def row_87(lane: Lane) -> None:
    """A block that a stream uses comes back when that stream has finished."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        stream, ptr = lane.stream(), allocator.allocate_raw(64 * KIB)
        lane.hold(stream)
        assert allocator.record_event(ptr, None, stream)
        allocator.deallocate_raw(ptr)
        assert active(allocator) == (1, 64 * KIB), "it counts as used until then"
        assert allocator.allocate_raw(64 * KIB) != ptr
        lane.finish(stream)
        assert allocator.allocate_raw(64 * KIB) == ptr
        allocator.deallocate_raw(ptr)
        assert allocator.allocate_raw(64 * KIB) == ptr, "nothing is left of the stream"


def row_88(lane: Lane) -> None:
    """The oldest event holds back all that come after it, of whatever stream."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        slow, idle = lane.stream(), lane.stream()
        x, y = allocator.allocate_raw(64 * KIB), allocator.allocate_raw(4 * KIB)
        lane.hold(slow)
        assert allocator.record_event(x, None, slow)
        assert allocator.record_event(y, None, idle)
        allocator.deallocate_raw(x)
        allocator.deallocate_raw(y)
        assert allocator.allocate_raw(4 * KIB) != y
        lane.finish(slow)
        assert allocator.allocate_raw(4 * KIB) == y
        assert allocator.allocate_raw(64 * KIB) == x


def row_89(lane: Lane) -> None:
    """An interior address is known with the block's own context alone."""
    with bfc.PinnedAllocator(lane.source) as allocator, bfc.PinnedAllocator(lane.source) as other:
        stream, ptr = lane.stream(), allocator.allocate_raw(64 * KIB)
        lane.hold(stream)
        foreign = other.find(other.allocate_raw(64 * KIB))
        stale = allocator.find(allocator.allocate_raw(4))
        allocator.deallocate_raw(stale.ptr)
        for context in (None, object(), foreign, stale, other.allocate(8)):
            assert not allocator.record_event(ptr + 100, context, stream)
            assert not allocator.record_event(stale.ptr, context, stream)
        allocator.deallocate_raw(ptr)
        assert allocator.allocate_raw(64 * KIB) == ptr, "nothing was tracked"
        assert allocator.record_event(ptr + 100, allocator.find(ptr + 65_535), stream)
        allocator.deallocate_raw(ptr)
        assert allocator.allocate_raw(64 * KIB) != ptr
        lane.finish(stream)


def row_90(lane: Lane) -> None:
    """Emptying the cache leaves what a stream uses, and waits for nothing."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        stream = lane.stream()
        pending, cached, live = (allocator.allocate_raw(64 * KIB) for _ in range(3))
        lane.hold(stream)
        allocator.record_stream(pending, stream)
        allocator.deallocate_raw(pending)
        allocator.deallocate_raw(cached)
        assert allocator.empty_cache() == 64 * KIB
        stats = allocator.host_memory_stats()
        assert (stats["allocations.current"], stats["num_host_free"]) == (2, 1)
        assert lane.source.live_bytes == 128 * KIB
        lane.finish(stream)
        assert allocator.empty_cache() == 64 * KIB
        assert allocator.find(live) is not None
        assert lane.source.live_bytes == 64 * KIB


def row_91(lane: Lane) -> None:
    """A piece of the reserve is never given back, and lost once the cache is emptied."""
    text = "pinned_reserve_segment_size_mb:256"
    with bfc.PinnedAllocator(lane.source, text) as allocator:
        first = allocator.allocate_raw(5000)
        assert lane.source.live_bytes == 256 * MIB
        allocator.deallocate_raw(first)
        assert allocator.allocate_raw(5000) == first, "the cache holds it"
        allocator.deallocate_raw(first)
        assert allocator.empty_cache() == 8 * KIB
        assert lane.source.live_bytes == 256 * MIB
        assert allocator.allocate_raw(5000) == first + 8 * KIB
        assert allocator.allocate_raw(1) == first + 16 * KIB
        assert allocator.allocate_raw(1) == first + 20 * KIB, "pieces are whole pages"
        assert lane.source.live_bytes == 256 * MIB
        outside = allocator.allocate_raw(256 * MIB)
        assert not first <= outside < first + 256 * MIB
        assert lane.source.live_bytes == 512 * MIB
        allocator.deallocate_raw(outside)
        assert allocator.empty_cache() == 256 * MIB
    assert lane.source.live_bytes == 0, "closing gives it back"


def row_92(lane: Lane) -> None:
    """Above the threshold sizes are exact, and no block serves what is larger than it. (#192722)"""
    with bfc.PinnedAllocator(lane.source, "pinned_max_round_threshold_mb:128") as allocator:
        small = allocator.allocate_raw(150 * MIB)
        assert allocator.allocated_size(small) == 150 * MIB
        allocator.deallocate_raw(small)
        large = allocator.allocate_raw(200 * MIB)
        assert large != small
        assert allocator.allocated_size(large) == 200 * MIB
        allocator.deallocate_raw(large)
        again = allocator.allocate_raw(140 * MIB + 1)
        assert (again, allocator.allocated_size(again)) == (large, 200 * MIB), "the last freed"
        assert allocator.allocate_raw(150 * MIB) == small
        assert allocator.allocated_size(allocator.allocate_raw(128 * MIB)) == 128 * MIB
        assert allocator.allocated_size(allocator.allocate_raw(128 * MIB + 1)) == 128 * MIB + 1


def row_92_cap(lane: Lane) -> None:
    """What is larger than the cap goes back at its free, or when its stream has finished."""
    with bfc.PinnedAllocator(lane.source, "pinned_max_cached_size_mb:1") as allocator:
        stream, kept = lane.stream(), allocator.allocate_raw(MIB)
        large, used = allocator.allocate_raw(MIB + 1), allocator.allocate_raw(3 * MIB)
        assert allocator.allocated_size(large) == MIB + 1
        lane.hold(stream)
        allocator.record_stream(used, stream)
        for ptr in (kept, large, used):
            allocator.deallocate_raw(ptr)
        assert lane.source.live_bytes == 4 * MIB
        lane.finish(stream)
        assert allocator.allocate_raw(1 * MIB) == kept
        assert lane.source.live_bytes == MIB
        assert allocator.host_memory_stats()["num_host_free"] == 2


def row_93(lane: Lane) -> None:
    """A block goes back the way it came. The lane's source complains of any other."""
    with bfc.PinnedAllocator(lane.source) as allocator:
        for before, after in (("True", "False"), ("False", "True"), ("True", "True")):
            allocator.set_settings(f"pinned_use_cuda_host_register:{before}")
            ptr = allocator.allocate_raw(64 * KIB)
            allocator.set_settings(f"pinned_use_cuda_host_register:{after}")
            allocator.deallocate_raw(ptr)
            assert allocator.empty_cache() == 64 * KIB
            assert lane.source.live_bytes == 0


ROWS: list[Callable[[Lane], None]] = [
    row_85,
    row_86,
    row_87,
    row_88,
    row_89,
    row_90,
    row_91,
    row_92,
    row_92_cap,
]
__all__ = ["ROWS", "Lane", "SimulatedLane", "active", "row_93"]
