"""What an allocator looks like at one moment: plain, frozen values that outlive it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bfc.pytorch.settings import CachingSettings

#: TensorFlow's bins: bin b holds the chunks from 256 << b bytes, the last all from 256 MiB.
BIN_COUNT = 21
MINIMUM_BITS = 8
INVALID_BIN = -1


def bin_index(size: int) -> int:
    """The number of TensorFlow's bin for a size in bytes.

    >>> bin_index(256), bin_index(1 << 20), bin_index(1 << 40)
    (0, 12, 20)
    """
    return min(BIN_COUNT - 1, max((size >> MINIMUM_BITS).bit_length() - 1, 0))


@dataclass(frozen=True)
class Stats:
    """TensorFlow's AllocatorStats, field for field, and what it leaves out. Sizes are bytes.

    `bytes_in_use` and `largest_alloc_size` count whole chunks: what was asked for, rounded, and
    what was not split off. `bytes_reserved` is what has been taken from the sub-allocator, under
    any policy, and the same as `pool_bytes`; TensorFlow leaves it and its peak 0.
    `largest_free_block_bytes` is always filled in (TensorFlow 2.21 leaves it 0).
    """

    num_allocs: int = 0
    bytes_in_use: int = 0
    peak_bytes_in_use: int = 0
    largest_alloc_size: int = 0
    bytes_limit: int = 0
    bytes_reserved: int = 0
    peak_bytes_reserved: int = 0
    bytes_reservable_limit: int | None = None
    largest_free_block_bytes: int = 0
    pool_bytes: int = 0
    peak_pool_bytes: int = 0
    #: The part of bytes_in_use that is freed already and waits for another stream.
    bytes_waiting_for_streams: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that lies outside the largest free block; NaN where nothing
        is free."""
        free = self.pool_bytes - self.bytes_in_use
        return (free - self.largest_free_block_bytes) / free if free else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """The fields, and `fragmentation` (None where nothing is free), ready for JSON."""
        fragmentation = self.fragmentation
        whole = fragmentation == fragmentation
        return {**asdict(self), "fragmentation": fragmentation if whole else None}


class Frame(NamedTuple):
    """A place in a program."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of a recorded history, in PyTorch's words.

    `action` is "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
    "snapshot" or "oom"; `size` is what was asked for, of a segment its bytes; `addr` of "oom" is
    what the device has free. `frames` are innermost first.
    """

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    pool_id: tuple[int, int] = (0, 0)
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A piece of a region. `state` is "free", "in use", or "waiting" (freed, but another stream may
    still use it)."""

    ptr: int
    size: int
    requested_size: int
    allocation_id: int
    state: str
    stream: int = 0
    freed_at_count: int = 0
    #: What was asked for last in a free chunk, which PyTorch's snapshots go on naming.
    last_requested_size: int = 0
    #: The Python frames of its allocation, where the history keeps them.
    frames: tuple[Frame, ...] = ()

    @property
    def in_use(self) -> bool:
        return self.state != "free"

    @property
    def bin_num(self) -> int:
        """TensorFlow's bin of a free chunk, -1 of one in use."""
        return INVALID_BIN if self.in_use else bin_index(self.size)


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One block from the sub-allocator, and the chunks that tile it in address order."""

    ptr: int
    size: int
    chunks: tuple[ChunkInfo, ...]
    #: PyTorch's policy: the stream that its chunks belong to, "small" or "large", and the private
    #: pool, (0, 0) for none.
    stream: int = 0
    kind: str = "large"
    pool_id: tuple[int, int] = (0, 0)
    #: The Python frames of the allocation that it was taken for.
    frames: tuple[Frame, ...] = ()

    @property
    def end(self) -> int:
        return self.ptr + self.size


@dataclass(frozen=True, slots=True)
class BinInfo:
    """TensorFlow's BinSummary: the chunks of one bin's sizes, in use or not. And of its
    BinDebugInfo, what was asked for in those in use."""

    bin: int
    total_bytes_in_use: int
    total_bytes_in_bin: int
    total_chunks_in_use: int
    total_chunks_in_bin: int
    total_requested_bytes_in_use: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Every region and chunk of an allocator, in address order. `print()` draws it."""

    device: str
    stats: Stats
    regions: tuple[RegionInfo, ...]
    #: What was recorded, oldest first (`record_history`).
    history: tuple[HistoryEntry, ...] = ()
    #: The settings of PyTorch's policy; None of another.
    settings: CachingSettings | None = None

    def chunks(self) -> Iterator[ChunkInfo]:
        """Every chunk in address order."""
        for region in self.regions:
            yield from region.chunks

    def free_chunks(self) -> list[ChunkInfo]:
        """The free chunks in address order."""
        return [chunk for chunk in self.chunks() if not chunk.in_use]

    def live_chunks(self) -> list[ChunkInfo]:
        """The chunks in use, waiting ones included, in address order."""
        return [chunk for chunk in self.chunks() if chunk.in_use]

    def of_pool(self, pool_id: tuple[int, int]) -> Snapshot:
        """The same with one private pool's regions alone; none where there is no such pool."""
        return replace(self, regions=tuple(r for r in self.regions if r.pool_id == pool_id))

    @cached_property
    def bins(self) -> tuple[BinInfo, ...]:
        """TensorFlow's 21 bin summaries, as its memory map has them: chunks in use are counted by
        their size too."""
        totals = [[0, 0, 0, 0, 0] for _ in range(BIN_COUNT)]
        for chunk in self.chunks():
            row = totals[bin_index(chunk.size)]
            row[1] += chunk.size
            row[3] += 1
            if chunk.in_use:
                row[0] += chunk.size
                row[2] += 1
                row[4] += chunk.requested_size
        return tuple(BinInfo(number, *row) for number, row in enumerate(totals))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists, ready for JSON."""
        return {
            "device": self.device,
            "stats": self.stats.as_dict(),
            "regions": [
                {
                    "ptr": region.ptr,
                    "size": region.size,
                    "stream": region.stream,
                    "kind": region.kind,
                    "pool_id": list(region.pool_id),
                    "chunks": [
                        {**asdict(chunk), "frames": [list(frame) for frame in chunk.frames]}
                        for chunk in region.chunks
                    ],
                }
                for region in self.regions
            ],
        }

    def to_torch(self) -> dict[str, Any]:
        """The dict that `torch.cuda.memory._snapshot()` makes, of built-in types only.

        Its keys are "segments", "device_traces" (a list for each device up to this one, the others
        empty), "allocator_settings" (PyTorch's defaults where the policy is another) and
        "external_annotations" (empty). Left out are entries of the history that a viewer could not
        run backwards from these segments: of memory that is in none, and all before an entry that
        contradicts them. Equal lists of frames are one list. Cost: O(n log n).

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> address = allocator.allocate_raw(1000)
        >>> segment, = allocator.snapshot().to_torch()["segments"]
        >>> [(block["size"], block["state"]) for block in segment["blocks"]]
        [(1024, 'active_allocated'), (1047552, 'inactive')]
        """
        from bfc.pytorch.writer import as_torch

        return as_torch(self)

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_torch()` as a pickle (protocol 4) that pytorch.org/memory_viz and
        `torch.cuda._memory_viz` open, and `Trace.from_torch` reads.

        Raises OSError. A file that was there is replaced once the new one is whole, which is
        written to the same folder: after an error it is as it was.

        >>> import pathlib, tempfile, bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "memory.pickle")
        ...     allocator.snapshot().dump(path)
        ...     path.read_bytes()[:2]
        b'\\x80\\x04'
        """
        from bfc.pytorch.writer import dump

        dump(self, path)

    def occupancy(self, width: int = 100) -> str:
        """One line over all regions: `*` asked for, `x` slack, `_` free (TensorFlow's
        RenderOccupancy at 100)."""
        from bfc.report.text import occupancy

        return occupancy(self, width)

    def __str__(self) -> str:
        from bfc.report.text import picture

        return picture(self)
