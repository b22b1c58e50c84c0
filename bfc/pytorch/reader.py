"""PyTorch's memory snapshots as traces: what `torch.cuda.memory._dump_snapshot` writes.

Such a file holds the segments as they were at its end, and a history. It may come from strangers:
everything in it is checked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from bfc.errors import TraceError
from bfc.files import open_regular
from bfc.pytorch._recording import Event, Packer, Pools, Stacks
from bfc.pytorch.conversion import Recording, converted, in_order
from bfc.pytorch.layout import Block, Span
from bfc.pytorch.owners import Owners
from bfc.pytorch.plain_pickle import loads, shown
from bfc.pytorch.ranges import in_events, ranges_of
from bfc.pytorch.releases import NO_FRAMES
from bfc.pytorch.version import version_of
from bfc.pytorch.words import (
    ANNOTATE,
    BLOCK_ACTIONS,
    INACTIVE,
    OOM,
    PENDING,
    SEGMENT_ACTIONS,
    STATES,
    is_mark,
)

#: The largest file, the longest history, and the most blocks that are read.
MOST_BYTES = 1 << 30
MOST_ENTRIES = 1 << 25
MOST_BLOCKS = 1 << 24
#: The most entries, segments and blocks for a file's size: one for so many bytes, in addition to
#: the first ones. Only a file whose lists share them has more: PyTorch writes each in more bytes.
BYTES_A_PART = 12
FIRST_PARTS = 1 << 12
#: The most settings, including the rows of their tables.
MOST_SETTINGS = 256
LONGEST_TEXT = 4096
TOP = 1 << 64

_CHECKED = frozenset((*BLOCK_ACTIONS, *SEGMENT_ACTIONS, OOM))
_NO_POOL = (0, 0)


def read(
    source: str | os.PathLike[str] | IO[bytes],
    device: int | None,
    frames: bool = True,
    rules: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the constructor of a trace, and the `meta` of `Trace.from_torch`."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the snapshot"
    try:
        data = _content(source)
        packer, parts = Packer(), Parts(len(data))
        content = loads(data, packer)
        del data
        stacks = Stacks(content, packer.stacks) if frames else None
        recording, entries = _recording(content, device, parts, stacks, packer.pools)
        recording.version = version_of(
            content if isinstance(content, dict) else {}, packer.has_internal_metadata
        )
        ranges = ranges_of(content, recording.device)
        del content
        owners = Owners()
        events = _consumed(_Entries(stacks, owners, packer), entries, recording.device)
        del entries
        columns, meta = converted(recording, events, owners, rules or {})
        if ranges and columns["time_us"] is not None and len(columns["time_us"]):
            meta["ranges"] = in_events(ranges, columns["time_us"])
        return columns, meta
    except TraceError as error:
        raise TraceError(f"{name}: {error}", devices=error.devices) from None


def _content(source: str | os.PathLike[str] | IO[bytes]) -> bytes:
    if isinstance(source, str | os.PathLike):
        with open_regular(source) as file:
            data = file.read(MOST_BYTES + 1)
    else:
        data = source.read(MOST_BYTES + 1)
    if not isinstance(data, bytes):
        raise TypeError("from_torch needs a path, or a file opened in binary mode")
    if len(data) > MOST_BYTES:
        raise TraceError(f"it holds more than {MOST_BYTES} bytes, the most that are read")
    return data


# What the file says --------------------------------------------------------------------------


class Parts:
    """Limits how many entries, segments and blocks are read. Shared ones count each time."""

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.left = FIRST_PARTS + file_bytes // BYTES_A_PART

    def look_at(self, parts: Sequence[Any], where: str) -> None:
        """Raises TraceError if there are more than a file of this size can hold without sharing."""
        self.left -= len(parts)
        if self.left < 0:
            raise TraceError(
                f"{where}: its lists share parts, and written out they would be larger than the "
                f"{self.file_bytes} bytes of the file"
            )


def _recording(
    content: Any, device: int | None, parts: Parts, stacks: Stacks | None, table: Pools
) -> tuple[Recording, Sequence[Any]]:
    """One device's part of a file, checked, and the entries of its history, which are not."""
    if isinstance(content, list):  # what memory_snapshot() returns: only the segments
        content = {"segments": content}
    if not isinstance(content, dict) or not {"segments", "device_traces"} & set(content):
        raise TraceError(
            f"it holds {shown(content)} with neither 'segments' nor 'device_traces': it is "
            "not a memory snapshot of PyTorch"
        )
    segments = _list(content.get("segments", []), "segments")
    traces = _list(content.get("device_traces", []), "device_traces")
    parts.look_at(segments, "segments")
    parts.look_at(traces, "device_traces")
    for number, trace in enumerate(traces):
        _list(trace, f"device_traces[{number}]")
    device = _device(segments, traces, device)
    entries = traces[device] if device < len(traces) else []
    parts.look_at(entries, f"device_traces[{device}]")
    if len(entries) > MOST_ENTRIES:
        raise TraceError(f"device_traces[{device}] has {len(entries)} entries: too many")
    spans, blocks, pools = _segments(segments, device, parts, stacks, table)
    settings = _settings(content.get("allocator_settings"))
    return Recording(device, spans, blocks, settings, stacks, pools, table), entries


def _device(segments: Sequence[Any], traces: Sequence[Any], wanted: int | None) -> int:
    """The device that is asked for, or the only one that did anything."""
    recorded = {number for number, trace in enumerate(traces) if trace}
    holding = set()
    for number, segment in enumerate(segments):
        _dict(segment, f"segments[{number}]")
        holding.add(_device_of(segment, f"segments[{number}]"))
    holding.discard(-1)  # the host
    present = sorted(recorded | holding)
    if wanted is not None:
        if wanted not in present:
            raise TraceError(f"it holds nothing of device {wanted}, but of {some_numbers(present)}")
        return wanted
    choice = sorted(recorded) or present or [0]
    if len(choice) > 1:
        raise TraceError(
            f"it holds the devices {some_numbers(choice)}: choose one with device=",
            devices=tuple(choice),
        )
    return choice[0]


def some_numbers(numbers: Sequence[int]) -> str:
    return f"{list(numbers) or 'none'}" if len(numbers) <= 16 else f"{list(numbers[:16])} and more"


def _device_of(segment: dict[str, Any], where: str) -> int:
    """A segment's device. -1 stands for host memory, which is not read."""
    return _number(segment.get("device", 0), f"{where}['device']", low=-1)


def _segments(
    segments: Sequence[Any], device: int, parts: Parts, stacks: Stacks | None, table: Pools
) -> tuple[list[Span], dict[int, Block], list[list[int]]]:
    """The segments of a device by address, their live blocks, and which belong to private pools."""
    spans: list[Span] = []
    pools: list[list[int]] = []
    live: dict[int, Block] = {}
    blocks_seen = 0
    for number, segment in enumerate(segments):
        where = f"segments[{number}]"
        if _device_of(segment, where) != device:
            continue
        blocks = _list(segment.get("blocks", []), f"{where}['blocks']")
        parts.look_at(blocks, where)
        blocks_seen += len(blocks)
        if blocks_seen > MOST_BLOCKS:
            raise TraceError(f"{where}: more than {MOST_BLOCKS} blocks")
        span, pool_id = _segment(segment, blocks, live, stacks, table, where)
        spans.append(span)
        if span.pool:
            pools.append([span.start, span.end - span.start, *pool_id])
    return in_order(spans), live, pools


def _segment(
    segment: dict[str, Any],
    blocks: Sequence[Any],
    live: dict[int, Block],
    stacks: Stacks | None,
    table: Pools,
    where: str,
) -> tuple[Span, tuple[int, int]]:
    start = at = _number(segment.get("address"), f"{where}['address']")
    stream = _number(segment.get("stream", 0), f"{where}['stream']", low=-TOP)
    for number, block in enumerate(blocks):
        place = f"{where}['blocks'][{number}]"
        _dict(block, place)
        size = _number(block.get("size"), f"{place}['size']", low=1)
        if _number(block.get("address", at), f"{place}['address']") != at:
            raise TraceError(f"{place} does not begin where the block before it ends")
        if at + size > TOP:
            raise TraceError(f"{place} ends beyond all addresses")
        state = block.get("state")
        if state not in STATES.values():
            raise TraceError(f"{place}['state'] is {shown(state)}")
        if state != INACTIVE:
            requested = _requested(block, size, place)
            stack = 0 if stacks is None else stacks.number_of(block.get("frames"))
            live[at] = Block(at, requested, stream, size, state == PENDING, stack)
        at += size
    size = _number(segment.get("total_size"), f"{where}['total_size']", low=1)
    if start + size != at:
        raise TraceError(f"{where} has {size} bytes, but its blocks {at - start}")
    pool_id = _pool(segment.get("segment_pool_id", (0, 0)), f"{where}['segment_pool_id']")
    kind = segment.get("segment_type", "large")
    expandable = segment.get("is_expandable") is True
    span = Span(start, at, stream, kind == "small", expandable, table.number_of(pool_id))
    return span, pool_id


def _requested(block: dict[str, Any], size: int, where: str) -> int:
    """The requested bytes of a block; in files of old releases they are in its `history` list."""
    requested = block.get("requested_size")
    history = block.get("history")
    if requested is None and isinstance(history, list) and history:
        _dict(history[0], f"{where}['history'][0]")
        requested = history[0].get("real_size")
    requested = size if requested is None else requested
    if _number(requested, f"{where}['requested_size']") > size:
        raise TraceError(f"{where} has {size} bytes, and is asked for {requested}")
    return int(requested)


def _settings(settings: Any) -> dict[str, Any]:
    """The settings that a trace can hold: numbers, strings, and tables of numbers."""
    if settings is None:
        return {}
    _dict(settings, "allocator_settings")
    kept: dict[str, Any] = {}
    left = MOST_SETTINGS
    for name, value in itertools.islice(settings.items(), MOST_SETTINGS):
        if isinstance(value, dict):
            table = list(itertools.islice(value.items(), left))
            left -= len(table)
            kept[_text(name)] = {_text(key): item for key, item in table if _is_number(item)}
        elif value is None or _is_number(value):
            kept[_text(name)] = value
        elif isinstance(value, str):
            kept[_text(name)] = _text(value)
    return kept


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) < float("inf")
    return isinstance(value, int) and abs(value) <= TOP


def _text(text: str) -> str:
    return text[:LONGEST_TEXT]


def _pool(pool_id: Any, where: str) -> tuple[int, int]:
    if not isinstance(pool_id, list | tuple) or len(pool_id) != 2:
        raise TraceError(f"{where} is {shown(pool_id)}: a pair of numbers is expected")
    return _number(pool_id[0], where), _number(pool_id[1], where)


def _number(value: Any, where: str, low: int = 0) -> int:
    if type(value) is not int or not low <= value < TOP:
        what = "missing" if value is None else shown(value)
        raise TraceError(f"{where} is {what}: a number from {low} is expected")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TraceError(f"{where} is {shown(value)}: a list is expected")
    return value  # no copy: many lists may be one


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{where} is {shown(value)}: a dict is expected")
    return value


# The history ---------------------------------------------------------------------------------


class _Entries:
    """Checks the entries of a history, and numbers what many of them share."""

    def __init__(self, stacks: Stacks | None, owners: Owners, packer: Packer) -> None:
        self._stacks, self._owners, self._packer = stacks, owners, packer
        #: What each list of frames says, for the lists that were looked at.
        self._said: dict[int, int] = {}

    def event(self, entry: Any, where: str, number: int) -> Event:
        """`where` names the history, and `number` is the index of the entry in it."""
        stack = 0
        if isinstance(entry, Event):
            event, note = entry, entry.note
            if self._stacks is not None:
                stack = self._stacks.number_walked(entry.walked)
        else:
            _dict(entry, f"{where}[{number}]")
            event, note = self._checked(entry, f"{where}[{number}]"), entry.get("user_metadata")
            note = None if is_mark(event.action) else note
            if self._stacks is not None:
                stack = self._stacks.number_of(entry.get("frames"))
        event.number(stack, self._owners.number_of(note))
        return event

    def _checked(self, entry: dict[str, Any], where: str) -> Event:
        action = entry.get("action")
        if type(action) is not str:
            raise TraceError(f"{where}['action'] is {shown(action)}: a text is expected")
        time_us = entry.get("time_us", 0)
        time_us = time_us if type(time_us) is int and 0 <= time_us < TOP else 0
        if action == ANNOTATE and is_mark(entry.get("user_metadata")):
            size = _number(entry.get("size", 0), f"{where}['size']")
            stream = _number(entry.get("stream", 0), f"{where}['stream']", low=-TOP)
            pool = self._pool(entry, where)
            return Event(entry["user_metadata"], 0, size, stream, pool, time_us=time_us)
        if action not in _CHECKED:
            return Event(action, time_us=time_us)
        name = "device_free" if action == OOM else "addr"
        address = _number(entry.get(name), f"{where}['{name}']")
        size = _number(entry.get("size"), f"{where}['size']")
        stream = _number(entry.get("stream", 0), f"{where}['stream']", low=-TOP)
        if address + size > TOP and action != OOM:
            raise TraceError(f"{where} ends beyond all addresses")
        pool = self._pool(entry, where)
        named = NO_FRAMES
        if action in SEGMENT_ACTIONS:
            frames = entry.get("frames")
            if id(frames) not in self._said:
                self._said[id(frames)] = self._packer.said_by(frames)
            named = self._said[id(frames)]
        return Event(action, address, size, stream, pool, named, time_us)

    def _pool(self, entry: dict[str, Any], where: str) -> int:
        pool_id = _pool(entry.get("pool_id", _NO_POOL), f"{where}['pool_id']")
        return self._packer.pools.number_of(pool_id)


def _consumed(checked: _Entries, entries: Sequence[Any], device: int) -> list[Event]:
    """The history, checked. Each entry of the file is dropped as soon as it is read, so that both
    are never in memory as a whole."""
    where = f"device_traces[{device}]"
    events: list[Event] = []
    for number, entry in enumerate(entries):
        events.append(checked.event(entry, where, number))
        if type(entries) is list:
            entries[number] = None
    return events
