"""All that a page shows, as one value that JSON holds. Sizes are bytes, events are indices from 0,
addresses are integers, and -1 is "none" wherever an index is expected.

The keys
--------
format : 1
version : the version of bfc
title : text
kind : "trace", or "state" for an allocator, or a file, without a history. Of a state there is one
    moment, which is called the peak here, and "peak_reserved" is what is taken at that moment.
    "events" is 0, "peak_event" is -1, "timeline", "map" and "owners_over_time" are null, "died" is
    -1, and "born" rises in the order in which the blocks were made, where that is known.
events : the events of the first run
peak_event : the event after which most is live, the first of several; -1 if there are no events
peak_live : the bytes that are live then, as asked for. A request counts also if a policy refuses it
peak_reserved : the most bytes that the first run had taken from the device
ran_out : of each trace that ran out of memory as it was recorded, or predicted, what
    `bfc_tools.study.ran_out` says, with "trace", its name, and "sentence": the page begins with it
iterations : null for a state and where there are none; else of the first trace, as `bfc plan` finds
    them: source ("marks" or "structure"), sentence, which compares the first with the later ones,
    or "", rows, [[kind, begin, end, complete, agreement, allocations, peak_live, peak_event,
    live_after], ...] in the order of the run, as `bfc_tools.study.iterations` has them, at most
    400, and left_out: how many are not in the rows, which are the last
rebuilt : how many events at the beginning rebuild what was live when a recording began, else 0.
    The gaps between the blocks that they allocate, too, count nowhere (`bfc.trace.beginning`)
segments_event : the event after which "segments" of the first trace are shown: the peak_event
live_at_peak : [[address, size, owner, stack], ...], what is live after `peak_event`, in descending
    size, and among equals in the order of the events; at most 50,000. The address is that of the
    first run, and 0 where it refused the request. The owner is a text, "" if there is none. The
    stack is an index into "stacks"
left_out, left_out_bytes : the blocks that are live then and not listed, and their bytes

owners : texts; the other parts name an owner by its index here. A name above 300 characters loses
    its middle; if all have more than 400,000 characters, those with fewest bytes are "…"
texts, frames, stacks : frames have packed u32 columns file, line and name, where a file and a
    function's name are indices into `texts`; stacks have packed i32 columns parent, the index of
    the calling stack, which stands before it, frame, and line: the frame whose line of the
    program counts for the stack (`bfc_tools.study.source_lines`). At most 40,000 stacks, and
    700,000 characters in all texts; a text above 300 loses its middle; text 0 is "…", and stands
    for a text that is left out
stacks_left_out : how many blocks have a stack for which there was no room
streams : the streams' numbers that occur

runs : what stands beside each other on one axis; at most 16. "live_at_peak", "blocks", "views" and
    "owners_over_time" are of the first. Each has
    label, policy, settings, device : texts; `policy` is "caching" or "bfc", or the module of a
        policy that is written in Python, whose class is in `settings`
    trace : the name of the trace; runs of one trace have the same
    origin : "recorded", as PyTorch ran it, or "replayed"; of a state "state"
    events, completed, refusals, first_refusal (event), driver_calls
    peak_live, peak_event : of what this run served
    peak_reserved
    remarks : texts, what a reader must know
    asleep : of a recorded run, [[event, bytes, tag], ...], at most 400: before that event the tag
        fell asleep, or, with negative bytes, it woke. Only pools of bfc record it
    timeline : null for a state; else columns of one length, at most 4,000 (8,000 divided by the
        runs, where there are more than two): event, which does not fall and may repeat, where more
        was in use within an event than after it; time_us (microseconds since 1970, or null); live,
        reserved, driver_calls; in replays in_use, largest_free, refused; and asleep where tags of a
        recorded run slept: bytes that are live, and not among those reserved
    map : null, or columns (at most 1,200) and rows (512): ends, how many events come before the end
        of each column; ranges, [address, bytes] in rising order, which the rows cover end to end
        from row 0 on (the addresses in between were never used); ranges_left_out; row_bytes, where
        the last row may have fewer; row_stream, the stream that has allocated most often in a row,
        or -1; fill, packed u8, rows of columns: the part of the bytes that was in use, on the
        average of the column's events, times 256, in steps of 8; at least 1 where any was, and at
        most 255; paint, by the names in "painted": packed u8 in the same order, what a cell holds
        most of: 1 + its place in the list, 9 for all that is not in it, 0 where nothing is
    segments : what is taken from the device after segments_event, or that of its own trace, as
        columns in the order of addresses, the largest, at most 2,000 divided by the runs: address,
        size, stream, kind ("small", "large", "view" where pages are stitched, "" where it is not
        known), pool ("" or the private pool's id), live (bytes that were asked for), blocks (their
        number), largest: [[address, size, owner], ...], the three largest live blocks of each;
        left_out and left_out_bytes; by_pool, [[pool, segments, bytes, live, blocks], ...] of all,
        the largest first, empty without private pools

blocks : packed columns. The first rows are those of "live_at_peak", in the same order; behind them
    stand the largest other allocations of the trace, at most 25,000 in descending size.
    total, total_bytes : all allocations of the trace, of which those in the rows are a part
    at_peak : how many rows are those of "live_at_peak"
    address, size : packed u64, of the rows behind those of "live_at_peak" only
    owner, stack : packed i32, of the same rows
    born, died : packed i32, of all rows; `died` is -1 if it is never freed
    kind : packed u8, of all rows: an index into "kinds"
    between : packed u8: the allocations made after it and before its free or the end; 255: or more
    stream : packed u16
painted : what has a colour of its own, by "owner", "line" and "kind", where there are such: at most
    eight owners, frames or kinds, those that have most at the peak first
opens : by what the map is coloured at first: "owner", "line", or "lane", for streams and pools. The
    blocks are shown by the same, and by "size" instead of "lane"
kinds : what memory can be for (`bfc_tools.browser.kinds`); kinds_said : the bytes at the peak of
    which an owner says so. The rest is a guess
lines : null, or what the lines of the program hold, at most 500, in descending bytes: columns line
    (a frame), bytes and blocks at the peak, most (bytes, at any one time) and most_event, and
    left_out: [how many]
temporary_within : N: an allocation is temporary if fewer than N others come between it and its free
views : "peak" (live after peak_event), "never_freed", "temporary"; sums over all allocations, not
    only those in rows. Each has
    bytes, blocks
    by_owner : [[owner, bytes, blocks], ...], the most bytes first, at most 500; other_owners :
        [owners, bytes, blocks] of the rest
    by_line, other_lines : the same by frame, for the line that counts; -1 without a stack
    by_kind : the same by kind
    by_size : [[power, bytes, blocks], ...]: from 2**power bytes up to below twice that; of power
        -1, those of 0 bytes
    by_age : the same by age in events: until the peak; until the end; until the free
    tree : columns parent, frame, bytes, blocks. Row 0 is the whole, with frame -1; each other row
        is a place of the program, and its sums have all that it calls in them. At most 2,000 rows;
        what is left out (`left_out` places) is in the sums of the callers
owners_over_time : null, or event (at most 401), owner (at most 20, and -1 for all others and those
    without) and live, a row of bytes for each owner

The text has at most 4,600,000 characters: where it would have more, fewer other allocations and
stacks are listed, and then fewer of the blocks at the peak. Packed columns are described in
`bfc_tools.browser.encoding`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST
from bfc.trace import Trace
from bfc.trace.from_snapshot import live_in
from bfc.units import format_bytes
from bfc.version import __version__
from bfc_tools.browser.aggregates import lines_held, owners_over_time, view_of
from bfc_tools.browser.encoding import packed
from bfc_tools.browser.kinds import KINDS, TEMPORARY_WITHIN
from bfc_tools.browser.lifetimes import Lives, lives_of
from bfc_tools.browser.painted import groups_of
from bfc_tools.browser.runs import SAMPLES, Limits, Run, Subject, as_recorded, is_recorded, replayed
from bfc_tools.browser.segments import with_blocks
from bfc_tools.browser.tables import CUT, Tables, shortened
from bfc_tools.study.counting import Counted, CountedSimulated, device_for
from bfc_tools.study.experiment import Policy
from bfc_tools.study.iterations import figures_of, steady_of
from bfc_tools.study.ran_out import ran_out
from bfc_tools.study.segments import of_snapshot

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import Snapshot


#: The most blocks that are listed at the peak, and of others, and the most stacks.
LISTED, OTHERS, STACKS = 50_000, 25_000, 40_000
#: How many are listed: the first of these rows that does not make the page too large.
LEVELS = (
    (LISTED, OTHERS, STACKS),
    (LISTED, 8_000, 15_000),
    (LISTED, 0, 4_000),
    (20_000, 0, 2_000),
    (5_000, 0, 500),
    (500, 0, 50),
)
#: The most characters of the owners' names.
MOST_OF_OWNERS = 400_000
#: The most characters of the JSON text.
MOST_CHARACTERS = 4_600_000
#: The most runs, and the most rows of all their timelines and of all their segments together.
MOST_RUNS = 16
MOST_ROWS = 8_000
MOST_SEGMENTS = 2_000
MOST_ITERATIONS = 400
#: The least that a device has if none is named, and the most characters of all maps.
LEAST_DEVICE = 80 << 30
MOST_OF_MAPS = 1_200_000


def data_of(
    traces: Sequence[tuple[str, Trace]],
    policies: Sequence[Policy] = (),
    make_source: Callable[[], Counted] | None = None,
    *,
    title: str = "",
) -> dict[str, Any]:
    """What a page shows of some traces, by name: see above. The blocks are those of the first
    trace.

    Each is shown as it was recorded, if a snapshot of PyTorch says how, and under each policy.
    Without policies, a trace that is no recording is shown under PyTorch's. `make_source` returns a
    new device; the default has 80 GiB, or four times the peak if that is more. Raises ValueError
    without a trace, or for more than 16 runs; TraceError if the sizes of a trace add up to 2**63
    bytes or more.

    Cost: two replays for each trace and policy, and sorts of a trace's ids.

    >>> import bfc
    >>> trace = bfc.Trace([0, 0, 1], [0, 1, 0], [3 << 20, 1 << 20, 0])
    >>> found = data_of([("small", trace)])
    >>> found["peak_event"], [row[1] >> 20 for row in found["live_at_peak"]]
    (1, [3, 1])
    """
    subjects = [_subject(name, trace) for name, trace in traces]
    if not subjects:
        raise ValueError("a report needs at least one run")
    for at, subject in enumerate(subjects[1:], 1):  # the colours are those of the first trace
        subjects[at] = replace(subject, groups=replace(subject.groups, painted={}))
    if len(traces) == 1 and not policies and traces[0][1].beginning.events == len(traces[0][1]) > 0:
        state = _as_state(subjects[0], title)
        if state is not None:
            return state
    most = max(int(subject.live.max(initial=0)) for subject in subjects)
    source = make_source or _device(max(LEAST_DEVICE, 4 * most))
    device = format_bytes(source().total_bytes or 0)
    runs: list[Run] = []
    count = sum(max(len(policies) + is_recorded(trace), 1) for _, trace in traces)
    if count > MOST_RUNS:
        raise ValueError(f"a report holds at most {MOST_RUNS} runs side by side, not {count}")
    limits = Limits(min(SAMPLES, MOST_ROWS // count), MOST_SEGMENTS // count)
    for subject in subjects:
        runs += _runs_of(subject, policies, device_for(subject.trace, source), limits)
    figures = [_labelled(run.figures, len(traces) > 1, device) for run in runs]
    _keep_maps_small(figures)
    title = title or ", ".join(shortened(name) for name, _ in traces)
    page = _page("trace", subjects[0], runs[0].addresses, figures, title)
    said = [it for subject in subjects for it in _ran_out(subject)]
    return page | {"ran_out": said, "iterations": _iterations(subjects[0].trace)}


def _ran_out(subject: Subject) -> list[dict[str, Any]]:
    found = ran_out(subject.trace)
    return [] if found is None else [{"trace": shortened(subject.name), **found.as_dict()}]


def _iterations(trace: Trace) -> dict[str, Any] | None:
    found = trace.iterations()
    figures = figures_of(trace, found)
    if not figures:
        return None
    steady = steady_of(trace, figures)
    rows = [list(astuple(one)) for one in figures[:MOST_ITERATIONS]]
    for row in rows:
        row[0] = shortened(row[0])
    return {
        "source": found.source,
        "sentence": steady.sentence if steady else "",
        "rows": rows,
        "left_out": len(figures) - len(rows),
    }


def _as_state(subject: Subject, title: str) -> dict[str, Any] | None:
    """What a page shows of a snapshot of PyTorch without a history: all events of its trace rebuild
    what was live. None if it does not say where."""
    subject = replace(subject, peak=len(subject.trace) - 1)
    run = as_recorded(subject, Limits(1, MOST_SEGMENTS))
    if run is None:
        return None
    held = run.figures["segments"]
    taken = sum(held["size"]) + held["left_out_bytes"]
    figures = {
        **run.figures,
        "label": "now",
        "trace": shortened(subject.name),
        "device": "",
        "origin": "state",
        "events": 0,
        "peak_live": int(subject.live[-1]),
        "peak_event": -1,
        "peak_reserved": taken,
        "timeline": None,
        "map": None,
        "remarks": [*run.figures["remarks"], "the file has no history, only what was live"],
    }
    lives = subject.lives.chosen(subject.lives.live_after(subject.peak))
    kept = replace(subject, lives=lives, groups=groups_of(subject.trace, lives, subject.peak))
    return _page("state", kept, run.addresses, [figures], title or shortened(subject.name))


def _page(
    kind: str,
    subject: Subject,
    addresses: NDArray[np.uint64],
    runs: list[dict[str, Any]],
    title: str,
) -> dict[str, Any]:
    """What a page shows of some runs, with the blocks of the first. A state has no events."""
    is_state, peak = kind == "state", subject.peak
    room = MOST_CHARACTERS - _length(runs)
    return {
        "format": 1,
        "version": __version__,
        "title": title,
        "kind": kind,
        "events": 0 if is_state else len(subject.trace),
        "peak_event": -1 if is_state else peak,
        "peak_live": int(subject.live[peak]) if peak >= 0 else 0,
        "peak_reserved": runs[0]["peak_reserved"],
        "segments_event": -1 if is_state else peak,
        "ran_out": [],
        "iterations": None,
        "rebuilt": 0 if is_state else subject.trace.beginning.events,
        **_fitting(subject, addresses, room),
        **({"owners_over_time": None} if is_state else {}),
        "runs": runs,
    }


def data_of_state(snapshot: Snapshot, *, title: str = "", remark: str = "") -> dict[str, Any]:
    """What a page shows of an allocator at one moment: as above, of kind "state". `remark` is what
    a reader must know.

    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> buffer = allocator.allocate("3 MiB")
    >>> found = data_of_state(allocator.snapshot())
    >>> found["kind"], found["peak_live"] >> 20, found["peak_reserved"] >> 20
    ('state', 3, 20)
    """
    columns, addresses, streams = live_in(snapshot)
    trace = Trace(**columns)
    subject = _subject(snapshot.device, trace)
    subject = replace(subject, peak=len(trace) - 1)
    held = of_snapshot(snapshot)
    held.stream = [streams.index(stream) for stream in held.stream]
    lives, live = subject.lives, int(trace.size.sum())
    run = {
        "label": "now",
        "policy": "bfc" if snapshot.settings is None else "caching",
        "settings": "",
        "device": snapshot.device,
        "trace": snapshot.device,
        "origin": "state",
        "events": 0,
        "completed": True,
        "refusals": 0,
        "first_refusal": -1,
        "driver_calls": 0,
        "peak_live": live,
        "peak_event": -1,
        "peak_reserved": snapshot.stats.pool_bytes,
        "remarks": [remark] if remark else [],
        "timeline": None,
        "map": None,
        "segments": with_blocks(held, addresses, lives.size, lives.owner, MOST_SEGMENTS),
    }
    return _page("state", subject, addresses, [run], title or snapshot.device)


def _device(capacity: int) -> Callable[[], Counted]:
    return lambda: CountedSimulated(capacity)


def _subject(name: str, trace: Trace) -> Subject:
    if float(trace.size.sum(dtype=np.float64)) >= 2.0**63:
        raise TraceError(f"{name}: its sizes add up to 2**63 bytes or more")
    lives = lives_of(trace)
    bare = trace._bare(trace.meta) if trace.owners else trace
    live, peak = trace._live().astype("int64"), trace.fullest_event()
    return Subject(name, trace, bare, lives, groups_of(trace, lives, peak), live, peak)


def _runs_of(
    subject: Subject, policies: Sequence[Policy], source: Callable[[], Counted], limits: Limits
) -> list[Run]:
    known = as_recorded(subject, limits)
    if known is None and not policies:
        newest = partial(CachingAllocator, torch=subject.trace.torch or NEWEST)
        policies = [Policy("caching", newest)]
    others = [replayed(subject, policy, source, limits) for policy in policies]
    runs = others if known is None else [known, *others]
    for run in runs:
        run.figures["trace"] = shortened(subject.name)
    return runs


def _labelled(figures: dict[str, Any], several: bool, device: str) -> dict[str, Any]:
    label = f"{figures['trace']}: {figures['label']}" if several else figures["label"]
    return {**figures, "label": label, "device": device if figures["origin"] == "replayed" else ""}


def _keep_maps_small(runs: list[dict[str, Any]]) -> None:
    """Leaves out the maps of later runs, if all together are too large for a page."""
    room = MOST_OF_MAPS
    for run in runs:
        if run["map"] is not None:
            room -= len(run["map"]["fill"]["data"])
            if room < 0 and run is not runs[0]:
                run["map"] = None
                run["remarks"].append("its map is left out: there are too many for one page")


def _fitting(subject: Subject, addresses: NDArray[np.uint64], room: int) -> dict[str, Any]:
    """What the page knows of the blocks of a trace, in as many characters as there is room for."""
    for level in LEVELS:
        found = _blocks(subject, addresses, level)
        if _length(found) <= room:
            break
    return found


def _length(value: Any) -> int:
    """The characters of the JSON text in a page, where "<" is written as six."""
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + 5 * text.count("<")


def _blocks(
    subject: Subject, addresses: NDArray[np.uint64], level: tuple[int, int, int]
) -> dict[str, Any]:
    trace, lives, groups = subject.trace, subject.lives, subject.groups
    most_listed, most_others, most_stacks = level
    tables = Tables(trace, most_stacks)
    at_peak = lives.live_after(subject.peak)
    size = lives.size.astype(np.int64)
    listed = at_peak[np.argsort(-size[at_peak], kind="stable")][:most_listed]
    other = np.ones(len(lives), bool)
    other[at_peak] = False
    others = np.flatnonzero(other)
    others = others[np.argsort(-size[others], kind="stable")][:most_others]
    rows = np.concatenate([listed, others])
    stack, address = tables.stacks(lives.stack[rows]), addresses[lives.born[rows]]
    never = np.flatnonzero(lives.died < 0)
    brief = np.flatnonzero((lives.died >= 0) & (lives.between < TEMPORARY_WITHIN))
    ages = subject.peak - lives.born[at_peak], len(trace) - 1 - lives.born[never]
    views = {
        "peak": view_of(trace, tables, lives, groups, at_peak, ages[0]),
        "never_freed": view_of(trace, tables, lives, groups, never, ages[1]),
        "temporary": view_of(
            trace, tables, lives, groups, brief, lives.died[brief] - lives.born[brief]
        ),
    }
    held = lines_held(tables, lives, groups, subject.peak, max(trace.beginning.events - 1, 0))
    lines = groups.painted.get("line", [])
    owners = _owners(trace, lives, at_peak)
    names = [*owners, ""]
    count = len(listed)
    numbers = zip(address[:count], size[listed], lives.owner[listed], stack[:count], strict=True)
    return {
        "live_at_peak": [[int(a), int(s), names[int(o)], int(k)] for a, s, o, k in numbers],
        "left_out": len(at_peak) - count,
        "left_out_bytes": int(size[at_peak].sum() - size[listed].sum()),
        "owners": owners,
        "streams": np.unique(lives.stream).tolist(),
        "painted": {
            **groups.painted,
            **({"line": [tables.frame(at) for at in lines]} if lines else {}),
        },
        "opens": groups.opens,
        "kinds": list(KINDS),
        "kinds_said": int(size[at_peak][groups.said[at_peak]].sum()),
        "lines": held,
        "blocks": {
            "total": len(lives),
            "total_bytes": int(size.sum()),
            "at_peak": count,
            **_columns(lives, rows, address, stack, count),
            "kind": packed(groups.kind[rows]),
        },
        "temporary_within": TEMPORARY_WITHIN,
        "views": views,
        "owners_over_time": owners_over_time(trace, lives, at_peak, subject.peak),
        **tables.as_json(),
    }


def _owners(trace: Trace, lives: Lives, at_peak: NDArray[np.int64]) -> list[str]:
    """The owners' names. If they are too long for a page, those with most bytes at the peak, and
    then at any time, keep theirs."""
    names = [shortened(name) for name in trace.owners]
    if _length(names) <= MOST_OF_OWNERS:
        return names
    most, ever = np.zeros(len(names)), np.zeros(len(names))
    np.add.at(most, lives.owner[at_peak], lives.size[at_peak].astype(np.float64))
    np.add.at(ever, lives.owner, lives.size.astype(np.float64))
    room, kept = MOST_OF_OWNERS, [CUT] * len(names)
    for at in np.lexsort((-ever, -most)).tolist():
        room -= _length(names[at])
        if room < 0:
            break
        kept[at] = names[at]
    return kept


def _columns(
    lives: Lives,
    rows: NDArray[np.int64],
    address: NDArray[np.uint64],
    stack: NDArray[np.int64],
    listed: int,
) -> dict[str, Any]:
    """The packed columns; of the first rows without what stands in "live_at_peak"."""
    others = rows[listed:]
    return {
        "address": packed(address[listed:]),
        "size": packed(lives.size[others]),
        "owner": packed(lives.owner[others].astype(np.int32)),
        "stack": packed(stack[listed:].astype(np.int32)),
        "born": packed(lives.born[rows].astype(np.int32)),
        "died": packed(lives.died[rows].astype(np.int32)),
        "between": packed(lives.between[rows].clip(max=255).astype(np.uint8)),
        "stream": packed(lives.stream[rows]),
    }
