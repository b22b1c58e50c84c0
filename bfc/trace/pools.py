"""The private pools of a trace: memory that serves a part of the program alone, such as a captured
graph."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from operator import index
from typing import Any

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.pytorch.words import CAPTURE_BEGINS, HOLD, LET_GO, OUR_TAGS, POOL_MARKS, SCOPE_BEGINS

MOST_POOLS = MOST_STREAMS = 1 << 16
TOP = 1 << 64
ALLOCATE = 0
_BEGINS = (POOL_MARKS.index(CAPTURE_BEGINS), POOL_MARKS.index(SCOPE_BEGINS))
_LET_GO = POOL_MARKS.index(LET_GO)


def checked_pools(pools: Any) -> NDArray[np.uint64]:
    """The table of pools as a read-only array. Raises TraceError if it is not rows of two numbers,
    the first (0, 0)."""
    if len(pools) > MOST_POOLS:
        raise TraceError(f"pools are at most {MOST_POOLS}, not {len(pools)}")
    # NumPy would make floats of integers of which some are above 2**63 - 1.
    rows = pools if isinstance(pools, np.ndarray) else np.array(pools, object)
    rows = rows if len(rows) else np.zeros((1, 2), np.uint64)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise TraceError("pools are rows of two integers: the id of each")
    try:
        numbers = [(index(first), index(second)) for first, second in rows.tolist()]
    except TypeError:
        raise TraceError("pools are rows of two integers: the id of each") from None
    if not all(0 <= it < TOP for row in numbers for it in row):
        raise TraceError("the two integers of a pool's id are from 0 to 2**64 - 1")
    if numbers[0] != (0, 0) or len(set(numbers)) < len(numbers):
        raise TraceError("pool 0 is the default one, (0, 0), and the others differ")
    if any(first == OUR_TAGS for first, _ in numbers):
        raise TraceError(f"pool ids that begin with {OUR_TAGS} are of tags, which no trace has")
    fixed = np.array(numbers, np.uint64).tobytes()
    return np.ndarray((len(numbers), 2), np.uint64, fixed)


def checked_marks(marks: Any, events: int, pools: int) -> NDArray[np.int64]:
    """What happens to pools as a read-only array, in the order of the events. Raises TraceError if
    a row has a number that is not there."""
    rows = np.asarray(marks if len(marks) else np.zeros((0, 4), np.int64))
    if rows.ndim != 2 or rows.shape[1] not in (3, 4) or rows.dtype.kind not in "iu":
        raise TraceError("pool_marks are rows of integers: event, mark, pool, perhaps stream")
    if rows.shape[1] == 3:
        rows = np.column_stack((rows, np.zeros(len(rows), rows.dtype)))
    tops = np.array([events + 1, len(POOL_MARKS), pools, MOST_STREAMS])
    low = np.array([0, 0, 1, 0])
    if len(rows) and ((rows < low) | (rows >= tops)).any():
        raise TraceError(
            "pool_marks name an event, a mark, a private pool or a stream that is not there"
        )
    ordered = rows.astype(np.int64)[np.argsort(rows[:, 0], kind="stable")]
    return np.ndarray(ordered.shape, np.int64, ordered.tobytes())


def actions_of(
    op: NDArray[np.uint8], pool: NDArray[np.uint16], marks: NDArray[np.int64]
) -> list[tuple[int, int, int, int]]:
    """What a replay does with private pools: (event, action, pool, stream), the event before which
    it does so. These are the `marks` of a trace, and a HOLD where a pool that nobody holds is
    allocated from."""
    listed = [(event, at, *of_pool) for at, (event, *of_pool) in enumerate(marks.tolist())]
    begun, let_go = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for event, _, mark, number, _ in listed:
        if mark == _LET_GO:
            let_go[number].append(event)
        elif mark in _BEGINS:
            begun[number].append(event)
    private = np.flatnonzero((op == ALLOCATE) & (pool > 0))
    private = private[np.argsort(pool[private], kind="stable")]
    numbers, first = np.unique(pool[private], return_index=True)
    found = list(listed)
    ends = [*first[1:], len(private)]
    for number, begin, end in zip(numbers.tolist(), first, ends[: len(numbers)], strict=True):
        made = private[begin:end]
        gone = let_go[number]
        for start, stop in zip([0, *gone], [*gone, len(op) + 1], strict=True):
            at = int(np.searchsorted(made, start))
            if at == len(made) or made[at] >= stop:
                continue
            since = bisect_left(begun[number], start)
            if since == len(begun[number]) or begun[number][since] > made[at]:
                found.append((int(made[at]), len(listed), HOLD, number, 0))
    return [(event, *of_pool) for event, _, *of_pool in sorted(found)]
