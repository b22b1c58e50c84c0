"""A snapshot as columns: rows of plain numbers, which compiled code writes and reads.

`native/columns.hpp` and `native/history.hpp` have the same rows as C structures.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bfc.pytorch.words import ACTIONS

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import ChunkInfo, Frame, HistoryEntry, RegionInfo

    Frames = tuple[Frame, ...]

#: ptr, size, requested_size, last_requested_size, stream, freed_at_count; allocation_id; the
#: indices of the state, of the tag and of the owner.
CHUNK = struct.Struct("=6Qq2HI")
#: ptr, size, stream, the two numbers of its pool, the start and the bytes of the reservation (or of
#: the pool's region) that it lies in, and the number of that region; the ends of its chunks and of
#: its pages, the index of its kind, and the bits below.
REGION = struct.Struct("=8Q4I")
IN_RANGE, ASLEEP, IS_VIEW = 1, 2, 4
#: addr, size, stream, the two numbers of its pool; time_us, allocation_id; the indices of its
#: action and of its owner.
RECORD = struct.Struct("=5Q2q2I")
STATES = ("free", "in use", "waiting", "leaving")
STATE_INDICES = {state: index for index, state in enumerate(STATES)}
TAGS = ("", "lower", "upper", "central_gap")
KINDS = ("small", "large")
NOBODY = ("",)


class RegionColumns(NamedTuple):
    """Regions and their chunks, in rows of REGION and of CHUNK."""

    regions: bytes
    chunks: bytes
    pages: bytes
    #: The frames of each region and of each chunk; None: there are none.
    region_frames: list[Frames] | None = None
    chunk_frames: list[Frames] | None = None
    kinds: tuple[str, ...] = KINDS
    owners: Sequence[str] = NOBODY
    #: The step of each chunk; None: there are none.
    chunk_steps: list[int | None] | None = None


class HistoryColumns(NamedTuple):
    """A history, in rows of RECORD."""

    records: bytes
    #: The frames of each entry; None: there are none.
    frames: list[Frames] | None = None
    actions: tuple[str, ...] = ACTIONS
    owners: Sequence[str] = NOBODY
    #: The step of each entry; None: there are none.
    steps: list[int | None] | None = None

    def __len__(self) -> int:
        return len(self.records) // RECORD.size


def columns_of_regions(regions: Iterable[RegionInfo]) -> RegionColumns:
    """Regions that a caller has built as objects, as columns. Raises struct.error if a number is
    negative or has more than 64 bits, and KeyError if a chunk has an unknown state."""
    kinds, owners = list(KINDS), list(NOBODY)
    rows, chunks, pages = bytearray(), bytearray(), bytearray()
    region_frames: list[Frames] = []
    chunk_frames: list[Frames] = []
    steps: list[int | None] = []
    for region in regions:
        for chunk in region.chunks:
            chunks += _packed_chunk(chunk, _index(owners, chunk.owner))
            chunk_frames.append(chunk.frames)
            steps.append(chunk.step)
        pages += struct.pack(f"={len(region.pages)}I", *region.pages)
        region_frames.append(region.frames)
        flags = IN_RANGE * (region.reserved is not None)
        flags |= ASLEEP * region.asleep | IS_VIEW * region.is_view
        rows += REGION.pack(
            region.ptr,
            region.size,
            region.stream,
            *region.pool_id,
            *(region.reserved or (region.ptr, region.size)),
            0,  # a region of a file has no number
            len(chunk_frames),
            len(pages) // 4,
            _index(kinds, region.kind),
            flags,
        )
    packed = bytes(rows), bytes(chunks), bytes(pages)
    tables = tuple(kinds), tuple(owners)
    return RegionColumns(*packed, region_frames, chunk_frames, *tables, steps)


def _packed_chunk(chunk: ChunkInfo, owner: int) -> bytes:
    return CHUNK.pack(
        chunk.ptr,
        chunk.size,
        chunk.requested_size,
        chunk.last_requested_size,
        chunk.stream,
        chunk.freed_at_count,
        chunk.allocation_id,
        STATE_INDICES[chunk.state],
        TAGS.index(chunk.tag),
        owner,
    )


def columns_of_history(history: Iterable[HistoryEntry]) -> HistoryColumns:
    """A history that a caller has built of objects, as columns. Raises struct.error if a number is
    negative or has more than 64 bits."""
    actions, owners = list(ACTIONS), list(NOBODY)
    rows = bytearray()
    frames: list[Frames] = []
    steps: list[int | None] = []
    for entry in history:
        action = _index(actions, entry.action)
        where = entry.addr, entry.size, entry.stream, *entry.pool_id
        rows += RECORD.pack(*where, entry.time_us, 0, action, _index(owners, entry.owner))
        frames.append(entry.frames)
        steps.append(entry.step)
    return HistoryColumns(bytes(rows), frames, tuple(actions), tuple(owners), steps)


def _index(names: list[str], name: str) -> int:
    """The index of a name in a table. Adds the name if it is missing."""
    if name not in names:
        names.append(name)
    return names.index(name)
