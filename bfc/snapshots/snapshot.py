"""What an allocator looks like at one moment: plain, frozen values that outlive it."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from bfc.files import replacing
from bfc.libraries import frame_of_rows
from bfc.pytorch.rules import NEWEST
from bfc.snapshots.columns import (
    ASLEEP,
    CHUNK,
    IN_RANGE,
    IS_VIEW,
    RECORD,
    REGION,
    STATES,
    TAGS,
    HistoryColumns,
    RegionColumns,
    columns_of_history,
    columns_of_regions,
)
from bfc.units import format_bytes

if TYPE_CHECKING:
    from typing import Self

    from pandas import DataFrame

    from bfc.pytorch.settings import CachingSettings

#: TensorFlow's bins: bin b holds the chunks from 256 << b bytes on, and the last one all chunks
#: from 256 MiB on.
BIN_COUNT = 21
MINIMUM_BITS = 8
INVALID_BIN = -1
CENTRAL_GAP = "central_gap"


def bin_index(size: int) -> int:
    """The number of TensorFlow's bin for a chunk of so many bytes, from 0 to 20.

    >>> bin_index(256), bin_index(1 << 20), bin_index(1 << 40)
    (0, 12, 20)
    """
    return min(BIN_COUNT - 1, max((size >> MINIMUM_BITS).bit_length() - 1, 0))


class OwnerBytes(dict[str, int]):
    """Bytes in use by the owner's name, the largest first; 0 for a name that is not in it.

    Memory of no owner is under the name "". Owners without memory are left out.
    """

    def __missing__(self, name: str) -> int:
        return 0


@dataclass(frozen=True)
class Stats:
    """An allocator's figures: TensorFlow's AllocatorStats, field for field, and some that it lacks.

    Attributes
    ----------
    num_allocs : int
        The allocations so far.
    bytes_in_use : int
        The bytes of the chunks in use: what was asked for, rounded, and what was not split off.
    peak_bytes_in_use : int
        The most that was in use.
    largest_alloc_size : int
        The bytes of the largest chunk that was handed out.
    bytes_limit : int
        The allocator's memory limit.
    bytes_reserved : int
        The bytes taken from the sub-allocator, the same as `pool_bytes` (TensorFlow leaves it 0).
    peak_bytes_reserved : int
        The most that was taken (TensorFlow leaves it 0).
    bytes_reservable_limit : int or None
        Always None, as from TensorFlow's BFC allocator.
    largest_free_block_bytes : int
        The bytes of the largest free chunk (TensorFlow 2.21 leaves it 0).
    pool_bytes : int
        The bytes taken from the sub-allocator.
    peak_pool_bytes : int
        The most that was taken.
    bytes_waiting_for_streams : int
        The part of `bytes_in_use` that its owners have freed, and that waits for another stream.
    bytes_asleep : int
        The memory that sleeping tags have given back and that `wake()` takes again, in whole pages.
        It is not part of `bytes_reserved`. Allocations under these tags stay in `bytes_in_use`.
    by_owner : dict of str to int
        The part of `bytes_in_use` of each owner (`bfc.owner`), the largest first, and 0 for any
        other name. Memory without an owner is under "". The values add up to `bytes_in_use`.
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
    bytes_waiting_for_streams: int = 0
    bytes_asleep: int = 0
    by_owner: dict[str, int] = field(default_factory=OwnerBytes, hash=False)

    @property
    def fragmentation(self) -> float:
        """The fraction of the free bytes outside the largest free chunk; NaN if nothing is free."""
        free = self.pool_bytes + self.bytes_asleep - self.bytes_in_use
        return (free - self.largest_free_block_bytes) / free if free else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """The fields, and `fragmentation`, ready for JSON.

        Returns
        -------
        dict of str to int, float or None
            `fragmentation` is None if nothing is free.
        """
        fragmentation = self.fragmentation
        whole = fragmentation == fragmentation
        return {**asdict(self), "fragmentation": fragmentation if whole else None}


class Frame(NamedTuple):
    """A place in a program.

    Attributes
    ----------
    filename : str
        The file.
    line : int
        The number of the line.
    name : str
        The function.
    """

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of a recorded history, in PyTorch's words.

    Attributes
    ----------
    action : str
        "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
        "segment_unmap", "snapshot" or "oom".
    addr : int
        The address; for "oom", the free bytes of the device.
    size : int
        The bytes that were asked for; for a segment, all its bytes.
    stream : int
        The stream.
    time_us : int
        When, in microseconds since 1970.
    pool_id : tuple of (int, int)
        The private pool, (0, 0) for none.
    frames : tuple of Frame
        The Python frames, innermost first.
    owner : str
        Whose memory it is (`bfc.owner`); "" if nobody's.
    step : int or None
        The step of the program at the allocation (`bfc.owner`), if frames were kept.
    """

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    pool_id: tuple[int, int] = (0, 0)
    frames: tuple[Frame, ...] = ()
    owner: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A piece of a region, free or in use.

    Attributes
    ----------
    ptr : int
        Its first byte.
    size : int
        Its size in bytes.
    requested_size : int
        The bytes that were asked for; 0 if it is free.
    allocation_id : int
        The number of its allocation; -1 if it is free.
    state : str
        "free", "in use", "waiting" (freed, but another stream may still use it), or "leaving"
        (free, but on its way back to the device, or the device has failed to take it back).
    stream : int
        The stream that it was allocated for.
    freed_at_count : int
        The timing counter's count of its free; 0 if there is none.
    last_requested_size : int
        For a free chunk, the bytes that were last asked for in it: PyTorch's snapshots show them.
    frames : tuple of Frame
        The Python frames of its allocation, if a history keeps them.
    owner : str
        Whose memory it is (`bfc.owner`); "" if it is nobody's, or free.
    step : int or None
        The step of the program at its allocation (`bfc.owner`), if a history keeps frames.
    tag : str
        Where a BFCAllocator serves two ends, whose the chunk is, in use or free: "lower", "upper",
        or "central_gap" for the free memory between them. Else "".
    """

    ptr: int
    size: int
    requested_size: int
    allocation_id: int
    state: str
    stream: int = 0
    freed_at_count: int = 0
    last_requested_size: int = 0
    frames: tuple[Frame, ...] = ()
    owner: str = ""
    step: int | None = None
    tag: str = ""

    @property
    def in_use(self) -> bool:
        """True unless the chunk is free; also True while it waits for a stream."""
        return self.state not in ("free", "leaving")

    @property
    def bin_num(self) -> int:
        """The number of TensorFlow's bin of a free chunk; -1 if it is in none, as a central gap."""
        is_in_none = self.in_use or self.tag == CENTRAL_GAP
        return INVALID_BIN if is_in_none else bin_index(self.size)


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One block from the sub-allocator, or memory that is mapped end to end.

    Attributes
    ----------
    ptr : int
        Its first byte.
    size : int
        Its size in bytes.
    chunks : tuple of ChunkInfo
        Its chunks, in address order. They cover it without gaps.
    stream : int
        In PyTorch's policy, the stream that its chunks belong to.
    kind : str
        In PyTorch's policy, "small" or "large".
    pool_id : tuple of (int, int)
        In PyTorch's policy, the private pool; (0, 0) for none.
    frames : tuple of Frame
        The Python frames of the allocation that it was taken for, if a history keeps them.
    reserved : tuple of (int, int) or None
        For mapped memory, the address and the bytes of the reservation that it lies in. The region
        is a part of the reservation that has memory.
    asleep : bool
        True if it has no memory now, and gets memory again when its tag wakes.
    pages : tuple of int
        With `virtual_memory`, the numbers of its pages in the order of their addresses. A page that
        is mapped at several addresses is in the one region through which it is used.
    is_view : bool
        True if it is a block that was stitched from pages of other regions.
    """

    ptr: int
    size: int
    chunks: tuple[ChunkInfo, ...]
    stream: int = 0
    kind: str = "large"
    pool_id: tuple[int, int] = (0, 0)
    frames: tuple[Frame, ...] = ()
    reserved: tuple[int, int] | None = None
    asleep: bool = False
    pages: tuple[int, ...] = ()
    is_view: bool = False

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.ptr + self.size


@dataclass(frozen=True, slots=True)
class TagInfo:
    """What a tag has.

    Attributes
    ----------
    name : str
        Its name.
    bytes_in_use : int
        The requested bytes of its live allocations, awake or asleep.
    allocations : int
        How many they are.
    asleep : bool
        Whether it sleeps.
    bytes_kept : int
        The bytes on the host while it does.
    """

    name: str
    bytes_in_use: int = 0
    allocations: int = 0
    asleep: bool = False
    bytes_kept: int = 0


@dataclass(frozen=True, slots=True)
class BinInfo:
    """The chunks of one bin: TensorFlow's BinSummary, and one figure of its BinDebugInfo.

    Attributes
    ----------
    bin : int
        The number of the bin.
    total_bytes_in_use : int
        The bytes of the chunks in use.
    total_bytes_in_bin : int
        The bytes of all chunks of these sizes, free or in use.
    total_chunks_in_use : int
        The chunks in use.
    total_chunks_in_bin : int
        All chunks of these sizes.
    total_requested_bytes_in_use : int
        The bytes that were asked for in the chunks in use.
    """

    bin: int
    total_bytes_in_use: int
    total_bytes_in_bin: int
    total_chunks_in_use: int
    total_chunks_in_bin: int
    total_requested_bytes_in_use: int = 0


def entries_from(columns: HistoryColumns) -> Iterator[HistoryEntry]:
    """The objects of a history, oldest first."""
    actions, owners = columns.actions, columns.owners
    rows = RECORD.iter_unpack(columns.records)
    kept = columns.frames or repeat(()), columns.steps or repeat(None)
    for row, frames, step in zip(rows, *kept, strict=False):
        addr, size, stream, first, second, time_us, _number, action, owner = row
        pool_id, name = (first, second), actions[action]
        yield HistoryEntry(name, addr, size, stream, time_us, pool_id, frames, owners[owner], step)


def _chunks_from(columns: RegionColumns) -> Iterator[ChunkInfo]:
    rows, owners = CHUNK.iter_unpack(columns.chunks), columns.owners
    kept = columns.chunk_frames or repeat(()), columns.chunk_steps or repeat(None)
    for row, frames, step in zip(rows, *kept, strict=False):
        ptr, size, requested, last_requested, stream, freed_at, number, state, tag, owner = row
        at_free = freed_at, last_requested
        yield ChunkInfo(
            ptr,
            size,
            requested,
            number,
            STATES[state],
            stream,
            *at_free,
            frames,
            owners[owner],
            step,
            TAGS[tag],
        )


def _regions_from(columns: RegionColumns) -> Iterator[RegionInfo]:
    chunks = tuple(_chunks_from(columns))
    pages = struct.unpack(f"={len(columns.pages) // 4}I", columns.pages)
    first_chunk = first_page = 0
    rows = REGION.iter_unpack(columns.regions)
    for row, frames in zip(rows, columns.region_frames or repeat(()), strict=False):
        ptr, size, stream, first, second, home, home_size, _, chunk, page, kind, flags = row
        yield RegionInfo(
            ptr,
            size,
            chunks[first_chunk:chunk],
            stream,
            columns.kinds[kind],
            (first, second),
            frames,
            (home, home_size) if flags & IN_RANGE else None,
            bool(flags & ASLEEP),
            pages[first_page:page],
            bool(flags & IS_VIEW),
        )
        first_chunk, first_page = chunk, page


@dataclass(frozen=True)
class Snapshot:
    """Every region and chunk of an allocator, in address order. `print()` draws it.

    Attributes
    ----------
    device : str
        Where the memory lies, such as "cuda:0".
    stats : Stats
        The figures of the same moment.
    regions : tuple of RegionInfo
        The regions, with their chunks.
    history : tuple of HistoryEntry
        What was recorded, oldest first (`record_history`).
    settings : CachingSettings or None
        The settings of PyTorch's policy; None under another policy.
    torch : str or None
        The version of PyTorch whose rules that policy follows; None under another policy.
    tags : tuple of TagInfo
        The tags, in the order in which they were made.

    Notes
    -----
    An allocator fills rows of numbers. The objects in `regions` and in `history` are made when one
    of these is first looked at: about 1 microsecond for each.
    """

    device: str
    stats: Stats
    regions: tuple[RegionInfo, ...]
    history: tuple[HistoryEntry, ...] = field(default_factory=tuple)
    settings: CachingSettings | None = None
    torch: str | None = None
    tags: tuple[TagInfo, ...] = ()

    @classmethod
    def _of_columns(
        cls,
        device: str,
        stats: Stats,
        regions: RegionColumns,
        history: HistoryColumns | None,
        settings: CachingSettings | None,
        torch: str | None,
        tags: Mapping[str, Mapping[str, Any]],
    ) -> Self:
        """A snapshot whose objects are made later, when they are needed."""
        made = cls.__new__(cls)
        fields = made.__dict__
        fields["device"], fields["stats"], fields["settings"] = device, stats, settings
        fields["torch"], fields["_regions"] = torch, regions
        fields["tags"] = tuple(TagInfo(name, **has) for name, has in tags.items())
        if history:
            fields["_history"] = history
        else:
            fields["history"] = ()
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that has not been made yet."""
            fields = self.__dict__
            if name == "regions" and "_regions" in fields:
                fields["regions"] = tuple(_regions_from(fields["_regions"]))
            elif name == "history" and "_history" in fields:
                fields["history"] = tuple(entries_from(fields["_history"]))
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return fields[name]

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows are those of this machine and of this version; objects can be read anywhere.
        columns = self.device, self.stats, self.regions, self.history, self.settings, self.torch
        return type(self), columns, {"_pool_id": self._pool_id} if self._pool_id else None

    @property
    def _pool_id(self) -> tuple[int, int] | None:
        """The pool whose regions it has (`of_pool`); None for all."""
        return self.__dict__.get("_pool_id")

    def _region_columns(self) -> RegionColumns:
        return self.__dict__.get("_regions") or columns_of_regions(self.regions)

    def _history_columns(self) -> HistoryColumns:
        return self.__dict__.get("_history") or columns_of_history(self.history)

    def _with_regions(self, regions: tuple[RegionInfo, ...]) -> Self:
        """The same snapshot with other regions. It does not make the history's objects."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("_regions", None)
        made.__dict__.pop("bins", None)
        made.__dict__["regions"] = regions
        return made

    def chunks(self) -> Iterator[ChunkInfo]:
        """Every chunk in address order.

        Yields
        ------
        ChunkInfo
            Free or in use.
        """
        for region in self.regions:
            yield from region.chunks

    def free_chunks(self) -> list[ChunkInfo]:
        """The free chunks.

        Returns
        -------
        list of ChunkInfo
            In address order.
        """
        return [chunk for chunk in self.chunks() if not chunk.in_use]

    def live_chunks(self) -> list[ChunkInfo]:
        """The chunks in use, and those that wait for a stream.

        Returns
        -------
        list of ChunkInfo
            In address order.
        """
        return [chunk for chunk in self.chunks() if chunk.in_use]

    def of_pool(self, pool_id: tuple[int, int]) -> Snapshot:
        """The same snapshot with the regions of one private pool only.

        Parameters
        ----------
        pool_id : tuple of (int, int)
            `MemPool.id`, or (0, 0) for regions in no private pool.

        Returns
        -------
        Snapshot
            Without regions if there is no such pool.
        """
        made = self._with_regions(tuple(r for r in self.regions if r.pool_id == pool_id))
        made.__dict__["_pool_id"] = pool_id
        return made

    @cached_property
    def bins(self) -> tuple[BinInfo, ...]:
        """TensorFlow's 21 bin summaries, as in its memory map: chunks by size, free or in use."""
        totals = [[0, 0, 0, 0, 0] for _ in range(BIN_COUNT)]
        for chunk in self.chunks():
            if chunk.tag == CENTRAL_GAP:
                continue
            row = totals[bin_index(chunk.size)]
            row[1] += chunk.size
            row[3] += 1
            if chunk.in_use:
                row[0] += chunk.size
                row[2] += 1
                row[4] += chunk.requested_size
        return tuple(BinInfo(number, *row) for number, row in enumerate(totals))

    def to_frame(self) -> DataFrame:
        """The chunks as a table of pandas, in address order.

        Returns
        -------
        pandas.DataFrame
            A column for each attribute of `ChunkInfo`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> address = allocator.allocate_raw(1000)
        >>> allocator.snapshot().to_frame()["size"].tolist()
        [1024, 1047552]
        """
        return frame_of_rows(ChunkInfo, self.chunks())

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists, ready for JSON.

        Returns
        -------
        dict
            "device", "stats", "tags" and "regions".
        """
        return {
            "device": self.device,
            "stats": self.stats.as_dict(),
            "tags": [asdict(tag) for tag in self.tags],
            "regions": [
                {
                    "ptr": region.ptr,
                    "size": region.size,
                    "stream": region.stream,
                    "kind": region.kind,
                    "pool_id": list(region.pool_id),
                    "reserved": None if region.reserved is None else list(region.reserved),
                    "asleep": region.asleep,
                    "pages": list(region.pages),
                    "is_view": region.is_view,
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

        It has the form of the version of PyTorch whose rules the allocator follows; of the newest
        under another policy.

        Returns
        -------
        dict
            "segments"; "device_traces", a list for each device up to this one, of which all but the
            last are empty; "allocator_settings", which are PyTorch's defaults under another policy;
            and "external_annotations", which is empty. PyTorch 2.15 has "host_segments" and
            "host_traces", too, for pinned memory: both are empty.

        Notes
        -----
        The viewer runs the history backwards from the segments. Memory that sleeps is in none of
        them. Entries that would make it fail are left out: those about memory that is in no
        segment, and all entries before one that contradicts the segments. Equal lists of frames are
        one object. Cost: O(n log n).

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> address = allocator.allocate_raw(1000)
        >>> segment, = allocator.snapshot().to_torch()["segments"]
        >>> [(block["size"], block["state"]) for block in segment["blocks"]]
        [(1024, 'active_allocated'), (1047552, 'inactive')]
        """
        made: dict[str, Any] = pickle.loads(self._pickled_as_torch())
        return made

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write `to_torch()` as a pickle, for pytorch.org/memory_viz and `torch.cuda._memory_viz`.

        Parameters
        ----------
        path : str or os.PathLike
            The file. The snapshot is first written to another file in the same folder, which then
            replaces one that exists.

        Raises
        ------
        OSError
            If it cannot be written. A file that existed is unchanged then.

        Notes
        -----
        Protocol 4. `Trace.from_torch` reads it too.

        Examples
        --------
        >>> import pathlib, tempfile, bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "memory.pickle")
        ...     allocator.snapshot().dump(path)
        ...     path.read_bytes()[:1].hex()
        '80'
        """
        content = self._pickled_as_torch()
        with replacing(path) as file:
            file.write(content)

    def _pickled_as_torch(self) -> bytes:
        from bfc.pytorch.writer import written

        regions, history = self._region_columns(), self._history_columns()
        return written(self.device, regions, history, self.settings, self.torch or NEWEST)

    def to_tensorflow(self) -> dict[str, Any]:
        """TensorFlow's memory dump (the message MemoryDump), as protobuf writes it as JSON.

        Returns
        -------
        dict
            "allocatorName"; "binSummary", the 21 bins; "chunk", in address order; "snapShot", the
            bytes asked for in what was live after each of the last 4096 allocations and frees of
            the history; and "stats". All built-in types: `json.dump` writes it, and
            `google.protobuf.json_format.ParseDict` fills TensorFlow's message from it.

        Notes
        -----
        "opName" is the owner and "stepId" its step (`bfc.owner`). "actionCount" is the number of
        the last allocation or free at the chunk's address, counted from the beginning of the
        history; 0 if there was none. Published builds of TensorFlow leave these and "snapShot"
        empty. "requestedSize" is 0 for a free chunk, where TensorFlow has what was asked for last.

        Memory that sleeps is in it. Cost: some microseconds for each chunk and each entry of the
        history. Source: TensorFlow's behaviour, 2.12.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> address = allocator.allocate_raw(1000)
        >>> dump = allocator.snapshot().to_tensorflow()
        >>> dump["stats"]["bytesInUse"], [chunk["inUse"] for chunk in dump["chunk"]]
        ('1024', [True, False])
        """
        from bfc.snapshots.tensorflow import as_tensorflow

        return as_tensorflow(self)

    def occupancy(self, width: int = 100) -> str:
        """Draw all regions in one line: `*` requested, `x` slack, `_` free, `~` on its way back.

        Parameters
        ----------
        width : int, optional
            The number of characters. TensorFlow's RenderOccupancy has 100.

        Returns
        -------
        str
            The line.
        """
        from bfc.snapshots.text import occupancy

        return occupancy(self, width)

    def __str__(self) -> str:
        from bfc.snapshots.text import picture

        return picture(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: a bar for each region, the largest first."""
        from bfc.snapshots import inline

        stats = self.stats
        caption = (
            f"{self.device}: {format_bytes(stats.bytes_in_use)} in use of "
            f"{format_bytes(stats.pool_bytes)} taken, in {len(self.regions)} regions"
        )
        rows = [
            (
                region.size,
                [(chunk.ptr - region.ptr, chunk.size) for chunk in region.chunks if chunk.in_use],
            )
            for region in sorted(self.regions, key=lambda region: -region.size)
        ]
        return inline.framed(caption, inline.bars(caption, rows))
