"""What is taken from the device at one moment, and what keeps it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bfc.libraries import NDArray, np
from bfc.pytorch.words import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from bfc.snapshots.columns import ASLEEP, IS_VIEW, REGION

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import Snapshot

#: The most blocks that are named for each segment.
NAMED_BLOCKS = 3


@dataclass
class Segments:
    """Segments as columns, in the order of their addresses."""

    address: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    pool: list[str] = field(default_factory=list)


def of_snapshot(snapshot: Snapshot) -> Segments:
    """The regions of a snapshot that have memory."""
    columns, found = snapshot._region_columns(), Segments()
    for row in sorted(REGION.iter_unpack(columns.regions)):
        address, size, stream, first, second, _, _, _, _, kind, flags = row
        if flags & ASLEEP:
            continue
        found.address.append(address)
        found.size.append(size)
        found.stream.append(stream)
        found.kind.append("view" if flags & IS_VIEW else columns.kinds[kind])
        found.pool.append(f"{first}.{second}" if first or second else "")
    return found


class Pieces:
    """Ranges of addresses that do not overlap, each with the stream it was taken for."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.streams: list[int] = []

    def add(self, address: int, size: int, stream: int, *, joined: bool = False) -> None:
        """Adds a range. Mapped memory is joined with what it continues."""
        self.remove(address, size)
        at = bisect_left(self.starts, address)
        if joined and at and self.ends[at - 1] == address and self.streams[at - 1] == stream:
            self.ends[at - 1] = address + size
            return
        self.starts.insert(at, address)
        self.ends.insert(at, address + size)
        self.streams.insert(at, stream)

    def remove(self, address: int, size: int) -> None:
        """Removes what there is of a range."""
        end = address + size
        first, last = bisect_right(self.ends, address), bisect_left(self.starts, end)
        if first >= last:
            return
        left = [(self.starts[first], address, self.streams[first])]
        right = [(end, self.ends[last - 1], self.streams[last - 1])]
        kept = [piece for piece in left + right if piece[0] < piece[1]]
        self.starts[first:last] = [piece[0] for piece in kept]
        self.ends[first:last] = [piece[1] for piece in kept]
        self.streams[first:last] = [piece[2] for piece in kept]


def of_recording(torch: dict[str, Any], event: int, known: Callable[[int], int]) -> Segments:
    """The segments that a recorded run had after an event. `torch` is `meta["torch"]` of
    `Trace.from_torch`, and `known` returns the stream of a segment from before the recording by its
    address. Streams are the numbers that the trace has."""
    pieces, streams = Pieces(), {handle: at for at, handle in enumerate(torch.get("streams", ()))}
    changes = torch["segment_events"]
    taken = sum(change[0] == SEGMENT_ALLOC for change in changes)
    for _, address, size in torch["segments"][: len(torch["segments"]) - taken]:
        pieces.add(address, size, known(address))
    for action, before, address, size, stream in changes:
        if before > event:
            break
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            pieces.add(address, size, streams.get(stream, 0), joined=action == SEGMENT_MAP)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            pieces.remove(address, size)
    sizes = [end - start for start, end in zip(pieces.starts, pieces.ends, strict=True)]
    nothing = [""] * len(sizes)
    return Segments(pieces.starts, sizes, pieces.streams, nothing, _pools(torch, pieces, event))


def _pools(torch: dict[str, Any], pieces: Pieces, event: int) -> list[str]:
    """The pool of each piece: that of the segment which was taken there last. A trace from before
    these were listed has those that lie there at the end of the recording."""
    listed = torch.get("pool_segments")
    if listed is None:
        listed = [[-1, *row] for row in torch.get("pools", ())]
    private = {
        (int(at), int(address)): ".".join(str(int(number)) for number in pool)
        for at, address, _, *pool in listed
    }
    taken = [(-1, int(address), int(size)) for at, address, size, *_ in listed if at == -1]
    taken += [
        (int(before), int(address), int(size))
        for action, before, address, size, _ in torch["segment_events"]
        if action in (SEGMENT_ALLOC, SEGMENT_MAP) and before <= event
    ]
    named, by_pool = Pieces(), [""]
    for at, address, size in taken:  # the number of the pool stands where a stream does
        by_pool.append(private.get((at, address), ""))
        named.add(address, size, len(by_pool) - 1)
    found = []
    for start in pieces.starts:
        at = bisect_right(named.starts, start) - 1
        inside = at >= 0 and start < named.ends[at]
        found.append(by_pool[named.streams[at]] if inside else "")
    return found


def _by_pool(
    segments: Segments, size: NDArray[np.uint64], live: NDArray[np.int64], blocks: NDArray[np.intp]
) -> list[list[Any]]:
    """[pool, segments, bytes, bytes live, blocks] of each pool, the largest first; empty where all
    is in the default pool."""
    sums: dict[str, list[Any]] = {}
    for row in zip(segments.pool, size.tolist(), live.tolist(), blocks.tolist(), strict=True):
        found = sums.setdefault(row[0], [row[0], 0, 0, 0, 0])
        for at, number in enumerate((1, *row[1:]), 1):
            found[at] += number
    return sorted(sums.values(), key=lambda row: -row[2]) if set(sums) - {""} else []


def with_blocks(
    segments: Segments,
    address: NDArray[np.uint64],
    size: NDArray[np.uint64],
    owner: Iterable[int],
    most: int,
) -> dict[str, Any]:
    """The segments of a run (`bfc_tools.browser.data`), the `most` largest of them, with the live
    blocks in them. An address of 0 is that of a block that has no memory."""
    starts = np.array(segments.address, np.uint64)
    ends = starts + np.array(segments.size, np.uint64)
    # By segment, and in each the largest first.
    at = np.searchsorted(starts, address, side="right") - 1
    inside = (at >= 0) & (address > 0) & (size > 0)
    inside[inside] = address[inside] < ends[at[inside]]
    chosen = np.flatnonzero(inside)
    order = chosen[np.lexsort((-size[chosen].astype(np.int64), at[chosen]))]
    counts = np.bincount(at[order], minlength=len(starts))
    live = np.zeros(len(starts), np.int64)
    np.add.at(live, at[order], size[order].astype(np.int64))
    first = np.cumsum(counts) - counts
    numbers = np.fromiter(owner, np.int64, len(size))
    kept = np.sort(np.argsort(-(ends - starts).astype(np.int64), kind="stable")[:most])
    largest = [order[first[i] : first[i] + min(counts[i], NAMED_BLOCKS)] for i in kept]
    return {
        "address": starts[kept].tolist(),
        "size": (ends - starts)[kept].tolist(),
        "stream": [segments.stream[i] for i in kept],
        "kind": [segments.kind[i] for i in kept],
        "pool": [segments.pool[i] for i in kept],
        "live": live[kept].tolist(),
        "blocks": counts[kept].tolist(),
        "largest": [
            np.stack([address[of], size[of], numbers[of].astype(np.uint64)], 1)
            .view(np.int64)
            .tolist()
            for of in largest
        ],
        "by_pool": _by_pool(segments, ends - starts, live, counts),
        "left_out": len(starts) - len(kept),
        "left_out_bytes": int((ends - starts).sum() - (ends - starts)[kept].sum()),
    }
