"""What a policy written in Python has taken from the device and handed out: kept apart from the
policy's own books, so that its mistakes are seen."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

from bfc.snapshots.snapshot import ChunkInfo, RegionInfo
from bfc.units import format_bytes


class Block(NamedTuple):
    """Memory that is in use."""

    address: int
    nbytes: int
    requested: int
    stream: int
    number: int
    event: int
    owner: str

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def __str__(self) -> str:
        return f"the {self.nbytes} bytes at {self.address:#x} that event {self.event} allocated"


class Ground:
    """Regions, the blocks in use in them, and the free ranges in between. If it `joins`, a block
    may lie across two regions, one behind the other. All steps take O(log n) searches, and short
    moves in lists."""

    def __init__(self, joins: bool) -> None:
        self.joins = joins
        self.regions: dict[int, int] = {}
        self.blocks: dict[int, Block] = {}
        self.reserved = self.in_use = 0
        # The free ranges: starts in order, the end of each, and (bytes, start) in order.
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._sizes: list[tuple[int, int]] = []

    @property
    def largest_free(self) -> int:
        """The bytes of the largest free range; 0 if nothing is free."""
        return self._sizes[-1][0] if self._sizes else 0

    def add_region(self, address: int, nbytes: int) -> None:
        self.regions[address] = nbytes
        self.reserved += nbytes
        self._free(address, address + nbytes)

    def fault_in_giving_back(self, address: int) -> str:
        """Why a region cannot go back to the device; empty if it can."""
        if address not in self.regions:
            return "no region begins there"
        end = address + self.regions[address]
        held = [it for it in self.blocks.values() if it.address < end and address < it.end]
        return f"{held[0]} are in use in this region" if held else ""

    def remove_region(self, address: int) -> int:
        """Removes a region in which nothing is in use, and returns its bytes."""
        nbytes = self.regions.pop(address)
        self._use(address, address + nbytes)
        self.reserved -= nbytes
        return nbytes

    def place(self, block: Block) -> str:
        """Adds a block. Returns which rule that breaks; empty if none."""
        at = bisect_right(self._starts, block.address) - 1
        if at < 0 or self._ends[self._starts[at]] < block.end:
            return self._why_not(block)
        self._use(block.address, block.end)
        self.blocks[block.address] = block
        self.in_use += block.nbytes
        return ""

    def remove(self, address: int) -> Block:
        block = self.blocks.pop(address)
        self._free(address, block.end)
        self.in_use -= block.nbytes
        return block

    def _why_not(self, block: Block) -> str:
        near = sorted(self.blocks.values())
        over = [it for it in near if it.address < block.end and block.address < it.end]
        if over:
            return f"its {block.nbytes} bytes overlap {over[0]} and nobody has freed"
        start = max((it for it in self.regions if it <= block.address), default=0)
        end = start + self.regions.get(start, 0)
        if block.address >= end:
            return f"its {block.nbytes} bytes lie in no region of the policy: take() adds one"
        return (
            f"its {block.nbytes} bytes end {block.end - end} bytes behind their region, the "
            f"{end - start} bytes at {start:#x}"
        )

    # Free ranges

    def _free(self, start: int, end: int) -> None:
        """Adds a free range, and joins it with its neighbours."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end and self._may_join(end):
            end = self._drop(at)[1]
        if at and self._ends[self._starts[at - 1]] == start and self._may_join(start):
            start = self._drop(at - 1)[0]
        self._add(start, end)

    def _may_join(self, border: int) -> bool:
        return self.joins or border not in self.regions

    def _use(self, start: int, end: int) -> None:
        """Cuts a range out of the free range that it lies in."""
        first, last = self._drop(bisect_right(self._starts, start) - 1)
        if first < start:
            self._add(first, start)
        if end < last:
            self._add(end, last)

    def _add(self, start: int, end: int) -> None:
        insort(self._starts, start)
        self._ends[start] = end
        insort(self._sizes, (end - start, start))

    def _drop(self, at: int) -> tuple[int, int]:
        start = self._starts.pop(at)
        end = self._ends.pop(start)
        self._sizes.pop(bisect_left(self._sizes, (end - start, start)))
        return start, end

    # What a snapshot shows

    def as_regions(self) -> Iterator[RegionInfo]:
        """The regions with their chunks. Those that blocks may lie across are shown as one."""
        chunks = [
            ChunkInfo(
                it.address, it.nbytes, it.requested, it.number, "in use", it.stream, owner=it.owner
            )
            for it in self.blocks.values()
        ]
        chunks += [
            ChunkInfo(start, end - start, 0, -1, "free") for start, end in self._ends.items()
        ]
        chunks.sort(key=lambda chunk: chunk.ptr)
        starts = [chunk.ptr for chunk in chunks]
        for start, end in self._shown():
            inside = chunks[bisect_left(starts, start) : bisect_left(starts, end)]
            yield RegionInfo(start, end - start, tuple(inside))

    def _shown(self) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for start, nbytes in sorted(self.regions.items()):
            if self.joins and spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], start + nbytes
            else:
                spans.append((start, start + nbytes))
        return spans

    def __repr__(self) -> str:
        return (
            f"{format_bytes(self.in_use)} in use of {format_bytes(self.reserved)} in "
            f"{len(self.regions)} regions"
        )
