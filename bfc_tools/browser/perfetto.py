"""A run for ui.perfetto.dev, in Chrome's JSON format for traces: figures as counters, and the
lives of the largest allocations as slices."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bfc.files import replacing
from bfc.libraries import NDArray, np
from bfc.snapshots.snapshot import Frame
from bfc.trace import Trace
from bfc_tools.browser.lifetimes import lives_of
from bfc_tools.browser.tables import shortened
from bfc_tools.study.source_lines import Lines

if TYPE_CHECKING:
    Event = dict[str, Any]

#: The most allocations that are shown, those of all traces together; the most frames of each,
#: and how many of its callers are looked at for those.
MOST_SLICES = 10_000
MOST_FRAMES = 12
MOST_WALKED = 100
#: The columns of a timeline, and what they count. Perfetto puts the two words together.
COUNTERS = {
    "live": "bytes",
    "in_use": "bytes",
    "reserved": "bytes",
    "largest_free": "bytes",
    "asleep": "bytes",
    "refused": "requests",
    "driver_calls": "calls",
}
UNNAMED = "block"


def write_perfetto(
    traces: Sequence[tuple[str, Trace]],
    runs: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
) -> None:
    """Writes runs as a file that ui.perfetto.dev and Perfetto's trace_processor read. `runs` are
    those of what `data_of` returned for the traces. A file that exists is replaced once the new one
    is whole. Raises ValueError without a trace: what is live at one moment has no timeline.

    Each run is a process with the counters "live bytes", "in_use bytes", "reserved bytes",
    "largest_free bytes", "asleep bytes", "refused requests" and "driver_calls calls", as far as
    they are known. The first run of each trace also has the lives of the largest allocations,
    10,000 in all, as slices. A slice has the name of the owner, else of the line, and arguments:
    bytes, stream, owner, line, stack, and the events of its allocation and free.

    Times are those of the trace, from its first event on; a trace without times has a microsecond
    for each event. "otherData" says so, and how many allocations and bytes are left out, and so
    does an instant event at the beginning of each trace.
    """
    if not traces or not runs:
        raise ValueError("what is live at one moment has no timeline: Perfetto needs a trace")
    events: list[Event] = []
    facts = []
    for name, trace in traces:
        own = [at for at, run in enumerate(runs) if _is_of(run, name, trace)]
        time = _times(trace)
        about = _facts(name, trace)
        for at in own:
            events += _counters(at + 1, runs[at], time)
        if own:
            slices = _Slices(trace, time, MOST_SLICES // len(traces))
            about |= slices.left_out
            events += slices.events(own[0] + 1, len(events))
            events.append(_instant(own[0] + 1, "about this trace", 0, about))
        facts.append(about)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made_by": "bfc", "traces": facts},
    }
    with replacing(path) as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())


def _is_of(run: Mapping[str, Any], name: str, trace: Trace) -> bool:
    return bool(run["trace"] == shortened(name) and run["events"] == len(trace))


def _times(trace: Trace) -> NDArray[np.int64]:
    """A time for each event in microseconds, which never goes back, and one for the end."""
    if trace.time_us is None or not len(trace):
        return np.arange(len(trace) + 1)
    known = np.maximum.accumulate(trace.time_us)  # threads write a little out of order
    spans = np.minimum(known - known[0], np.uint64(1 << 52)).astype(np.int64)
    return np.append(spans, spans[-1] + 1)


def _facts(name: str, trace: Trace) -> dict[str, Any]:
    if trace.time_us is None:
        time = "the trace has no times: an event takes a microsecond here"
    else:
        time = "microseconds from the first event on"
    start = 0 if trace.time_us is None or not len(trace) else int(trace.time_us[0])
    return {"trace": _text(name), "events": len(trace), "time": time, "start_us": start}


def _text(text: str) -> str:
    """A text that every reader of JSON takes."""
    return shortened(text).encode("utf-8", "replace").decode()


def _instant(process: int, name: str, time: int, arguments: dict[str, Any]) -> Event:
    where = {"ph": "i", "s": "p", "pid": process, "tid": 0, "ts": time}
    return {**where, "cat": "bfc", "name": name, "args": arguments}


def _counters(process: int, run: Mapping[str, Any], time: NDArray[np.int64]) -> Iterator[Event]:
    """The name of a run and its figures, each where it changes."""
    name = {"name": _text(run["label"])}
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": name}
    timeline = run["timeline"]
    if timeline is None:
        return
    times = time[timeline["event"]].tolist()
    for column, unit in COUNTERS.items():
        last = None
        for at, value in zip(times, timeline.get(column, ()), strict=False):
            if value != last:
                head = {"ph": "C", "name": column, "pid": process, "ts": at}
                yield {**head, "args": {unit: value}}
            last = value
    if run["peak_event"] >= 0:
        top = {"event": run["peak_event"], "bytes": run["peak_live"]}
        yield _instant(process, "peak", int(time[run["peak_event"]]), top)


class _Slices:
    """The lives of the largest allocations of a trace."""

    def __init__(self, trace: Trace, time: NDArray[np.int64], most: int) -> None:
        self._trace, self._time = trace, time
        lives = lives_of(trace)
        # The largest, and of equals the first; then in the order of the events.
        order = np.argsort(-lives.size.astype(np.int64), kind="stable")
        self._lives, self._shown = lives, np.sort(order[:most])
        left = order[most:]
        self.left_out = {
            "allocations": len(lives),
            "allocations_shown": len(self._shown),
            "allocations_left_out": len(left),
            "largest_left_out_bytes": int(lives.size[left].max(initial=0)),
        }
        self._lines = Lines(trace)
        self._stacks: dict[int, list[str]] = {}
        self._line = self._lines.of(lives.stack[self._shown])

    def events(self, process: int, first: int) -> Iterator[Event]:
        """A beginning and an end for each. `first` makes their numbers unique."""
        names = [_text(name) for name in self._trace.owners]
        for number, (at, line) in enumerate(
            zip(self._shown.tolist(), self._line.tolist(), strict=True), first
        ):
            yield from self._life(
                process, f"0x{number:x}", at, _text(self._lines.text(line)), names
            )

    def _life(
        self, process: int, number: str, at: int, line: str, names: Sequence[str]
    ) -> Iterator[Event]:
        lives = self._lives
        born, died, owner = int(lives.born[at]), int(lives.died[at]), int(lives.owner[at])
        whose = names[owner] if owner >= 0 else ""
        arguments: dict[str, Any] = {
            "bytes": int(lives.size[at]),
            "stream": int(lives.stream[at]),
            "owner": whose,
            "line": line,
            "allocated_at_event": born,
            "freed_at_event": died if died >= 0 else "never",
        }
        if stack := self._stack(int(lives.stack[at])):
            arguments["stack"] = stack
        life: Event = {"cat": "allocation", "pid": process, "tid": 0}
        life["id2"] = {"local": number}  # "id" alone would put it in no process
        life["name"] = whose or line or UNNAMED
        yield {**life, "ph": "b", "ts": int(self._time[born]), "args": arguments}
        yield {**life, "ph": "e", "ts": int(self._time[died])}  # the last time, if that is -1

    def _stack(self, stack: int) -> list[str]:
        """Python's frames, the innermost first; those of C++ if there are no others."""
        if stack not in self._stacks:
            frames: list[Frame] = []
            at, trace = stack, self._trace
            while at and len(frames) < MOST_WALKED:
                parent, number = trace.stacks[at].tolist()
                frames.append(trace.frames[number])
                at = parent
            shown = [frame for frame in frames if frame.line] or frames  # C++ has no lines
            texts = [_text(f"{it.filename}:{it.line} in {it.name}") for it in shown[:MOST_FRAMES]]
            if at or len(shown) > MOST_FRAMES:
                texts.append("and more")
            self._stacks[stack] = texts
        return self._stacks[stack]
