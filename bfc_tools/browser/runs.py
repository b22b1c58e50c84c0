"""One run over time: as it was recorded, or replayed under a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.pytorch.words import SEGMENT_ALLOC, SEGMENT_CHANGES
from bfc.trace import Occupancy, Trace
from bfc.trace.timeline import sampled
from bfc.units import format_bytes, printable
from bfc_tools.browser.encoding import packed
from bfc_tools.browser.lifetimes import Lives
from bfc_tools.browser.painted import Groups, paint
from bfc_tools.browser.segments import with_blocks
from bfc_tools.study import recorded_settings
from bfc_tools.study.counting import Counted
from bfc_tools.study.experiment import Policy
from bfc_tools.study.python_policy import PythonPolicy
from bfc_tools.study.segments import Segments, of_recording, of_snapshot, streams_at_start

#: The most samples of a timeline; and the cells of a map, which has at most so many ranges.
SAMPLES = 4_000
COLUMNS, ROWS = 1_200, 512
MOST_RANGES = 4_000
#: The most streams that are looked for in the rows of a map.
MOST_STREAMS = 64
#: The step between two shades of a cell: fewer shades take less room.
SHADE = 8
#: No address and no size of a device reaches this.
TOP = 1 << 60
#: The most entries on sleep that a page has.
MOST_SLEEPS = 400


@dataclass(frozen=True)
class Limits:
    """How much of a run a page can hold."""

    samples: int  # the most rows of its timeline
    segments: int  # the most segments


@dataclass(frozen=True, eq=False)
class Run:
    """One run, and where it placed what."""

    #: Of each event's allocation; 0 for one that was refused, and for other events.
    addresses: NDArray[np.uint64]
    figures: dict[str, Any]  # an entry of "runs" (`bfc_tools.browser.data`)


@dataclass(frozen=True, eq=False)
class Subject:
    """A trace, its allocations, and its bytes over time: every run of it needs them."""

    name: str  # what the page calls it
    trace: Trace
    #: The trace without owners: a replay would give each of their names a number of this process,
    #: which it keeps for good.
    bare: Trace
    lives: Lives
    groups: Groups  # what its allocations belong to
    live: NDArray[np.int64]  # the bytes that are live after each event
    #: The event after which most is live, and after which segments are shown; -1 for an empty
    #: trace.
    peak: int


def replayed(
    subject: Subject, policy: Policy, make_source: Callable[[], Counted], limits: Limits
) -> Run:
    """A run of a trace on a new allocator. Cost: two replays, the second up to the peak."""
    trace, bare = subject.trace, subject.bare
    with policy.make_allocator(make_source()) as allocator:
        result = bare.replay(allocator, samples=limits.samples)
        remarks = _of_plan(allocator)
    timeline = result.timeline
    assert timeline is not None
    columns = {
        name: getattr(timeline, name).astype("int64")
        for name in ("live", "in_use", "reserved", "largest_free", "refused", "driver_calls")
    }
    with policy.make_allocator(make_source()) as allocator:
        bare[: subject.peak + 1].replay(allocator)
        held = of_snapshot(allocator.snapshot())
    refused = (trace.op == 0) & (trace.size > 0) & (result.addresses == 0) & ~trace._gaps()
    return _run(
        subject,
        result.addresses,
        timeline.event.astype("int64"),
        columns,
        held,
        limits,
        label=policy.name,
        origin="replayed",
        policy=policy.name.partition(":")[0],
        settings=policy.name.partition(":")[2],
        refusals=result.failed,
        first_refusal=int(refused.argmax()) if result.failed else -1,
        driver_calls=int(columns["driver_calls"][-1]) if len(timeline) else 0,
        peak_reserved=result.peak_bytes_reserved,
        remarks=remarks,
    )


def _of_plan(allocator: Allocator | PythonPolicy) -> list[str]:
    """How a run has followed the plan of its allocator, if it has one."""
    stats = allocator.plan_stats() if isinstance(allocator, Allocator) else {}
    if "hits" not in stats:
        return []
    asked = stats["hits"] + stats["guests"] + stats["side"]
    text = (
        f"its plan takes {format_bytes(stats['span'])}; of {asked} requests {stats['hits']} had a "
        f"place in it, {stats['guests']} were put into its gaps, and {stats['side']} were served "
        f"beside it; {stats['departed_steps']} of {stats['steps']} steps did not follow it"
    )
    first = stats["first_departure"]
    if first is None:
        return [text]
    text += f", the first of them {first['kind']} {first['step']}"
    if first["request"] is None:
        return [text]
    text += f", with its request {first['request']} of {format_bytes(first['size'])}"
    if first["place_size"] not in (None, first["size"]):
        text += f" where {format_bytes(first['place_size'])} were planned"
    return [text]


def is_recorded(trace: Trace) -> bool:
    """Whether `as_recorded` may find a run in a trace."""
    return recorded_settings.read(trace).peak_reserved is not None and len(trace) > 0


def as_recorded(subject: Subject, limits: Limits) -> Run | None:
    """The run that a snapshot of PyTorch recorded, at the addresses and with the segments that it
    had; None if the trace does not say. It lacks what no recording has: the bytes in use with their
    rounding, and free blocks."""
    trace = subject.trace
    said = recorded_settings.read(trace)
    if said.peak_reserved is None or not is_recorded(trace):
        return None
    try:
        found = _of_torch(subject, trace.meta["torch"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, TraceError):
        return None  # a meta of somebody else's, or that was damaged
    addresses, reserved, calls, refusals, held = found
    asleep = _asleep(trace)
    at = sampled((subject.live, reserved), limits.samples)
    columns = {"live": subject.live[at], "reserved": reserved[at], "driver_calls": calls[at]}
    if asleep:
        columns["asleep"] = np.array(_sleeping(asleep, len(trace)), np.int64)[at]
        columns["reserved"] = np.maximum(columns["reserved"] - columns["asleep"], 0)
    return _run(
        subject,
        addresses,
        at,
        columns,
        held,
        limits,
        label="as recorded",
        origin="recorded",
        policy="caching",
        settings=recorded_settings.shown(said.settings or ""),
        refusals=len(refusals),
        first_refusal=min(refusals, default=-1),
        driver_calls=int(calls[-1]),
        peak_reserved=said.peak_reserved,
        asleep=asleep[:MOST_SLEEPS],
        remarks=[*said.remarks, *said_of_sleep(trace)],
    )


def _asleep(trace: Trace) -> list[list[Any]]:
    """When tags fell asleep and woke: [event, bytes that sleep more, tag]. Empty where a meta does
    not say so in rising order."""
    try:
        rows = trace.meta["torch"].get("asleep", ())
        found: list[list[Any]] = [[int(at), int(change), str(tag)] for at, change, tag in rows]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    events = [row[0] for row in found]
    whole = events == sorted(events) and all(0 <= event <= len(trace) for event in events)
    return found if whole and all(abs(row[1]) < TOP for row in found) else []


def _sleeping(asleep: list[list[Any]], events: int) -> NDArray[np.int64]:
    """The bytes that sleep at each event. A history may begin when some sleep already."""
    changes = np.zeros(events + 1, np.int64)
    for event, change, _tag in asleep:
        changes[event] += change
    sums = np.cumsum(changes)
    return (sums - np.minimum.accumulate(np.minimum(sums, 0)))[:events]


def said_of_sleep(trace: Trace) -> list[str]:
    """A remark on each tag that slept while a trace was recorded."""
    said, asleep = [], _asleep(trace)
    for tag in dict.fromkeys(row[2] for row in asleep):
        changes = [change for _event, change, its in asleep if its == tag]
        slept = sum(change > 0 for change in changes)
        if slept:
            left = sum(changes)
            now = f", and {format_bytes(left)} sleep at the end" if left > 0 else ""
            times = "once" if slept == 1 else f"{slept} times"
            said.append(f"tag {printable(tag)} slept {times}, {format_bytes(max(changes))}{now}")
    return said


def _of_torch(subject: Subject, torch: dict[str, Any]) -> tuple[Any, ...]:
    """The addresses; the bytes in segments and the calls so far after each event; the events that
    were refused; and the segments at the peak. Raises what a meta of the wrong shape does."""
    trace = subject.trace
    addresses = np.array(torch["addresses"], np.uint64)
    if addresses.shape != (len(trace),):
        raise ValueError("not one address for each event")
    if int(addresses.max()) >= TOP:
        raise ValueError("an address beyond all memory")
    changes = torch["segment_events"]
    sizes = [int(row[2]) for row in torch["segments"]]
    spans = [row[1:3] for row in torch["segments"]] + [row[2:4] for row in changes]
    if not all(0 <= address < TOP and 0 <= size < TOP for address, size in spans):
        raise ValueError("a segment beyond all memory")
    taken = sum(change[0] == SEGMENT_ALLOC for change in changes)
    start = sum(sizes[: len(sizes) - taken])
    event = np.array([change[1] for change in changes], np.int64)
    change = [SEGMENT_CHANGES.get(change[0], 0) * int(change[3]) for change in changes]
    if len(event) and ((event[1:] < event[:-1]).any() or event[0] < 0):
        raise ValueError("the entries about segments are not in order")
    held = of_recording(torch, subject.peak, streams_at_start(trace, addresses))
    refusals = [int(row[0]) for row in torch.get("oom", ())]
    addresses[trace._gaps()] = 0
    after = start + np.cumsum(np.array(change, np.int64))
    upto = np.searchsorted(event, np.arange(len(trace)), side="right")
    reserved = np.concatenate([[start], after])[upto]
    # What comes and goes before one event is seen at that event.
    inside = np.flatnonzero(event < len(trace))
    np.maximum.at(reserved, event[inside], after[inside])
    return addresses, reserved, upto, refusals, held


def _run(
    subject: Subject,
    addresses: NDArray[np.uint64],
    events: NDArray[np.int64],
    columns: dict[str, NDArray[np.int64]],
    held: Segments,
    limits: Limits,
    **figures: Any,
) -> Run:
    """The parts that all runs have."""
    live, time = columns["live"], subject.trace.time_us
    top = int(live.argmax()) if len(live) else -1
    there = subject.lives.live_after(subject.peak)
    born = subject.lives.born[there]
    said: dict[str, Any] = {
        **figures,
        "completed": not figures["refusals"],
        "events": len(subject.trace),
        "peak_live": int(live[top]) if len(live) else 0,
        "peak_event": int(events[top]) if len(live) else -1,
        "timeline": {
            "event": events.tolist(),
            "time_us": None if time is None else time[events].tolist(),
            **{name: values.tolist() for name, values in columns.items()},
        },
        "map": map_of(subject, addresses),
        "segments": with_blocks(
            held,
            addresses[born],
            subject.lives.size[there],
            subject.lives.owner[there],
            limits.segments,
        ),
    }
    return Run(addresses, said)


def map_of(subject: Subject, addresses: NDArray[np.uint64]) -> dict[str, Any] | None:
    """The map of a run (`bfc_tools.browser.data`); None if nothing has an address."""
    if not addresses.any():
        return None
    trace, lives = subject.trace, subject.lives
    found = trace.occupancy(addresses, columns=COLUMNS, rows=ROWS)
    cells = found.cells.T
    shades = (np.rint(cells * (256 // SHADE)) * SHADE).clip(0, 255).astype(np.uint8)
    shades[(shades == 0) & (cells > 0)] = 1
    return {
        "columns": cells.shape[1],
        "rows": cells.shape[0],
        "ends": found.ends.tolist(),
        "ranges": [list(pair) for pair in found.ranges[:MOST_RANGES]],
        "ranges_left_out": max(0, len(found.ranges) - MOST_RANGES),
        "row_bytes": found.cell_bytes,
        "row_stream": _streams_of_rows(trace, addresses, found, cells.shape[0]),
        "fill": packed(shades),
        "paint": paint(found, subject.groups.shades(lives), lives, addresses[lives.born]),
    }


def _streams_of_rows(
    trace: Trace, addresses: NDArray[np.uint64], found: Occupancy, rows: int
) -> list[int]:
    """The stream that has allocated most often where each row lies; -1 where none has."""
    starts = np.array([start for start, _ in found.ranges], np.uint64)
    sizes = np.array([size for _, size in found.ranges], np.uint64)
    laid = np.cumsum(sizes) - sizes
    there = np.flatnonzero((trace.op == 0) & (addresses > 0) & (trace.size > 0))
    at = np.searchsorted(starts, addresses[there], side="right") - 1
    begin = laid[at] + (addresses[there] - starts[at])
    cell = np.uint64(found.cell_bytes)
    first = (begin // cell).astype(np.int64)
    last = ((begin + trace.size[there] - np.uint64(1)) // cell).astype(np.int64)
    busiest = np.argsort(-np.bincount(trace.stream[there]), kind="stable")[:MOST_STREAMS]
    most, best = np.zeros(rows, np.int64), np.full(rows, -1)
    for stream in busiest.tolist():
        mine = trace.stream[there] == stream
        change = np.bincount(first[mine], minlength=rows + 1)
        change -= np.bincount(last[mine] + 1, minlength=rows + 1)
        count = np.cumsum(change)[:rows]
        best[count > most] = stream
        most = np.maximum(most, count)
    streams: list[int] = best.tolist()
    return streams
