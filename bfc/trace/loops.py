"""The loops of a program, by the lines of its recorded stacks.

A stack says which line of each function was at work. Inside a call lines rise; a lower line comes
next where a loop begins anew, or where the function is called again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.libraries import NDArray, np

if TYPE_CHECKING:
    from bfc.trace.structure import Numbers
    from bfc.trace.trace import Trace

#: So many calls of a stack are looked at, from the outermost one on; and of all stacks together.
DEEPEST, CALLS = 256, 1 << 24
#: A function is looked at if it is in so much of what has a stack: so many, the outermost first.
COVERS, FUNCTIONS = 0.4, 24
#: So many lines that a function goes back to, and so many that it comes from, are looked at.
TARGETS, SOURCES = 12, 6


@dataclass(frozen=True, eq=False)
class Loop:
    """The times that a program went through some lines: their requests, and where these end."""

    depth: float  # how many calls are around it
    begins: Numbers
    ends: Numbers


def loops(trace: Trace, events: Numbers) -> Iterator[Loop]:
    """Those of a trace, whose requests are at these events; the outermost first.

    Each function may have several, one in the other: what they hold tells which are iterations.
    """
    if trace.stack is None or len(trace.stacks) < 2 or not len(events):
        return
    stacks, of_request = np.unique(trace.stack[events], return_inverse=True)
    paths = _Paths(trace, stacks)
    weight = np.bincount(of_request, minlength=len(stacks))
    looked_at = 0
    for function, depth in paths.functions(weight):
        calls = paths.calls_of(function)
        at_work = calls[calls[:, 0] >= 0]
        if looked_at == FUNCTIONS or (at_work == at_work[0]).all():  # a launcher, say
            continue
        looked_at += 1
        lines = _in_order(calls, of_request)
        leaves = paths.leaves(function)[of_request]
        for begins, last in _returns(lines):
            outside = np.flatnonzero((lines > last) | leaves)
            if len(begins) > 1:
                yield Loop(depth, begins, _ends(begins, outside, len(events)))


def _in_order(calls: NDArray[np.int64], of_request: Numbers) -> Numbers:
    """The place of a function at each request: its line, and of the calls in one line the one that
    came first first. -1 where the function is not at work."""
    rows, of_stack = np.unique(calls, axis=0, return_inverse=True)
    place = of_stack.reshape(-1)[of_request]
    first = np.full(len(rows), len(place))
    first[place[::-1]] = np.arange(len(place))[::-1]
    rank = np.empty(len(rows), np.int64)
    rank[np.lexsort((first, rows[:, 0]))] = np.arange(len(rows))
    rank[rows[:, 0] < 0] = -1
    found: Numbers = rank[place]
    return found


def _returns(lines: Numbers) -> Iterator[tuple[Numbers, int]]:
    """Where a function goes back to a line, and the last line that belongs to that loop: the one
    from which it goes back most often. A line of -1 is none of the function's."""
    inside = np.flatnonzero(lines >= 0)
    line = lines[inside]
    before = np.concatenate([[-1], line[:-1]])
    back = line < before
    targets, times = np.unique(line[back], return_counts=True)
    for target in targets[np.argsort(-times, kind="stable")][:TARGETS].tolist():
        arrives = (line == target) & (line != before)
        sources, counts = np.unique(before[back & arrives], return_counts=True)
        for least in _thresholds(sources, counts):
            chosen = sources >= least
            most = counts[chosen].max()
            begins = inside[arrives & (~back | (before >= least))]  # a loop is entered forwards
            yield begins, int(sources[chosen & (counts == most)].max())


def _thresholds(sources: Numbers, counts: Numbers) -> list[int]:
    """Lines such that what comes from there and from below is one loop around the others."""
    commonest = sources[np.argsort(-counts, kind="stable")][:SOURCES]
    return [int(one) for one in np.sort(commonest)]


def _ends(begins: Numbers, outside: Numbers, total: int) -> Numbers:
    """Where each time ends: at the next one, or at the first request that is not the loop's."""
    ends = np.concatenate([begins[1:], [total]])
    at = np.searchsorted(outside, begins)
    there = at < len(outside)
    ends[there] = np.minimum(ends[there], outside[at[there]])
    return ends


class _Paths:
    """The calls of each of some stacks: functions by number, and their lines, outermost first."""

    def __init__(self, trace: Trace, stacks: NDArray[np.uint32]) -> None:
        rows = trace.frames.rows.astype(np.int64)
        _, functions = np.unique(rows[:, 0] << 32 | rows[:, 2], return_inverse=True)
        deepest = min(DEEPEST, CALLS // len(stacks))
        parents, frames = trace.stacks.astype(np.int64).T
        depth = [0]
        for parent in parents[1:].tolist():  # which stands before
            depth.append(depth[parent] + 1)
        at, place = stacks.astype(np.int64), np.array(depth)[stacks] - 1
        shape = len(stacks), min(deepest, int(place.max(initial=0)) + 1) + 1
        self._function = np.full(shape, -1, np.int32)
        self._line = np.full(shape, -1, np.int64)
        while (place >= 0).any():
            kept = np.flatnonzero((place >= 0) & (place < deepest))
            frame = frames[at[kept]]
            self._function[kept, place[kept]] = functions[frame]
            self._line[kept, place[kept]] = rows[frame, 1]
            at, place = parents[at], place - 1

    def functions(self, weight: Numbers) -> list[tuple[int, float]]:
        """The functions that much of the run is in, with their depths, the outermost first."""
        row, depth = np.nonzero(self._function >= 0)
        if not len(row):
            return []
        found, number = np.unique(self._function[row, depth], return_inverse=True)
        _, once = np.unique(row * len(found) + number, return_index=True)  # its outermost call
        number, depth, of_row = number[once], depth[once], weight[row[once]]
        most = np.bincount(number, of_row, len(found))
        depths = np.bincount(number, of_row * depth, len(found)) / most
        whole = int(weight[self._function[:, 0] >= 0].sum())
        chosen = np.flatnonzero(most >= COVERS * whole)
        ordered = chosen[np.argsort(depths[chosen], kind="stable")]
        return [(int(found[one]), float(depths[one])) for one in ordered]

    def calls_of(self, function: int) -> NDArray[np.int64]:
        """The line of a function in each stack, of its outermost call, and what it calls there; -1
        where it is not."""
        is_there = self._function == function
        at, rows = is_there.argmax(axis=1), np.arange(len(is_there))
        behind = np.minimum(at + 1, is_there.shape[1] - 1)
        calls = np.stack([self._line[rows, at], self._function[rows, behind]], axis=1)
        calls[~is_there.any(axis=1)] = -1
        return calls

    def leaves(self, function: int) -> NDArray[np.bool_]:
        """Which stacks are elsewhere in the program: the function is not in them, and their first
        call is one that leads to it, which no thread of autograd has."""
        is_there = (self._function == function).any(axis=1)
        roots = np.unique(self._function[is_there, 0])
        elsewhere: NDArray[np.bool_] = np.isin(self._function[:, 0], roots) & ~is_there
        return elsewhere
