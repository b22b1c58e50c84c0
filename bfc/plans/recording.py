"""A plan that a program learns while it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from bfc.allocators import _plans
from bfc.allocators._allocator import Allocator
from bfc.allocators._plan_use import home_stream
from bfc.errors import PlanError
from bfc.libraries import NDArray, np
from bfc.plans.parts import MOST_SLOTS
from bfc.plans.plan import Plan
from bfc.plans.trying import Fallback
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.words import ACTIONS
from bfc.snapshots.columns import RECORD
from bfc.trace import Trace


class Recording:
    """The steps of a program, recorded to plan them: `Allocator.record_plan` makes it.

    Examples
    --------
    >>> import bfc
    >>> pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with pool.record_plan(iterations=2) as recording:
    ...     for _ in range(3):
    ...         with pool.step("train"):
    ...             pool.allocate("20 MiB").free()
    ...             pool.allocate("30 MiB").free()
    >>> pool.use_plan(recording.plan())
    >>> pool.release_free_regions() >> 20, pool.stats().pool_bytes >> 20
    (50, 30)
    """

    def __init__(self, allocator: Allocator, iterations: int) -> None:
        self._allocator = allocator
        self._iterations = iterations
        self._marks: list[tuple[int, str]] = []
        self._records: bytes | None = None
        self._previous: Callable[[str | None], object] | None = None
        self._is_open = self._is_lost = False

    def __enter__(self) -> Self:
        if self._is_open or self._records is not None:
            raise RuntimeError("a recording is made once: call record_plan again")
        self._allocator.record_history(context=None, max_entries=MOST_SLOTS)
        self._previous = self._allocator._watch_steps(self._begun)
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._end()

    def _begun(self, kind: str | None) -> None:
        """A step has begun; or, without a kind, another history will."""
        if kind is None:
            self._is_open = False
            self._is_lost = True
            self._allocator._watch_steps(self._previous)
            return
        self._marks.append((len(records_of(self._allocator)) // RECORD.size, kind))
        if marks_reached(self._marks, self._iterations):
            self._end()

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._allocator._watch_steps(self._previous)
        if not self._allocator.closed:
            self._records = records_of(self._allocator)
            self._allocator.record_history(None)

    def plan(self) -> Plan:
        """Plan the places of what was recorded.

        Returns
        -------
        Plan
            A plan for the steps. What was live before has no places in it.

        Raises
        ------
        PlanError
            If nothing was recorded: no step began, or nothing was allocated, or the allocator was
            closed, or another history was begun meanwhile. Also if more happened than a recording
            holds.

        Notes
        -----
        Cost: about a microsecond for each allocation and free, and that of `Plan.from_trace`.
        """
        self._end()
        if self._is_lost:
            raise PlanError("another history was begun while steps were recorded: record them anew")
        if not self._records or not self._marks:
            raise PlanError("nothing was recorded: put iterations into `with allocator.step():`")
        if len(self._records) // RECORD.size >= MOST_SLOTS:
            raise PlanError(
                f"more than {MOST_SLOTS} allocations and frees came while it was recorded"
            )
        policy = policy_of(self._allocator, 0)
        trace = trace_of(self._records, self._marks, policy, home_stream(self._allocator))
        return Plan.from_trace(trace, fallback=policy.name, settings=policy.settings)


def records_of(allocator: Allocator) -> bytes:
    """The history of an allocator."""
    return allocator.snapshot()._history_columns().records


def marks_reached(marks: list[tuple[int, str]], iterations: int) -> bool:
    """Whether so many steps of a kind were recorded, and one more, which shows what the last of
    them left alive."""
    last = marks[-1][1]
    return sum(kind == last for _, kind in marks) > iterations + 1


def policy_of(allocator: Allocator, peak: int) -> Fallback:
    """The policy of an allocator, for replays of which `peak` bytes are live at most."""
    if isinstance(allocator, CachingAllocator):
        return Fallback("caching", allocator.settings, allocator.torch, peak)
    return Fallback("bfc", "", NEWEST, peak)


def trace_of(records: bytes, marks: list[tuple[int, str]], policy: Fallback, home: int) -> Trace:
    """The trace of a history, with marks at these records. `home` is the allocator's own stream."""
    fields = ("address", "size", "stream", "pool", "pool_id", "time", "id")
    rows = np.frombuffer(
        records,
        [(name, np.uint64) for name in fields] + [("action", np.uint32), ("owner", np.uint32)],
    )
    columns, found = _events(rows, marks, home)
    told = {"marks": [list(mark) for mark in found], "torch_version": policy.torch}
    return Trace(*columns, meta=told)


def _events(
    rows: NDArray[Any], marks: list[tuple[int, str]], home: int
) -> tuple[tuple[list[int], ...], list[tuple[int, str]]]:
    """The allocations and frees of a history, as the columns of a trace, and its marks. What was
    allocated before, or in a private pool, is left out."""
    alloc, free = ACTIONS.index("alloc"), ACTIONS.index("free_completed")
    live: dict[int, tuple[int, int]] = {}
    streams = {0: 0, home: 0}
    op: list[int] = []
    ids: list[int] = []
    sizes: list[int] = []
    ordinals: list[int] = []
    begins = dict(marks)
    found = []
    for number, row in enumerate(rows.tolist()):
        if number in begins:
            found.append((len(op), begins[number]))
        address, size, stream, pool, pool_id, *_, action, _owner = row
        if action == alloc and not pool | pool_id:
            live[address] = number, streams.setdefault(stream, max(streams.values()) + 1)
        elif action != free or address not in live:
            continue
        block, ordinal = live[address] if action == alloc else live.pop(address)
        op.append(int(action == free))
        ids.append(block)
        sizes.append(size if action == alloc else 0)
        ordinals.append(ordinal)
    found += [(len(op), kind) for at, kind in marks if at >= len(rows)]
    return (op, ids, sizes, ordinals), found


_plans.set_recording(Recording)
