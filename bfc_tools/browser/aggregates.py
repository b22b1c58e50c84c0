"""Sums over all allocations of a choice: by owner, by line of the program, by size, by age."""

from __future__ import annotations

from typing import Any

from bfc.libraries import NDArray, np
from bfc.trace import Trace
from bfc_tools.browser.lifetimes import Lives
from bfc_tools.browser.painted import Groups
from bfc_tools.browser.tables import Tables

#: The most places of a flame graph, and the most owners, or lines, of a list.
MOST_NODES = 2_000
MOST_ROWS = 500
#: The most owners that are drawn over time, and at how many events.
OWNERS_OVER_TIME = 20
EVENTS_OVER_TIME = 400


def view_of(
    trace: Trace,
    tables: Tables,
    lives: Lives,
    groups: Groups,
    chosen: NDArray[np.int64],
    age: NDArray[np.int64],
) -> dict[str, Any]:
    """The sums over the allocations `chosen`, whose ages in events are `age`: a view, as
    `bfc_tools.browser.data` describes it."""
    size = lives.size[chosen].astype("int64")
    owners, others = _by_key(lives.owner[chosen], size)
    lines, other_lines = _by_key(groups.line[chosen], size)
    kinds, _ = _by_key(groups.kind[chosen].astype("int64"), size)
    return {
        "bytes": int(size.sum()),
        "blocks": len(chosen),
        "by_owner": owners,
        "other_owners": others,
        "by_line": [[tables.frame(at) if at >= 0 else -1, *sums] for at, *sums in lines],
        "other_lines": other_lines,
        "by_kind": kinds,
        "by_size": _by_power(size, size),
        "by_age": _by_power(age, size),
        "tree": _tree(trace, tables, lives.stack[chosen], size),
    }


def _sums(keys: NDArray[np.int64], size: NDArray[np.int64], count: int) -> Any:
    """The bytes and the blocks of each key below `count`."""
    total = np.zeros(count, np.int64)
    np.add.at(total, keys, size)
    return total, np.bincount(keys, minlength=count)


def _by_key(key: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[list[list[int]], list[int]]:
    """Rows of owner, or of another key from -1 on, bytes and blocks, the most bytes first; and the
    count, the bytes and the blocks of those that are not among them."""
    total, blocks = _sums(key + 1, size, int(key.max(initial=-1)) + 2)
    there = np.flatnonzero(blocks)
    order = there[np.argsort(-total[there], kind="stable")]
    rest = order[MOST_ROWS:]
    rows = [[int(at) - 1, int(total[at]), int(blocks[at])] for at in order[:MOST_ROWS]]
    return rows, [len(rest), int(total[rest].sum()), int(blocks[rest].sum())]


def _by_power(number: NDArray[np.int64], size: NDArray[np.int64]) -> list[list[int]]:
    """Rows of a power, bytes and blocks: those whose number lies from 2**power up to below twice
    that; of -1, those whose number is 0."""
    edges = np.left_shift(1, np.arange(63), dtype=np.int64)
    power = np.searchsorted(edges, number, side="right")
    total, blocks = _sums(power, size, 64)
    return [[int(at) - 1, int(total[at]), int(blocks[at])] for at in np.flatnonzero(blocks)]


def _tree(
    trace: Trace, tables: Tables, stack: NDArray[np.int64], size: NDArray[np.int64]
) -> dict[str, Any]:
    """What each place of the program and all that it calls have allocated. Of many places the
    largest are kept, and what the others have is still in the sum of the place that calls them."""
    own, own_blocks = _sums(stack, size, len(trace.stacks))
    total, blocks, parents = own.tolist(), own_blocks.tolist(), trace.stacks[:, 0].tolist()
    for at in range(len(parents) - 1, 0, -1):
        if blocks[at]:
            total[parents[at]] += total[at]
            blocks[parents[at]] += blocks[at]
    # A place stands behind the one that calls it, and has no more bytes: so with each that is kept
    # is its caller.
    sums = np.array(total, np.int64)
    there = np.flatnonzero(np.array(blocks, np.int64))
    kept = np.sort(there[np.argsort(-sums[there], kind="stable")[:MOST_NODES]])
    if not len(kept):
        kept = np.zeros(1, np.int64)
    place = {int(at): number for number, at in enumerate(kept)}
    frames = trace.stacks[kept, 1].tolist()
    return {
        "parent": [-1, *(place[parents[at]] for at in kept[1:].tolist())],
        "frame": [-1, *(tables.frame(frame) for frame in frames[1:])],
        "bytes": [total[at] for at in kept.tolist()],
        "blocks": [blocks[at] for at in kept.tolist()],
        "left_out": len(there) - len(kept) if len(there) else 0,
    }


def lines_held(
    tables: Tables, lives: Lives, groups: Groups, peak: int, first: int
) -> dict[str, list[int]] | None:
    """What each line of the program holds: after the event `peak`, and at its own most, from the
    event `first` on. None if no allocation has a stack."""
    line, size = groups.line, lives.size.astype(np.int64)
    if not (line >= 0).any():
        return None
    freed = np.flatnonzero(lives.died >= 0)
    event = np.maximum(np.concatenate([lives.born, lives.died[freed]]), first)
    whose = np.concatenate([line, line[freed]])
    # Of one event, which are many only before the first, all counts at once.
    order = np.argsort((whose + 1) * (int(event.max()) + 1) + event)
    event, whose = event[order], whose[order]
    held = np.cumsum(np.concatenate([size, -size[freed]])[order])
    starts = np.flatnonzero(np.append(True, whose[1:] != whose[:-1]))
    before = np.append(0, held[starts[1:] - 1])
    counts = np.diff(np.append(starts, len(whose)))
    held -= np.repeat(before, counts)
    same = np.append((event[1:] == event[:-1]) & (whose[1:] == whose[:-1]), False)
    held[same] = -1
    most = np.maximum.reduceat(held, starts)
    at_most = np.flatnonzero(held == np.repeat(most, counts))
    when = event[at_most[np.searchsorted(at_most, starts)]]
    there = lives.live_after(peak)
    at_peak, blocks = _sums(line[there] + 1, size[there], int(line.max()) + 2)
    number = whose[starts]
    order = np.lexsort((-most, -at_peak[number + 1]))
    chosen = order[number[order] >= 0][:MOST_ROWS]
    number = number[chosen]
    return {
        "line": [tables.frame(at) for at in number.tolist()],
        "bytes": at_peak[number + 1].tolist(),
        "blocks": blocks[number + 1].tolist(),
        "most": most[chosen].tolist(),
        "most_event": when[chosen].tolist(),
        "left_out": [int((whose[starts] >= 0).sum()) - len(chosen)],
    }


def owners_over_time(
    trace: Trace, lives: Lives, at_peak: NDArray[np.int64], peak: int
) -> dict[str, Any] | None:
    """The live bytes of the owners that have most at the peak, at some hundred events and at the
    peak; None if no allocation has an owner."""
    if not len(lives) or not (lives.owner > 0).any():
        return None
    count = len(trace.owners)
    most, _ = _sums(lives.owner[at_peak], lives.size[at_peak].astype(np.int64), count)
    ever, _ = _sums(lives.owner, lives.size.astype(np.int64), count)
    order = np.lexsort((-ever, -most))
    order = order[(ever[order] > 0)][:OWNERS_OVER_TIME]
    line = np.full(count, len(order))
    line[order] = np.arange(len(order))
    steps = min(EVENTS_OVER_TIME, len(trace))
    events = np.unique(np.append(np.arange(1, steps + 1) * len(trace) // steps - 1, peak))
    change = np.zeros((len(order) + 1, len(events)), np.int64)
    lines, size = line[lives.owner], lives.size.astype(np.int64)
    np.add.at(change, (lines, np.searchsorted(events, lives.born)), size)
    freed = lives.died >= 0
    np.add.at(change, (lines[freed], np.searchsorted(events, lives.died[freed])), -size[freed])
    live = np.cumsum(change, axis=1).tolist()
    return {
        "event": events.tolist(),
        "owner": [*order.tolist(), -1],
        "live": live,
    }
