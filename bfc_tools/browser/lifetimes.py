"""When each allocation of a trace was made and freed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bfc.libraries import NDArray, np
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE


@dataclass(frozen=True, eq=False)
class Lives:
    """The allocations of a trace as columns, in the order of their events."""

    born: NDArray[np.int64]  # the event that makes each
    died: NDArray[np.int64]  # the event that frees it; -1 if none does
    #: how many allocations were made after it and before its free, or the end
    between: NDArray[np.int64]
    size: NDArray[np.uint64]  # the bytes that were asked for
    stream: NDArray[np.uint16]  # the stream that owns it
    owner: NDArray[np.int64]  # a number of the trace's owners; -1 if the trace has none
    stack: NDArray[np.int64]  # a number of the trace's stacks; 0 where it is not known

    def __len__(self) -> int:
        return len(self.born)

    def chosen(self, at: NDArray[np.int64]) -> Lives:
        """The allocations with these indices."""
        return Lives(*(getattr(self, field.name)[at] for field in fields(self)))

    def live_after(self, event: int) -> NDArray[np.int64]:
        """The indices of what is live after an event."""
        there = (self.born <= event) & ((self.died < 0) | (self.died > event))
        return np.flatnonzero(there)


def lives_of(trace: Trace) -> Lives:
    """The allocations of a trace, those of size 0 too. The gaps that rebuild the beginning of a
    recording are none. Cost: a sort of the ids."""
    born = np.flatnonzero((trace.op == ALLOCATE) & ~trace._gaps())
    died = trace._frees()[born]
    until = np.where(died < 0, len(trace), died)
    between = np.searchsorted(born, until) - np.arange(1, len(born) + 1)
    nobody = np.full(len(born), -1, np.int64)
    return Lives(
        born,
        died,
        between,
        trace.size[born],
        trace.stream[born],
        trace.owner[born].astype(np.int64) if trace.owner is not None and trace.owners else nobody,
        np.zeros(len(born), np.int64)
        if trace.stack is None
        else trace.stack[born].astype(np.int64),
    )
