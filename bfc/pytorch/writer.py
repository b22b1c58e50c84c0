"""A snapshot as PyTorch writes it: the dict of `torch.cuda.memory._snapshot()`, and its pickle.

Fields, states and actions are those of PyTorch 2.11 (PyTorch's behaviour, 3.4), and the
pickle holds what the viewers at pytorch.org/memory_viz and in `torch.cuda._memory_viz` take
(PyTorch's behaviour, 3.5).
"""

from __future__ import annotations

import os
import pickle
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bfc.files import replacing
from bfc.pytorch.words import (
    ALLOC,
    BLOCK_ACTIONS,
    FREE_REQUESTED,
    OOM,
    OUR_FILE,
    OUR_OWN,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    STATES,
)

if TYPE_CHECKING:
    from bfc.report.snapshot import ChunkInfo, Frame, HistoryEntry, RegionInfo, Snapshot

    #: Lists of frames by the frames they were made from: equal ones are one list, which keeps a
    #: long history short in memory and in the file.
    _Shared = dict[tuple[Frame, ...], list[dict[str, Any]]]

#: The frames of memory that the allocator gave back without being told to.
_OF_ITS_OWN = [{"filename": OUR_FILE, "line": 0, "name": OUR_OWN}]
#: The viewer of the web page reads protocols 2 to 4.
PROTOCOL = 4
#: No device has a higher ordinal; `device_traces` gets an empty list for each one below.
HIGHEST_DEVICE = 1023


def as_torch(snapshot: Snapshot) -> dict[str, Any]:
    """The dict of `Snapshot.to_torch`."""
    device = _ordinal(snapshot.device)
    shared: _Shared = {}
    regions = tuple(region for region in snapshot.regions if not region.asleep)
    entries = [
        _entry(entry, time_us, shared)
        for entry, time_us in _in_time(_consistent(snapshot.history, regions))
    ]
    return {
        "segments": [_segment(region, device, shared) for region in regions],
        "device_traces": [*([] for _ in range(device)), entries],
        "allocator_settings": _settings(snapshot),
        "external_annotations": [],
    }


def dump(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """The file of `Snapshot.dump`."""
    content = as_torch(snapshot)
    with replacing(path) as file:
        pickle.dump(content, file, protocol=PROTOCOL)


def _ordinal(device: str) -> int:
    """The number behind the last colon of a device's name; 0 where there is none."""
    found = re.search(r":(\d{1,4})$", device)
    number = int(found[1]) if found else 0
    return number if number <= HIGHEST_DEVICE else 0


def _settings(snapshot: Snapshot) -> dict[str, Any]:
    settings = snapshot.settings
    if settings is None:
        from bfc.pytorch.settings import CachingSettings

        settings = CachingSettings()
    return dict(settings.as_torch())


def _segment(region: RegionInfo, device: int, shared: _Shared) -> dict[str, Any]:
    active = [chunk for chunk in region.chunks if chunk.in_use]
    return {
        "device": device,
        "address": int(region.ptr),
        "total_size": int(region.size),
        "allocated_size": sum(chunk.size for chunk in active if chunk.state == "in use"),
        "active_size": sum(chunk.size for chunk in active),
        "requested_size": sum(chunk.requested_size for chunk in active),
        "stream": int(region.stream),
        "segment_type": str(region.kind),
        "segment_pool_id": _pool(region.pool_id),
        "is_expandable": region.reserved is not None,
        "frames": _frames(region.frames, shared),
        "blocks": [_block(chunk, shared) for chunk in region.chunks],
    }


def _block(chunk: ChunkInfo, shared: _Shared) -> dict[str, Any]:
    requested = chunk.requested_size if chunk.in_use else chunk.last_requested_size
    return {
        "address": int(chunk.ptr),
        "size": int(chunk.size),
        "requested_size": int(requested),
        "state": STATES[chunk.state],
        "frames": _frames(chunk.frames, shared),
    }


def _entry(entry: HistoryEntry, time_us: int, shared: _Shared) -> dict[str, Any]:
    where = "device_free" if entry.action == OOM else "addr"
    frames = _frames(entry.frames, shared)
    if entry.action in (SEGMENT_FREE, SEGMENT_UNMAP) and not frames:
        frames = _OF_ITS_OWN  # a reader must not take it for an emptied cache
    return {
        "action": str(entry.action),
        where: int(entry.addr),
        "size": int(entry.size),
        "stream": int(entry.stream),
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": _pool(entry.pool_id),
        "frames": frames,
    }


def _pool(pool_id: tuple[int, int]) -> tuple[int, int]:
    first, second = pool_id
    return int(first), int(second)


def _frames(frames: tuple[Frame, ...], shared: _Shared) -> list[dict[str, Any]]:
    if not frames:
        return []
    made = shared.get(frames)
    if made is None:
        made = shared[frames] = [
            {"filename": str(filename), "line": int(line), "name": str(name)}
            for filename, line, name in frames
        ]
    return made


def _in_time(entries: Iterable[HistoryEntry]) -> Iterable[tuple[HistoryEntry, int]]:
    """Each entry and its time, which never decreases: if the clock was set back, the time stands
    still until the clock has caught up."""
    latest = 0
    for entry in entries:
        latest = max(latest, int(entry.time_us))
        yield entry, latest


# What the viewer can follow ------------------------------------------------------------------


def _consistent(
    history: tuple[HistoryEntry, ...], regions: tuple[RegionInfo, ...]
) -> list[HistoryEntry]:
    """The entries that the viewer can undo one by one from the final regions, oldest first.

    It stops with an error where an undone entry finds no segment, or no block. So an entry about
    memory that is in no segment at its time is left out (a pool's own snapshot shows its segments
    only; kinds of entries may not have been recorded), and where the history contradicts the
    regions, all before that place is.
    """
    past = _Past(regions)
    kept = []
    for entry in reversed(history):
        fits = past.undo(entry)
        if fits is None:
            break
        if fits:
            kept.append(entry)
    kept.reverse()
    return kept


class _Past:
    """The segments and live blocks, run backwards. O(log n) an entry, O(n) one of a segment.

    As in the viewer, what is mapped is joined to what lies next to it on the same stream.
    """

    def __init__(self, regions: tuple[RegionInfo, ...]) -> None:
        self.starts = sorted(region.ptr for region in regions)
        self.ends = {region.ptr: region.end for region in regions}
        self.streams = {region.ptr: region.stream for region in regions}
        self.live = {chunk.ptr for region in regions for chunk in region.chunks if chunk.in_use}
        self.inside = {
            region.ptr: sum(chunk.in_use for chunk in region.chunks) for region in regions
        }

    def segment_of(self, address: int) -> int | None:
        """Where the segment begins that an address lies in."""
        index = bisect_right(self.starts, address) - 1
        if index < 0 or address >= self.ends[self.starts[index]]:
            return None
        return self.starts[index]

    def undo(self, entry: HistoryEntry) -> bool | None:
        """Whether the viewer can undo it; None where it contradicts what came later."""
        if entry.action in BLOCK_ACTIONS:
            return self._undo_of_a_block(entry.action, entry.addr)
        if entry.action == SEGMENT_ALLOC:
            return self._undo_segment_alloc(entry.addr, entry.size)
        if entry.action == SEGMENT_MAP:
            return self._undo_segment_map(entry.addr, entry.addr + entry.size)
        if entry.action in (SEGMENT_FREE, SEGMENT_UNMAP):
            return self._undo_segment_free(entry)
        return True

    def _undo_of_a_block(self, action: str, address: int) -> bool | None:
        segment = self.segment_of(address)
        if segment is None:
            return False
        is_live = address in self.live
        if action == FREE_REQUESTED:
            return is_live
        if action == ALLOC:
            if is_live:
                self.live.remove(address)
                self.inside[segment] -= 1
            return True
        if is_live:
            return None
        self.live.add(address)
        self.inside[segment] += 1
        return True

    def _undo_segment_alloc(self, address: int, size: int) -> bool | None:
        if self.ends.get(address) != address + size:
            return False
        if self.inside[address]:
            return None
        self._remove(address)
        return True

    def _undo_segment_map(self, address: int, end: int) -> bool | None:
        segment = self.segment_of(address)
        if segment is None or self.ends[segment] < end:
            return False
        if self._count_live(segment, address, end):
            return None
        last, stream, inside = self.ends[segment], self.streams[segment], self.inside[segment]
        before = self._count_live(segment, segment, address)
        self._remove(segment)
        if segment < address:
            self._insert(segment, address, stream, before)
        if end < last:
            self._insert(end, last, stream, inside - before)
        return True

    def _undo_segment_free(self, entry: HistoryEntry) -> bool | None:
        address, end, stream = entry.addr, entry.addr + entry.size, entry.stream
        inside = 0
        above = bisect_left(self.starts, end)
        before = self.starts[above - 1] if above else end
        if above and self.ends[before] > address:
            return None
        if entry.action == SEGMENT_UNMAP:
            if self.streams.get(end) == stream:
                last, inside = self.ends[end], self.inside[end]
                self._remove(end)
                end = last
            if above and self.ends[before] == address and self.streams[before] == stream:
                address, inside = before, inside + self.inside[before]
                self._remove(before)
        self._insert(address, end, stream, inside)
        return True

    def _count_live(self, segment: int, start: int, end: int) -> int:
        """The live blocks that begin in a part of a segment."""
        if not self.inside[segment] or start == end:
            return 0
        return sum(start <= address < end for address in self.live)

    def _insert(self, start: int, end: int, stream: int, inside: int) -> None:
        insort(self.starts, start)
        self.ends[start], self.streams[start], self.inside[start] = end, stream, inside

    def _remove(self, start: int) -> None:
        del self.starts[bisect_left(self.starts, start)], self.ends[start]
        del self.streams[start], self.inside[start]
