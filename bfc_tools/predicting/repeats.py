"""What becomes of the memory when a program makes its last step again and again.

The blocks of equal steps need not lie where those of the step before lay, so that an allocator
reserves more over many steps than in the first ones.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from bfc.libraries import np
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE, FREE

#: How often a step is repeated to see what many steps reserve.
REPEATS = 100


def repeated(trace: Trace, begin: int, end: int, times: int, lasting: Container[int] = ()) -> Trace:
    """A trace up to the end of a step, and then that step again, so many times. `begin` and `end`
    are the indices of its first event, and of the first behind it. `lasting` are the ids of what
    programs make once, as workspaces: no repetition makes more of them than it frees.

    The result has the trace's meta, no owners and no stacks. What the step frees of the step before
    it is, in a repetition, what the repetition before that has left: of the same size, in the order
    of their allocations, and then of any size.
    """
    op, size, stream = (np.array(one)[begin:end] for one in (trace.op, trace.size, trace.stream))
    ids = np.asarray(trace.id)[begin:end].astype(np.int64)
    number = {int(one): place for place, one in enumerate(ids[op == ALLOCATE])}
    order = np.fromiter((number.get(int(one), -1) for one in ids), np.int64, len(ids))
    freed = np.flatnonzero(op == FREE)
    outside = freed[order[freed] < 0]
    followed = np.full(len(op), -1, np.int64)  # by each free of the step before: what is left
    gone = set(order[freed].tolist())
    left = [place for place in np.flatnonzero(op == ALLOCATE) if order[place] not in gone]
    found = _pairs(outside[np.argsort(ids[outside], kind="stable")], left, size)
    for free, made in found:
        followed[free], size[free] = order[made], size[made]
    kept = (op != FREE) | (order >= 0) | (followed >= 0)
    once = set(left).difference(made for _, made in found)
    kept[[place for place in once if ids[place] in lasting]] = False
    return _joined(trace, (op, size, stream), (ids, order, followed, kept), end, times)


def _pairs(frees: Any, left: list[Any], size: Any) -> list[tuple[Any, Any]]:
    """Each free with one of the allocations that are left: one of its size, or else the next."""
    by_size: dict[int, list[Any]] = {}
    for place in reversed(left):
        by_size.setdefault(int(size[place]), []).append(place)
    found, others = [], []
    for free in frees:
        same = by_size.get(int(size[free]))
        if same:
            found.append((free, same.pop()))
        else:
            others.append(free)
    rest = sorted(place for places in by_size.values() for place in places)
    return found + list(zip(others, rest, strict=False))


def _joined(trace: Trace, what: Any, names: Any, end: int, times: int) -> Trace:
    op, size, stream = what
    ids, order, followed, kept = names
    first = int(np.asarray(trace.id).max(initial=0)) + 1
    made = int(order.max(initial=-1)) + 1
    originals = np.zeros(max(made, 1), np.int64)
    originals[order[op == ALLOCATE]] = ids[op == ALLOCATE]
    columns = [[np.asarray(one)[:end]] for one in (trace.op, trace.id, trace.size)]
    columns.append([np.asarray(trace.stream)[:end]])
    for turn in range(times):
        now = np.where(order >= 0, first + turn * made + order, 0)
        before = originals if turn == 0 else first + (turn - 1) * made + np.arange(max(made, 1))
        now = np.where(followed >= 0, before[followed], now)
        for column, one in zip(columns, (op, now, size, stream), strict=True):
            column.append(one[kept])
    return Trace(*(np.concatenate(column) for column in columns), meta=trace.meta)
