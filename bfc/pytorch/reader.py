"""PyTorch's memory snapshots as traces: what `torch.cuda.memory._dump_snapshot` writes.

Such a file holds the segments as they were at its end, and a history that may have lost its
beginning (section 3.6 of the description). A block was live before the history if the
history frees it without allocating it first, or if it is live at the end and never mentioned.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from bfc.errors import TraceError
from bfc.files import open_regular
from bfc.pytorch._stacks import Stacks
from bfc.pytorch.layout import Block, Columns, Sizes, Span, Spans, lay_out
from bfc.pytorch.owners import Owners
from bfc.pytorch.plain_pickle import loads, shown
from bfc.pytorch.releases import GOES, NO_FRAMES, Releases, what_frames_say
from bfc.pytorch.sizes import SMALL_SEGMENT
from bfc.pytorch.words import (
    ALLOC,
    ANNOTATE,
    BLOCK_ACTIONS,
    FREE_COMPLETED,
    FREE_REQUESTED,
    INACTIVE,
    OOM,
    PENDING,
    SEGMENT_ACTIONS,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SNAPSHOT,
    STATES,
)

#: The largest file, the longest history, and the most blocks that are read.
MOST_BYTES = 1 << 30
MOST_ENTRIES = 1 << 25
MOST_BLOCKS = 1 << 24
#: The most entries, segments and blocks for a file's size: one for so many bytes, in addition to
#: the first ones. Only a file whose lists share them has more: PyTorch writes each in more bytes.
BYTES_A_PART = 12
FIRST_PARTS = 1 << 12
MOST_STREAMS = 1 << 16
#: The most settings, including the rows of their tables.
MOST_SETTINGS = 256
LONGEST_TEXT = 4096
TOP = 1 << 64

_WITHOUT_EFFECT = (SNAPSHOT, ANNOTATE)
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
        content, parts = loads(data), Parts(len(data))
        del data
        stacks = Stacks(content) if frames else None
        recording = _recording(content, device, parts, stacks)
        return _converted(recording, rules or {})
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


@dataclass
class _Recording:
    """One device's part of a file, checked."""

    device: int
    spans: list[Span]
    blocks: dict[int, Block]
    entries: Sequence[Any]
    settings: dict[str, Any]
    #: None where frames are left out.
    stacks: Stacks | None
    #: The address, the bytes and the two numbers of the pool of each segment of a private pool.
    pools: list[list[int]]

    @property
    def where(self) -> str:
        return f"device_traces[{self.device}]"


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


def _recording(content: Any, device: int | None, parts: Parts, stacks: Stacks | None) -> _Recording:
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
    spans, blocks, pools = _segments(segments, device, parts, stacks)
    settings = _settings(content.get("allocator_settings"))
    return _Recording(device, spans, blocks, entries, settings, stacks, pools)


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
    segments: Sequence[Any], device: int, parts: Parts, stacks: Stacks | None
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
        span, pool_id = _segment(segment, blocks, live, stacks, where)
        spans.append(span)
        if span.is_private:
            pools.append([span.start, span.end - span.start, *pool_id])
    spans.sort(key=lambda span: span.start)
    for before, after in itertools.pairwise(spans):
        if after.start < before.end:
            raise TraceError(f"the segments at {before.start:#x} and {after.start:#x} overlap")
    return spans, live, pools


def _segment(
    segment: dict[str, Any],
    blocks: Sequence[Any],
    live: dict[int, Block],
    stacks: Stacks | None,
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
    return Span(start, at, stream, kind == "small", expandable, pool_id != _NO_POOL), pool_id


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


@dataclass(slots=True)
class _Event:
    """An entry of the history, checked."""

    action: str
    address: int
    size: int
    stream: int
    is_private: bool
    #: What the frames say (see `releases.py`), if the entry frees a segment.
    named: int = NO_FRAMES
    time_us: int = 0
    stack: int = 0
    owner: int = 0


class _Entries:
    """Checks the entries of a history, and numbers what many of them share."""

    def __init__(self, stacks: Stacks | None, owners: Owners) -> None:
        self._stacks, self._owners = stacks, owners
        #: What each list of frames says, for the lists that were looked at.
        self._said: dict[int, int] = {}

    def event(self, entry: Any, where: str, number: int) -> _Event:
        """`where` names the history, and `number` is the index of the entry in it."""
        if not isinstance(entry, dict):
            _dict(entry, f"{where}[{number}]")
        action = entry.get("action")
        if type(action) is not str:
            raise TraceError(f"{where}[{number}]['action'] is {shown(action)}: a text is expected")
        event = _Event(action, 0, 0, 0, False)
        if action in _CHECKED:
            self._check(event, entry, where, number)
        time_us = entry.get("time_us", 0)
        event.time_us = time_us if type(time_us) is int and 0 <= time_us < TOP else 0
        if self._stacks is not None:
            event.stack = self._stacks.number_of(entry.get("frames"))
        event.owner = self._owners.number_of(entry.get("user_metadata"))
        return event

    def _check(self, event: _Event, entry: dict[str, Any], where: str, number: int) -> None:
        name = "device_free" if event.action == OOM else "addr"
        address: Any = entry.get(name)
        size: Any = entry.get("size")
        stream: Any = entry.get("stream", 0)
        if not (
            type(address) is type(size) is type(stream) is int
            and 0 <= address < TOP
            and 0 <= size < TOP
            and -TOP <= stream < TOP
        ):
            where = f"{where}[{number}]"
            _number(address, f"{where}['{name}']")
            _number(size, f"{where}['size']")
            _number(stream, f"{where}['stream']", low=-TOP)
        if address + size > TOP and event.action != OOM:
            raise TraceError(f"{where}[{number}] ends beyond all addresses")
        event.address, event.size, event.stream = address, size, stream
        pool_id = entry.get("pool_id", _NO_POOL)
        if pool_id is not _NO_POOL:
            event.is_private = _pool(pool_id, f"{where}[{number}]['pool_id']") != _NO_POOL
        if event.action in GOES:
            frames = entry.get("frames")
            if id(frames) not in self._said:
                self._said[id(frames)] = what_frames_say(frames)
            event.named = self._said[id(frames)]


def _consumed(entries: _Entries, recording: _Recording) -> list[_Event]:
    """The history, checked. Each entry of the file is dropped as soon as it is read, so that both
    are never in memory as a whole."""
    read = recording.entries
    events: list[_Event] = []
    for number, entry in enumerate(read):
        events.append(entries.event(entry, recording.where, number))
        if type(read) is list:
            read[number] = None
    recording.entries = ()
    return events


def _before(events: list[_Event], final: list[Span]) -> tuple[list[Span], int]:
    """The segments before the history, and how many entries about segments contradict it."""
    spans = Spans(final)
    wrong = 0
    for event in reversed(events):
        if event.action in (SEGMENT_ALLOC, SEGMENT_MAP):
            wrong += not spans.cut(event.address, event.size, event.action == SEGMENT_MAP)
        elif event.action in (SEGMENT_FREE, SEGMENT_UNMAP) and event.size:
            wrong += not spans.add(
                Span(
                    event.address,
                    event.address + event.size,
                    event.stream,
                    event.size <= SMALL_SEGMENT,
                    event.action == SEGMENT_UNMAP,
                    event.is_private,
                )
            )
    return spans.all(), wrong


def _live_before(events: list[_Event], final: dict[int, Block]) -> dict[int, Block]:
    """The blocks that the history frees without allocating them first, and those that are live at
    the end and never mentioned. The file contains the block's size only for the latter."""
    found: dict[int, Block] = {}
    mentioned = set()
    for event in events:
        if event.action in (ALLOC, FREE_COMPLETED) and event.address not in mentioned:
            mentioned.add(event.address)
            if event.action == FREE_COMPLETED:
                found[event.address] = Block(event.address, event.size, event.stream)
    for address, block in final.items():
        if address not in mentioned:
            found[address] = block
    return found


def _converted(
    recording: _Recording, rules: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    owners = Owners()
    entries = _Entries(recording.stacks, owners)
    events = _consumed(entries, recording)
    spans, wrong = _before(events, recording.spans)
    before = _live_before(events, recording.blocks)
    sizes = Sizes(recording.settings)
    columns = Columns()
    history = ((event.action, event.address, event.size) for event in events)
    layout = lay_out(spans, before, history, sizes, columns)
    first = len(columns)
    releases = Releases(
        events,
        spans,
        columns.live_between,
        lambda address: address + sizes.rounded(columns.live[address].size),
        sizes.large_page,
        recording.settings.get("release_lock_on_cudamalloc") is True,
    )
    player = _Player(columns, recording, layout.segments, releases)
    for event in events:
        player.play(event)
    player.finish()
    streams = columns.streams
    if len(streams) > MOST_STREAMS:
        raise TraceError(f"it has {len(streams)} streams: at most {MOST_STREAMS} are read")
    repairs = player.repairs
    repairs["segment_events_contradicting"] += wrong
    repairs["allocations_before_outside_segments"] += layout.outside
    repairs["allocations_before_left_out"] += layout.left_out
    meta = {
        "source": "PyTorch memory snapshot",
        "torch": {
            "device": recording.device,
            "streams": list(streams),
            "settings": recording.settings,
            "first_recorded_event": first,
            "addresses": columns.addresses.tolist(),
            "segments": player.segments,
            "segment_events": player.segment_events,
            "oom": player.refused,
            "pools": recording.pools,
            "waiting_at_the_end": sum(block.waiting for block in recording.blocks.values()),
            "frees_completed_later": player.later,
            "private_pool_allocations": player.private
            + sum(span.is_private for span in layout.filled),
            "segments_not_exact": layout.inexact,
            "blocks_of_unsure_size": layout.unsure,
            "repairs": {name: count for name, count in sorted(repairs.items()) if count},
            "releases_unsure": releases.unsure,
            "unknown_actions": dict(player.unknown.most_common(16)),
        },
    }
    return _arrays(columns, events, before, recording.stacks, owners, rules), meta


def _arrays(
    columns: Columns,
    events: list[_Event],
    before: dict[int, Block],
    stacks: Stacks | None,
    owners: Owners,
    rules: Mapping[str, str],
) -> dict[str, Any]:
    """The arguments of the constructor of a trace. An event without an entry has the time of the
    first entry if it is before the history, or of the entry before it if it is a repair."""
    import numpy as np

    entry = np.array(columns.entries, np.int64)
    op, number = np.array(columns.op, np.uint8), np.array(columns.id, np.int64)
    # The additional last element is for events without an entry: index -1 finds it.
    times = np.array([*(event.time_us for event in events), 0], np.uint64)
    times[-1] = times[0]
    stack = np.array([*(event.stack for event in events), 0], np.uint32)[entry]
    owner = np.array([*(event.owner for event in events), 0], np.uint16)[entry]
    for at, address in enumerate(columns.addresses):
        if entry[at] >= 0:
            break
        block = before.get(address) if op[at] == 0 else None
        if block is not None:
            stack[at] = block.stack
    made = op == 0
    if stacks is not None:
        used = set(np.unique(stack[made & (owner == 0)]).tolist())
        by_stack = owners.of_stacks(stacks, used, rules)
        owner = np.where(owner == 0, by_stack[stack], owner)
    of_allocation = np.zeros(int(number.max(initial=-1)) + 1, np.uint16)
    of_allocation[number[made]] = owner[made]
    arrays = {
        "op": op,
        "id": number,
        "size": np.array(columns.size, np.uint64),
        "stream": np.array(columns.stream, np.int64),
        "time_us": times[entry] if times.any() else None,
    }
    if len(owners.numbers) > 1:
        arrays["owner"] = np.where(op == 2, 0, of_allocation[number]) if len(op) else number
        arrays["owners"] = list(owners.numbers)
    if stacks is not None and len(stacks) > 1:
        table = np.empty((len(stacks), 2), np.uint32)
        stacks.fill(table)
        arrays |= {"stack": stack, "stacks": table, "frames": stacks.rows}
    return arrays


@dataclass
class _Player:
    """Turns the history into events. Contradictions in it are repaired, and each repair is
    counted."""

    columns: Columns
    recording: _Recording
    #: [event, address, size] of each segment that was taken, with the event that follows.
    segments: list[list[int]]
    releases: Releases
    segment_events: list[list[Any]] = field(default_factory=list)
    refused: list[list[int]] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    #: The number of blocks whose free_completed does not follow free_requested at once: other
    #: streams used them.
    later: int = 0
    private: int = 0
    at: int = 0
    asked: dict[int, int] = field(default_factory=dict)

    def play(self, event: _Event) -> None:
        self.columns.entry = self.at
        self.at += 1
        action = event.action
        if action == ALLOC:
            self._allocate(event)
        elif action == FREE_REQUESTED:
            if event.address in self.columns.live:
                self.asked[event.address] = self.at
            else:
                self.repairs["frees_requested_of_unknown"] += 1
        elif action == FREE_COMPLETED:
            self._free(event)
        elif action in SEGMENT_ACTIONS:
            self._segment(event)
        elif action == OOM:
            self.refused.append([len(self.columns), event.size, event.address])
        elif action not in _WITHOUT_EFFECT:
            self.unknown[action[:40].encode("ascii", "backslashreplace").decode()] += 1

    def _allocate(self, event: _Event) -> None:
        end = event.address + max(event.size, 1)
        for address in self.columns.live_between(event.address, end):
            self._free_unseen(address)
        self.columns.allocate(event.address, event.size, event.stream)
        self.private += event.is_private

    def _free(self, event: _Event) -> None:
        if event.address not in self.columns.live:
            self.repairs["frees_of_unknown"] += 1
            return
        self.columns.free(event.address)
        self.later += self.asked.pop(event.address, self.at - 1) != self.at - 1

    def _free_unseen(self, address: int) -> None:
        """A free that is missing from the history."""
        self.columns.free(address)
        self.asked.pop(address, None)
        self.repairs["frees_added"] += 1

    def _segment(self, event: _Event) -> None:
        now = [event.action, len(self.columns), event.address, event.size, event.stream]
        if event.action in (SEGMENT_FREE, SEGMENT_UNMAP):
            for address in self.columns.live_between(event.address, event.address + event.size):
                self._free_unseen(address)
            now[1] = len(self.columns)
        elif event.action == SEGMENT_ALLOC:
            self.segments.append([len(self.columns), event.address, event.size])
        self.segment_events.append(now)
        if self.releases.follow(self.at - 1, event):
            self.columns.release()

    def finish(self) -> None:
        """Adds frees and allocations, so that exactly the blocks that the file shows are live."""
        final, spans = self.recording.blocks, Spans(self.recording.spans)
        for address in sorted(self.columns.live):
            block = final.get(address)
            if block is not None and block.requested == self.columns.live[address].size:
                continue
            end = address + max(self.columns.live[address].size, 1)
            if block is None and not spans.overlap(address, end):
                self.repairs["live_outside_segments"] += 1
            else:
                self._free_unseen(address)
        for address in sorted(final.keys() - self.columns.live.keys()):
            self.columns.allocate(address, final[address].requested, final[address].stream)
            self.repairs["allocations_added"] += 1
