"""What was taken from the device at one moment, of a recording or of an allocator."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bfc.libraries import NDArray, np
from bfc.pytorch.words import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from bfc.snapshots.columns import ASLEEP, IS_VIEW, REGION

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import Snapshot
    from bfc.trace import Trace


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
        address, size, stream, first, second, *_, kind, flags = row
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
        """Adds a range. Mapped memory is joined with what stands next to it."""
        self.remove(address, size)
        end, at = address + size, bisect_left(self.starts, address)
        if (
            joined
            and at < len(self.starts)
            and (end, stream) == (self.starts[at], self.streams[at])
        ):
            end = self.ends[at]
            self._drop(at)
        if joined and at and (self.ends[at - 1], self.streams[at - 1]) == (address, stream):
            self.ends[at - 1] = end
            return
        self.starts.insert(at, address)
        self.ends.insert(at, end)
        self.streams.insert(at, stream)

    def _drop(self, at: int) -> None:
        for column in (self.starts, self.ends, self.streams):
            del column[at]

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


def up_to(torch: dict[str, Any], entries: int) -> dict[str, Any]:
    """What a recording says, with only the first entries about segments."""
    changes = torch["segment_events"]
    later = sum(change[0] == SEGMENT_ALLOC for change in changes[entries:])
    kept = torch["segments"][: len(torch["segments"]) - later]
    return torch | {"segment_events": changes[:entries], "segments": kept}


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


def streams_at_start(trace: Trace, addresses: NDArray[np.uint64]) -> Callable[[int], int]:
    """What returns the stream of a segment from before the recording: that of what is allocated at
    its address first, since the events that rebuild the start fill each segment."""
    made = np.flatnonzero((trace.op == 0) & (addresses > 0))
    starts, first = np.unique(addresses[made], return_index=True)
    stream = trace.stream[made[first]]

    def known(address: int) -> int:
        at = int(np.searchsorted(starts, np.uint64(address)))
        return int(stream[at]) if at < len(starts) and int(starts[at]) == address else 0

    return known
