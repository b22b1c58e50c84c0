"""The slow, obvious twin of `bfc.BFCAllocator`: lists, `min()` and no bins.

It calls any sub-allocator as the allocator does, so that the same history over two equal
sub-allocators must give the same addresses, calls, chunks and figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy

import bfc
from bfc.policies.tensorflow_rules import USUAL, rules_of

GRANULE = 256
FIRST_REGION = 2 << 20
DEFAULT_SLACK_CAP = 128 << 20
LAST_DOUBLING = 1 << 62


def round_up(size: int, granule: int = GRANULE) -> int:
    return -(-size // granule) * granule


def backpedal(size: int, rounds_down: bool) -> int:
    """0.9 of a size in single precision, as a multiple of 256, and always smaller than the size."""
    smaller = int(numpy.float32(size) * numpy.float32(0.9))
    if rounds_down:
        return smaller // GRANULE * GRANULE
    smaller = round_up(smaller)
    return smaller if smaller < size else size - GRANULE


@dataclass(eq=False)
class Chunk:
    """A record. `allocation_id` is -1 where it is free; `deleted` says that it waits to be reused.

    Which record is reused matters only to the queue of timestamped frees: a record that was merged
    away while it was queued, and then reused for the rest of a split, is found by the next pass.
    """

    ptr: int = 0
    size: int = 0
    freed_at: int = 0
    requested: int = 0
    allocation_id: int = -1
    deleted: bool = False
    tag: str = ""  # whose it is, where requests come from two ends

    @property
    def in_use(self) -> bool:
        return self.allocation_id > 0

    def row(self) -> tuple[int, ...]:
        return self.ptr, self.size, self.requested, self.allocation_id, self.freed_at


Region = list[Chunk]


def span(region: Region) -> tuple[int, int]:
    """The address of a region and its bytes."""
    return region[0].ptr, sum(chunk.size for chunk in region)


@dataclass
class Counted:
    """What statistics keep: what no list of chunks says."""

    num_allocs: int = 0
    largest_alloc: int = 0
    peak_in_use: int = 0
    peak_pool: int = 0

    def add(self, size: int, bytes_in_use: int) -> None:
        self.num_allocs += 1
        self.largest_alloc = max(self.largest_alloc, size)
        self.peak_in_use = max(self.peak_in_use, bytes_in_use)


class Model:
    """TensorFlow's rules, with bfc's answers where TensorFlow hangs or corrupts itself."""

    def __init__(
        self,
        device: bfc.SubAllocator,
        *,
        memory_limit: int,
        allow_growth: bool = False,
        garbage_collection: bool = True,
        fragmentation_fraction: float = 0.0,
        strict: bool = False,
        tensorflow: str = USUAL,
    ) -> None:
        self.device = device
        self.rules = rules_of(tensorflow)
        self.ignores_alignment = strict and not self.rules.honours_alignment
        self.limit = memory_limit
        first_size = min(memory_limit, FIRST_REGION) if allow_growth else memory_limit
        self.first_size = round_up(first_size)
        self.next_region_size = self.first_size
        self.garbage_collection = garbage_collection
        self.slack_cap = max(int(fragmentation_fraction * memory_limit), GRANULE)
        if not fragmentation_fraction:
            self.slack_cap = DEFAULT_SLACK_CAP
        self.strict = strict
        self.asked_last = 0
        self.alignment = 1  # of the request that is being served
        self.regions: list[Region] = []
        self.spare: list[Chunk] = []  # deleted records: the last one is used first
        self.queue: list[Chunk] = []  # freed with a timestamp
        self.counter: Iterator[int] | None = None
        self.frontier = 0
        self.ids = count(1)
        self.counted = Counted()

    # -- allocate and free ------------------------------------------------------------------------

    def allocate(self, nbytes: int, freed_before: int = 0, alignment: int = 1) -> int | None:
        """The address; None where it is refused; 0 for 0 bytes."""
        if nbytes == 0:
            return 0
        rounded = round_up(nbytes)
        self.alignment = 1 if self.ignores_alignment else alignment
        self.asked_last = 0
        if self.queue:
            self.merge_pass()
        found = self.best_fit(rounded, freed_before)
        if found is None and self.extend(rounded):
            found = self.best_fit(rounded, freed_before)
        if found is None and not freed_before and self.queue and self.merge_pass(rounded):
            found = self.best_fit(rounded, freed_before)
        if found is None and self.collect(rounded) and self.extend(rounded):
            found = self.best_fit(rounded, freed_before)
        if found is None and not self.strict and self.add_just(rounded):
            found = self.best_fit(rounded, freed_before)
        return None if found is None else self.hand_out(found, rounded, nbytes)

    def best_fit(self, rounded: int, freed_before: int) -> Chunk | None:
        """The smallest that is large enough behind its first aligned address, the lowest among
        equals."""
        free = [chunk for chunk in self.chunks() if not chunk.in_use]
        fitting = [chunk for chunk in free if chunk.size >= rounded + self.padding(chunk)]
        if freed_before:
            fitting = [chunk for chunk in fitting if chunk.freed_at <= freed_before]
        return min(fitting, key=lambda chunk: (chunk.size, chunk.ptr), default=None)

    def padding(self, chunk: Chunk) -> int:
        return -chunk.ptr % self.alignment

    def hand_out(self, chunk: Chunk, rounded: int, nbytes: int) -> int:
        if self.padding(chunk):
            chunk = self.cut(chunk, self.padding(chunk))
        if chunk.size >= 2 * rounded or chunk.size - rounded >= self.slack_cap:
            self.cut(chunk, rounded)
        return self.mark_in_use(chunk, nbytes)

    def mark_in_use(self, chunk: Chunk, nbytes: int) -> int:
        chunk.requested = nbytes
        chunk.allocation_id = next(self.ids)
        self.counted.add(chunk.size, self.bytes_in_use)
        return chunk.ptr

    def cut(self, chunk: Chunk, size: int) -> Chunk:
        """Leaves `size` bytes in a free chunk. Returns what lies behind them."""
        region = self.region_of(chunk.ptr)
        rest = self.new_chunk(chunk.ptr + size, chunk.size - size, chunk.freed_at, chunk.tag)
        region.insert(region.index(chunk) + 1, rest)
        chunk.size = size
        return rest

    def free(self, ptr: int) -> None:
        chunk = next(chunk for chunk in self.region_of(ptr) if chunk.ptr == ptr and chunk.in_use)
        chunk.allocation_id, chunk.requested = -1, 0
        if self.counter is None:
            self.coalesce_freed(chunk)
        else:
            chunk.freed_at = next(self.counter)
            self.queue.append(chunk)

    def coalesce(self, chunk: Chunk, ignore_timestamps: bool = False) -> Chunk:
        """Merges it with its right neighbour, then its left one. Returns the chunk that is left."""

        def mergeable(other: Chunk) -> bool:
            is_safe = ignore_timestamps or other.freed_at == 0
            return not other.in_use and (is_safe or self.must_join(chunk, other))

        region = self.region_of(chunk.ptr)
        at = region.index(chunk)
        if not mergeable(chunk):
            return chunk
        if at + 1 < len(region) and mergeable(region[at + 1]):
            self.swallow(region, at)
        if at > 0 and mergeable(region[at - 1]):
            self.swallow(region, at - 1)
            return region[at - 1]
        return chunk

    def swallow(self, region: Region, at: int) -> None:
        """The chunk at an index takes in its right neighbour."""
        right = region.pop(at + 1)
        region[at].size += right.size
        region[at].freed_at = max(region[at].freed_at, right.freed_at)
        self.delete(right)

    def coalesce_freed(self, chunk: Chunk, ignore_timestamps: bool = False) -> Chunk:
        """As coalesce, for what was in use."""
        return self.coalesce(chunk, ignore_timestamps)

    def new_chunk(self, ptr: int, size: int, freed_at: int = 0, tag: str = "") -> Chunk:
        chunk = self.spare.pop() if self.spare else Chunk()
        chunk.tag = tag
        chunk.ptr, chunk.size, chunk.freed_at, chunk.deleted = ptr, size, freed_at, False
        return chunk

    def delete(self, chunk: Chunk) -> None:
        chunk.deleted, chunk.allocation_id, chunk.requested = True, -1, 0
        self.spare.append(chunk)

    # -- regions ----------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        return max(self.limit - self.pool_bytes, 0) // GRANULE * GRANULE

    def extend(self, rounded: int) -> bool:
        return self.extend_by(rounded, rounded)

    def extend_by(self, rounded: int, least: int) -> bool:
        """Adds a region of at least `least` bytes for a request."""
        if least > self.available:
            return False
        grew = max(rounded, least) > self.next_region_size
        while max(rounded, least) > self.next_region_size:
            self.double()
        came = self.ask(min(self.next_region_size, self.available), least)
        if came and not grew:
            self.double()
        return came

    def ask(self, size: int, least: int) -> bool:
        """Asks the device for a region, and for less after each refusal, while it is enough."""
        self.asked_last = size
        block = self.device.alloc(max(GRANULE, self.alignment), size)
        while block is None and size > least:
            size = backpedal(size, self.rules.rounds_down)
            if size < least:
                return False
            block = self.device.alloc(max(GRANULE, self.alignment), size)
            self.asked_last = size
        return block is not None and self.take_in(*block)

    def take_in(self, ptr: int, size: int) -> bool:
        self.add_region(ptr, size)
        return True

    def add_just(self, rounded: int) -> bool:
        """Asks for what is needed and no more, unless that was asked for last."""
        if self.asked_last == rounded or rounded > self.limit - self.pool_bytes:
            return False
        block = self.device.alloc(max(GRANULE, self.alignment), rounded)
        if block is not None:
            self.add_region(*block)
        return block is not None

    def double(self) -> None:
        if self.next_region_size <= LAST_DOUBLING:
            self.next_region_size *= 2

    def add_region(self, ptr: int, size: int, tag: str = "") -> None:
        chunk = self.new_chunk(ptr, size, tag=tag)
        below = [region for region in self.regions if sum(span(region)) == ptr]
        if below and self.device.supports_coalescing:
            below[0].append(chunk)
        else:
            self.regions.append([chunk])
            self.regions.sort(key=span)
        self.counted.peak_pool = max(self.counted.peak_pool, self.pool_bytes)
        self.coalesce(chunk)

    def collect(self, rounded: int) -> bool:
        """Gives all free regions back, if that makes room for `rounded` bytes under the limit."""
        total = sum(span(region)[1] for region in self.free_regions())
        if not self.garbage_collection or total == 0:
            return False
        if rounded > self.limit - self.pool_bytes + total:
            return False
        self.give_back(self.free_regions())
        return True

    def free_regions(self) -> list[Region]:
        return [region for region in self.regions if not any(chunk.in_use for chunk in region)]

    def give_back(self, regions: list[Region]) -> int:
        self.regions = [region for region in self.regions if region not in regions]
        for region in regions:
            for chunk in region:
                self.delete(chunk)
        self.queue = [chunk for chunk in self.queue if not chunk.deleted]
        for region in regions:
            self.device.free(*span(region))
        return sum(span(region)[1] for region in regions)

    def release_free_regions(self) -> int:
        if self.free_regions():
            self.next_region_size = self.first_size
        return self.give_back(self.free_regions())

    def close(self) -> None:
        self.give_back(self.regions)

    # -- timestamps -------------------------------------------------------------------------------

    def set_timing_counter(self) -> None:
        self.counter = count(1)

    def set_safe_frontier(self, frontier: int) -> None:
        self.frontier = max(self.frontier, frontier)

    def merge_pass(self, required: int = 0) -> bool:
        """Coalesces what is safe; with `required` the rest, until a chunk of that size
        exists."""
        queue, self.queue = self.queue, []
        listed: list[Chunk] = []
        for chunk in queue:
            if chunk.in_use or chunk.deleted or self.is_in_no_bin(chunk):
                continue
            if chunk.freed_at < self.frontier:
                chunk.freed_at = 0
            (listed if required or chunk.freed_at == 0 else self.queue).append(chunk)
        satisfied = False
        for chunk in listed:
            if chunk.deleted:
                continue
            if satisfied:
                self.queue.append(chunk)
                continue
            survivor = self.coalesce_freed(chunk, ignore_timestamps=required > 0)
            if required and survivor is not chunk and survivor.freed_at:
                self.queue.append(survivor)
            satisfied = 0 < required <= survivor.size
        return satisfied

    def is_in_no_bin(self, chunk: Chunk) -> bool:
        return False

    def must_join(self, one: Chunk, other: Chunk) -> bool:
        return False

    # -- what can be seen -------------------------------------------------------------------------

    def chunks(self) -> Iterator[Chunk]:
        for region in self.regions:
            yield from region

    def region_of(self, ptr: int) -> Region:
        return next(region for region in self.regions if region[0].ptr <= ptr < sum(span(region)))

    @property
    def pool_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks())

    @property
    def bytes_in_use(self) -> int:
        return sum(chunk.size for chunk in self.chunks() if chunk.in_use)

    def clear_stats(self) -> None:
        self.counted = Counted(peak_in_use=self.bytes_in_use, peak_pool=self.counted.peak_pool)

    def stats(self) -> bfc.Stats:
        free_sizes = [chunk.size for chunk in self.chunks() if not chunk.in_use]
        return bfc.Stats(
            num_allocs=self.counted.num_allocs,
            bytes_in_use=self.bytes_in_use,
            peak_bytes_in_use=self.counted.peak_in_use,
            largest_alloc_size=self.counted.largest_alloc,
            bytes_limit=self.limit,
            largest_free_block_bytes=max(free_sizes, default=0),
            bytes_reserved=self.pool_bytes,
            peak_bytes_reserved=self.counted.peak_pool,
            pool_bytes=self.pool_bytes,
            peak_pool_bytes=self.counted.peak_pool,
            by_owner={"": self.bytes_in_use} if self.bytes_in_use else {},
        )

    def layout(self) -> list[tuple[Any, ...]]:
        """Every region with its chunks, as `layout_of` gives it for a real allocator."""
        return [(*span(region), [chunk.row() for chunk in region]) for region in self.regions]


def layout_of(allocator: bfc.BFCAllocator) -> list[tuple[Any, ...]]:
    """Every region of an allocator with its chunks, as plain tuples in address order."""

    def row(chunk: bfc.ChunkInfo) -> tuple[int, ...]:
        last = chunk.allocation_id, chunk.freed_at_count
        return chunk.ptr, chunk.size, chunk.requested_size, *last

    regions = allocator.snapshot().regions
    return [(r.ptr, r.size, [row(chunk) for chunk in r.chunks]) for r in regions]
