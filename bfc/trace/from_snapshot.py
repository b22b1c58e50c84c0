"""A snapshot of an allocator as a trace: its history, or what it holds.

The rows of a snapshot say more than a file of PyTorch: they hold memory that sleeps, and blocks
that were stitched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.pytorch._recording import Event, Pools, Stacks
from bfc.pytorch.conversion import Recording, converted, in_order
from bfc.pytorch.layout import Block, Span
from bfc.pytorch.owners import Owners
from bfc.pytorch.releases import GOES, NO_FRAMES, what_frames_say
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.version import Version
from bfc.pytorch.words import ANNOTATE, OUR_FILE, OUR_OWN, SEGMENT_MAP, is_mark
from bfc.pytorch.writer import ordinal_of, settings_as_torch
from bfc.snapshots.columns import ASLEEP, CHUNK, IN_RANGE, RECORD, REGION, STATES

if TYPE_CHECKING:
    from bfc.snapshots.columns import HistoryColumns, RegionColumns
    from bfc.snapshots.snapshot import Snapshot

TOP = 1 << 64
#: The frames of memory that the allocator gave back on its own.
_OF_ITS_OWN = ((OUR_FILE, 0, OUR_OWN),)


def history_of(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run that the history of a snapshot recorded: the arguments of the constructor of a trace,
    and its `meta`, as of `Trace.from_torch`. Of a snapshot of one pool the entries of this pool are
    taken. Raises TraceError if its regions overlap, or end beyond all addresses; or if it has too
    many streams."""
    regions, history = snapshot._region_columns(), snapshot._history_columns()
    stacks = Stacks((regions, history))
    owners = Owners()
    recording = _recording(snapshot, regions, stacks)
    events = _events(history, stacks, owners, recording.table, snapshot._pool_id)
    recording.moves_pages = _moves_pages(regions, events)
    columns, meta = converted(recording, events, owners, {})
    meta["source"] = "bfc snapshot"
    return columns, meta


def _recording(snapshot: Snapshot, regions: RegionColumns, stacks: Stacks) -> Recording:
    """What there is at the end."""
    spans: list[Span] = []
    blocks: dict[int, Block] = {}
    pools: list[list[int]] = []
    table = Pools()
    chunks = list(CHUNK.iter_unpack(regions.chunks))
    first = 0
    for row in REGION.iter_unpack(regions.regions):
        start, size, stream, *pool, _, _, _, chunks_end, _, kind, flags = row
        if start + size > TOP:
            raise TraceError(f"the region at {start:#x} ends beyond all addresses")
        is_small, number = regions.kinds[kind] == "small", table.number_of((pool[0], pool[1]))
        spans.append(Span(start, start + size, stream, is_small, bool(flags & IN_RANGE), number))
        if number:
            pools.append([start, size, *pool])
        for number in range(first, chunks_end):
            ptr, nbytes, requested, _, its_stream, _, _, state, _, _ = chunks[number]
            if STATES[state] in ("in use", "waiting"):
                frames = regions.chunk_frames[number] if regions.chunk_frames else ()
                stack = stacks.number_of_frames(frames)
                is_waiting = STATES[state] == "waiting"
                blocks[ptr] = Block(ptr, requested, its_stream, nbytes, is_waiting, stack)
        first = chunks_end
    torch = snapshot.torch
    settings = settings_as_torch(snapshot.settings, torch or NEWEST)
    recording = Recording(
        ordinal_of(snapshot.device), in_order(spans), blocks, settings, stacks, pools, table
    )
    if torch is not None:
        recording.version = Version(torch, "the allocator follows its rules")
    return recording


def _events(
    history: HistoryColumns,
    stacks: Stacks,
    owners: Owners,
    table: Pools,
    pool_id: tuple[int, int] | None,
) -> list[Event]:
    """The entries of a history, or those of one pool. Their time never decreases."""
    events: list[Event] = []
    latest = 0
    for at, row in enumerate(RECORD.iter_unpack(history.records)):
        address, size, stream, *pool, time_us, _, action, owner = row
        if pool_id is not None and pool_id != (*pool,):
            continue
        latest = max(latest, time_us)
        frames: tuple[tuple[str, int, str], ...] = history.frames[at] if history.frames else ()
        named = NO_FRAMES
        if history.actions[action] in GOES:
            frames = frames or _OF_ITS_OWN
            named = what_frames_say([{"filename": row[0], "name": row[2]} for row in frames])
        said, name = history.actions[action], history.owners[owner]
        if said == ANNOTATE and is_mark(name):
            said, name = name, ""
        number = table.number_of((pool[0], pool[1]))
        event = Event(said, address, size, stream, number, named, latest)
        event.number(stacks.number_of_frames(frames), owners.number_of(name))
        events.append(event)
    return events


def _moves_pages(regions: RegionColumns, events: list[Event]) -> bool:
    """Whether the memory is, or may have been, stitched: its regions have pages with numbers."""
    flags = [row[-1] for row in REGION.iter_unpack(regions.regions)]
    is_mapped = any(flag & IN_RANGE and not flag & ASLEEP for flag in flags)
    return bool(regions.pages) or (
        not is_mapped and any(event.action == SEGMENT_MAP for event in events)
    )


def live_in(snapshot: Snapshot) -> tuple[dict[str, Any], NDArray[np.uint64], list[int]]:
    """The blocks of a snapshot that are in use, or wait for a stream, as allocations in the order
    in which they were made: the arguments of the constructor of a trace, the address of each
    event's allocation, and the handle of each of its streams."""
    chunks = sorted(snapshot.live_chunks(), key=lambda chunk: (chunk.allocation_id, chunk.ptr))
    stacks = Stacks(chunks)
    owners: dict[str, int] = {"": 0}
    streams: dict[int, int] = {0: 0}
    for region in snapshot.regions:
        streams.setdefault(region.stream, len(streams))
    columns: dict[str, Any] = {
        "op": np.zeros(len(chunks), np.uint8),
        "id": np.arange(len(chunks)),
        "size": np.array([chunk.requested_size for chunk in chunks], np.uint64),
        "stream": np.array(
            [streams.setdefault(chunk.stream, len(streams)) for chunk in chunks], np.int64
        ),
        "owner": np.array(
            [owners.setdefault(chunk.owner, len(owners)) for chunk in chunks], np.int64
        ),
        "stack": np.array([stacks.number_of_frames(chunk.frames) for chunk in chunks], np.int64),
        "owners": list(owners),
        "frames": stacks.rows,
    }
    columns["stacks"] = np.empty((len(stacks), 2), np.uint32)
    stacks.fill(columns["stacks"])
    return columns, np.array([chunk.ptr for chunk in chunks], np.uint64), list(streams)
