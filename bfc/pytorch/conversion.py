"""The history of an allocator as the events of a trace, and what was live before it.

A history may have lost its beginning (section 3.6 of the description). A block was live before it
if the history frees it without allocating it first, or if it is live at the end and never
mentioned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.pytorch._recording import Event, Pools, Stacks
from bfc.pytorch.layout import Block, Columns, Layout, Sizes, Span, Spans, lay_out
from bfc.pytorch.owners import Owners
from bfc.pytorch.pools import PoolMarks
from bfc.pytorch.releases import GOES, PREPARES, Releases
from bfc.pytorch.sizes import SMALL_SEGMENT
from bfc.pytorch.version import UNTOLD, Version
from bfc.pytorch.words import (
    ALLOC,
    ANNOTATE,
    BLOCK_ACTIONS,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    OUR_TAGS,
    POOL_MARKS,
    SEGMENT_ACTIONS,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SLEEPS,
    SNAPSHOT,
    WAKES,
)

MOST_STREAMS = 1 << 16
_WITHOUT_EFFECT = (SNAPSHOT, ANNOTATE)
_WITH_AN_ADDRESS = (*BLOCK_ACTIONS, SEGMENT_ALLOC, SEGMENT_MAP)


@dataclass
class Recording:
    """What is known of one device at the end of a history."""

    device: int
    spans: list[Span]
    blocks: dict[int, Block]
    settings: dict[str, Any]
    #: None where frames are left out.
    stacks: Stacks | None
    #: The address, the bytes and the two numbers of the pool of each segment of a private pool.
    pools: list[list[int]]
    #: The numbers of the private pools.
    table: Pools
    #: Whether pages may lie at other addresses than those at which the history takes them, and
    #: gives them back. Then its bytes are right, but its addresses may contradict each other.
    moves_pages: bool = False
    #: What the file says of the version that wrote it.
    version: Version = UNTOLD


def in_order(spans: list[Span]) -> list[Span]:
    """Segments by address. Raises TraceError if two overlap."""
    found = sorted(spans, key=lambda span: span.start)
    for before, after in pairwise(found):
        if after.start < before.end:
            raise TraceError(f"the segments at {before.start:#x} and {after.start:#x} overlap")
    return found


class _UntoldPools:
    """Finds the pools of entries that do not name them, from the last entry to the first.

    A segment that is there at the end says its pool. One that went is in the pool of the segments
    of its stream that are there at the end, if they are all in one private pool: PyTorch captures
    on a stream of its own. But it is not if it was taken before the capture began, by the call that
    begins it, or if something was allocated from the pool later: while a pool is in use its
    segments stay (PyTorch's behaviour, 2.13).
    """

    def __init__(self, spans: list[Span], events: list[Event]) -> None:
        pools: dict[int, set[int]] = {}
        for span in spans:
            pools.setdefault(span.stream, set()).add(span.pool)
        self._of_stream = {stream: min(its) for stream, its in pools.items() if len(its) == 1}
        self._used: set[int] = set()
        #: The entries about segments that go, and were taken before a capture.
        self._outside: set[int] = set()
        outside: set[int] = set()
        for event in events:
            if event.action in GOES and event.address in outside:
                outside.discard(event.address)
                self._outside.add(id(event))
            elif event.action in (SEGMENT_ALLOC, SEGMENT_MAP) and event.named == PREPARES:
                outside.add(event.address)

    def put_in_pool(self, event: Event, spans: Spans) -> None:
        """Gives an entry the number of its pool. `spans` are the segments after it."""
        if event.action in _WITH_AN_ADDRESS:
            span = spans.holding(event.address)
            event.put_in_pool(0 if span is None else span.pool)
            if event.action == ALLOC:
                self._used.add(event.pool)
        elif event.action in GOES:
            pool = self._of_stream.get(event.stream, 0)
            is_outside = pool in self._used or id(event) in self._outside
            event.put_in_pool(0 if is_outside else pool)


def _before(
    events: list[Event], recording: Recording, live: dict[int, Block]
) -> tuple[list[Span], int]:
    """The segments before the history, and how many entries about segments contradict it.

    Entries of older versions may not name their pools: then these get the number of their pool, as
    far as the end says it."""
    spans = Spans(recording.spans)
    wrong = change = 0
    are_told = not recording.pools or any(event.pool for event in events)
    untold = None if are_told else _UntoldPools(recording.spans, events)
    for event in reversed(events):
        if untold is not None:
            untold.put_in_pool(event, spans)
        if event.action in (SEGMENT_ALLOC, SEGMENT_MAP):
            change += event.size
            wrong += not spans.cut(event.address, event.size, event.action == SEGMENT_MAP)
        elif event.action in (SEGMENT_FREE, SEGMENT_UNMAP) and event.size:
            change -= event.size
            wrong += not spans.add(
                Span(
                    event.address,
                    event.address + event.size,
                    event.stream,
                    event.size <= SMALL_SEGMENT,
                    event.action == SEGMENT_UNMAP,
                    event.pool,
                )
            )
    found = list(spans.all())
    total = sum(span.size for span in recording.spans) - change
    if wrong and recording.moves_pages and total >= 0:
        return _cut_to(found, total, live), 0
    return found, wrong


def _cut_to(spans: list[Span], total: int, live: dict[int, Block]) -> list[Span]:
    """Segments of so many bytes in all. Those in which nothing is live are cut first."""
    lookup, over = Spans(spans), sum(span.size for span in spans) - total
    used = {span.start for address in live if (span := lookup.holding(address)) is not None}
    kept = []
    for span in sorted(spans, key=lambda span: (span.start in used, span.start)):
        gone = min(max(over, 0), span.size)
        over -= gone
        if gone < span.size:
            kept.append(replace(span, end=span.end - gone))
    if over < 0:
        start = max((span.end for span in spans), default=0)
        kept.append(Span(start, start - over, 0, False, True, 0))
    return sorted(kept, key=lambda span: span.start)


def _live_before(events: list[Event], final: dict[int, Block]) -> dict[int, Block]:
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


def converted(
    recording: Recording, events: list[Event], owners: Owners, rules: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the constructor of a trace, and the `meta` of `Trace.from_torch`.
    `recording` is what is there at the end, and `events` the history, oldest first, which is
    emptied; `rules` are the owners by parts of a file's path."""
    before = _live_before(events, recording.blocks)
    spans, wrong = _before(events, recording, before)
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
    marks = PoolMarks(events, len(recording.table) > 1)
    player = _Player(columns, recording, layout.segments, releases, marks)
    player.begin(spans)
    for event in events:
        player.play(event)
    player.finish()
    if len(columns.streams) > MOST_STREAMS:
        raise TraceError(f"it has {len(columns.streams)} streams: at most {MOST_STREAMS} are read")
    repairs = player.repairs
    repairs["segment_events_contradicting"] += wrong
    repairs["allocations_before_outside_segments"] += 0 if recording.moves_pages else layout.outside
    repairs["allocations_before_left_out"] += layout.left_out
    meta = {
        "source": "PyTorch memory snapshot",
        "torch_version": recording.version.rules,
        "torch_version_sign": recording.version.sign,
        "torch": {"first_recorded_event": first, **_facts(player, layout, spans)},
    }
    arrays = _arrays(columns, events, before, recording.stacks, owners, rules)
    return arrays | _pools_of(columns, recording.table, marks.rows), meta


def _facts(player: _Player, layout: Layout, spans: list[Span]) -> dict[str, Any]:
    """What `meta["torch"]` says beside the number of the events that rebuild the beginning."""
    recording, columns, repairs = player.recording, player.columns, player.repairs
    return {
        "device": recording.device,
        "streams": list(columns.streams),
        "settings": recording.settings,
        "addresses": columns.addresses.tolist(),
        "segments": player.segments,
        "segment_events": player.segment_events,
        "registered": player.registered(spans),
        "asleep": player.asleep,
        "oom": player.refused,
        "oom_calls": player.refused_calls,
        "pools": recording.pools,
        "pool_segments": player.pool_segments,
        "waiting_at_the_end": sum(block.waiting for block in recording.blocks.values()),
        "frees_completed_later": player.later,
        "private_pool_allocations": player.private + sum(span.pool > 0 for span in layout.filled),
        "segments_not_exact": layout.inexact,
        "blocks_of_unsure_size": layout.unsure,
        "repairs": {name: count for name, count in sorted(repairs.items()) if count},
        "releases_unsure": player.releases.unsure,
        "unknown_actions": dict(player.unknown.most_common(16)),
    }


def _pools_of(columns: Columns, table: Pools, marks: list[list[int]]) -> dict[str, Any]:
    """The arguments of the constructor of a trace about private pools. Those of bfc's tags are left
    out: what allocates from them is no part of a program, and a replay has no tags."""
    kept = sorted(pool_id for pool_id in table.ids if pool_id[0] != OUR_TAGS)
    if len(kept) == 1:
        return {}
    numbers = {pool_id: number for number, pool_id in enumerate(kept)}
    number = np.array([numbers.get(pool_id, 0) for pool_id in table.ids])
    return {
        "pool": number[np.array(columns.pool, np.int64)],
        "pools": kept,
        "pool_marks": [
            [event, mark, int(number[at]), columns.streams[stream]]
            for event, mark, at, stream in marks
            if number[at] and stream in columns.streams  # else the stream has no memory
        ],
    }


def _arrays(
    columns: Columns,
    events: list[Event],
    before: dict[int, Block],
    stacks: Stacks | None,
    owners: Owners,
    rules: Mapping[str, str],
) -> dict[str, Any]:
    """The arguments of the constructor of a trace. An event without an entry has the time of the
    first entry if it is before the history, or of the entry before it if it is a repair."""
    entry = np.array(columns.entries, np.int64)
    op, number = np.array(columns.op, np.uint8), np.array(columns.id, np.int64)

    def of_entries(name: str, dtype: type) -> NDArray[Any]:
        # The additional last element is for events without an entry: index -1 finds it.
        values = chain(map(attrgetter(name), events), (0,))
        return np.fromiter(values, dtype, len(events) + 1)

    times = of_entries("time_us", np.uint64)
    times[-1] = times[0]
    stack, owner = of_entries("stack", np.uint32)[entry], of_entries("owner", np.uint16)[entry]
    events.clear()
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
    recording: Recording
    #: [event, address, size] of each segment that was taken, with the event that follows.
    segments: list[list[int]]
    releases: Releases
    marks: PoolMarks
    segment_events: list[list[Any]] = field(default_factory=list)
    #: [event, address, bytes, *id] of what was taken for private pools; the event is -1 for what
    #: was there before the history.
    pool_segments: list[list[int]] = field(default_factory=list)
    refused: list[list[int]] = field(default_factory=list)
    #: Of each of these [segment entries before it, stack, stream, *id of its pool].
    refused_calls: list[list[int]] = field(default_factory=list)
    #: [event, bytes that sleep more, tag] of each tag that fell asleep, or woke.
    asleep: list[list[Any]] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    #: The number of blocks whose free_completed does not follow free_requested at once: other
    #: streams used them.
    later: int = 0
    private: int = 0
    at: int = 0
    asked: dict[int, int] = field(default_factory=dict)

    def begin(self, spans: list[Span]) -> None:
        """Notes which of the segments from before the history are those of private pools."""
        for span in spans:
            if span.pool:
                pool_id = self.recording.table.id_of(span.pool)
                self.pool_segments.append([-1, span.start, span.size, *pool_id])

    def play(self, event: Event) -> None:
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
        elif action in POOL_MARKS:
            self.marks.mark(len(self.columns), action, event.pool, event.stream)
        elif action.startswith((SLEEPS, WAKES)):
            is_asleep, tag = action.startswith(SLEEPS), action.partition(": ")[2].partition(": ")[2]
            change = event.size if is_asleep else -event.size
            self.asleep.append([len(self.columns), change, tag])
        elif action == OOM:
            pool_id = self.recording.table.id_of(event.pool)
            call = [len(self.segment_events), event.stack, event.stream, *pool_id]
            self.refused_calls.append(call)
            self.refused.append([len(self.columns), event.size, event.address])
        elif action not in _WITHOUT_EFFECT:
            self.unknown[action[:40].encode("ascii", "backslashreplace").decode()] += 1

    def _allocate(self, event: Event) -> None:
        end = event.address + max(event.size, 1)
        for address in self.columns.live_between(event.address, end):
            self._free_unseen(address)
        self.columns.allocate(event.address, event.size, event.stream, event.pool)
        self.private += event.pool > 0
        self.marks.allocated(event.pool)

    def _free(self, event: Event) -> None:
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

    def _segment(self, event: Event) -> None:
        now = [event.action, len(self.columns), event.address, event.size, event.stream]
        if event.action in (SEGMENT_FREE, SEGMENT_UNMAP) and not self.recording.moves_pages:
            for address in self.columns.live_between(event.address, event.address + event.size):
                self._free_unseen(address)
            now[1] = len(self.columns)
        elif event.action == SEGMENT_ALLOC:
            self.segments.append([len(self.columns), event.address, event.size])
        self.segment_events.append(now)
        if event.action in GOES:
            self.marks.went(len(self.columns), event.pool)
        elif event.pool:
            pool_id = self.recording.table.id_of(event.pool)
            self.pool_segments.append([len(self.columns), event.address, event.size, *pool_id])
        emptied = self.releases.follow(self.at - 1, event)
        if emptied is not None:
            for pool in self.marks.released(emptied):
                self.columns.release(pool)
        if self.releases.ends_at(self.at - 1):
            self.marks.run_ends()

    def registered(self, spans: list[Span]) -> list[list[int]]:
        """[address, bytes] of each segment and each range of addresses when the device first gave
        it, in that order. Those from before the history come first: their order is not known, and
        is that of their addresses. A range is new where no memory next to it was mapped."""
        known = [[span.start, span.size] for span in spans]
        mapped = Spans([span for span in spans if span.is_expandable])
        for action, _, address, size, stream in self.segment_events:
            if action == SEGMENT_ALLOC:
                known.append([address, size])
            elif action == SEGMENT_UNMAP:
                mapped.cut(address, size, in_part=True)
            elif action == SEGMENT_MAP:
                is_new = all(
                    next_to is None or next_to.stream != stream
                    for next_to in (mapped.holding(address - 1), mapped.holding(address + size))
                )
                known += [[address, size]] if is_new else []
                if not mapped.overlap(address, address + size):
                    mapped.add(Span(address, address + size, stream, False, True, 0))
        return known

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
            span = spans.holding(address)
            pool = 0 if span is None else span.pool
            self.columns.allocate(address, final[address].requested, final[address].stream, pool)
            self.repairs["allocations_added"] += 1
