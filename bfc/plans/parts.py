"""A recording, cut into what comes before the iterations (the head) and the iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bfc.errors import PlanError
from bfc.libraries import NDArray, np
from bfc.plans.lengths import Lengths
from bfc.plans.lives import Lives

if TYPE_CHECKING:
    from bfc.trace import Trace

#: Rounds bytes as a policy does, in whole units.
Rounding = Callable[["NDArray[np.uint64]"], "NDArray[np.uint64]"]
#: An `over` of blocks that are never freed.
FOREVER = (1 << 32) - 1
#: The most slots of a plan.
MOST_SLOTS = 1 << 24
#: The most kinds of iterations: what each leaves live meets each of the others.
MOST_KINDS = 64
#: The most streams: each has bins of its own where a plan is served.
MOST_STREAMS = 64
#: What is before the iterations; what repeats; what the first iteration allocates for good.
HEAD, BODY, LATE = "head", "body", "late"


@dataclass(frozen=True, eq=False)
class Part:
    """The slots of one part of a plan: the blocks that it asks for, in the order of the requests.

    Attributes
    ----------
    role : str
        "head": what comes before the iterations. "body": an iteration that repeats. "late": what
        the first iteration allocates and nothing frees, such as an optimizer's state.
    kind : str
        The kind of iteration, such as "train"; "" for the head.
    size : numpy.ndarray of uint64
        Bytes, as the fallback policy rounds them.
    offset : numpy.ndarray of uint64
        The first byte. Below `Plan.base` it lies in the region of what is never freed, else in that
        of the bodies.
    end : numpy.ndarray of uint32
        The number of the request of this part before which the block is freed. In a late part: the
        number of the request of the body before which the first iteration asks for it.
    over : numpy.ndarray of uint32
        Of a block that outlives the part: how many requests of the next iteration come before its
        free. 0 for all others, and 2**32 - 1 for one that is never freed.
    stream : numpy.ndarray of uint16
        The ordinal of its stream.
    recorded : int
        From how many recorded iterations it was made.
    agreeing : int
        How many of them ask for the same, but for one request of twenty.
    agreement : float
        Which part of the requests of one iteration was found in another; 1 for a single iteration.
    left_out : int
        How many requests of a recorded iteration have no slot, since the blocks outlive the next
        iteration, too.
    follower : str
        Of a body: the kind of iteration that always came after one of this kind, or "".
    lengths : Lengths or None
        How the sizes follow from the length of an iteration. The slots have room for the longest.
    """

    role: str
    kind: str
    size: NDArray[np.uint64]
    offset: NDArray[np.uint64]
    end: NDArray[np.uint32]
    over: NDArray[np.uint32]
    stream: NDArray[np.uint16]
    recorded: int = 1
    agreeing: int = 1
    agreement: float = 1.0
    left_out: int = 0
    follower: str = ""
    lengths: Lengths | None = None

    def __len__(self) -> int:
        return len(self.size)

    def taken(self, chosen: NDArray[np.bool_]) -> Part:
        """Some of the slots. The requests are numbered anew."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        end = before[np.minimum(self.end, len(self))][chosen]
        born = np.arange(len(end))
        columns = {
            name: getattr(self, name)[chosen] for name in ("size", "offset", "over", "stream")
        }
        ends = np.maximum(end, born + 1).astype(np.uint32)
        return replace(self, **columns, end=ends, lengths=None)

    def is_like(self, other: Part) -> bool:
        """Whether another part asks for the same, with the same lives."""
        columns = ("size", "end", "over", "stream")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)

    def peak(self) -> int:
        """The most bytes that live at once if it is repeated for ever."""
        return lives_of([self]).most(self.size.astype(np.int64)) if len(self) else 0


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests of a trace that are not empty, numbered from 0."""

    event: NDArray[np.int64]
    size: NDArray[np.uint64]
    raw: NDArray[np.uint64]  # the sizes before they are rounded
    stream: NDArray[np.uint16]
    freed: NDArray[np.int64]  # the request before which the block is freed; -1 if it never is
    rounded: Rounding  # rounds bytes as the policy does

    @classmethod
    def of(cls, trace: Trace, rounded: Rounding) -> Requests:
        """Those of a trace whose sizes are rounded so."""
        event, freed = trace._requests()
        if len(event) > MOST_SLOTS:
            raise PlanError(f"the run has {len(event)} requests: a plan has at most {MOST_SLOTS}")
        if (streams := len(np.unique(trace.stream[event]))) > MOST_STREAMS:
            raise PlanError(f"the run has {streams} streams, and a plan has at most {MOST_STREAMS}")
        raw = trace.size[event]
        return cls(event, rounded(raw), raw, trace.stream[event], freed, rounded)

    def part(self, role: str, kind: str, begin: int, end: int, after: int) -> Part:
        """The requests `begin` to `end`. What is freed behind the request `after` counts as never
        freed."""
        freed = self.freed[begin:end]
        known = (freed >= 0) & (freed <= after)
        over = np.where(known, np.maximum(freed - end, 0), FOREVER)
        return Part(
            role,
            kind,
            self.size[begin:end],
            np.zeros(end - begin, np.uint64),
            np.where(known, np.minimum(freed - begin, end - begin), end - begin).astype(np.uint32),
            over.astype(np.uint32),
            self.stream[begin:end],
        )


@dataclass(frozen=True)
class Stretch:
    """A part of the requests, from `begin` up to `end`. The next one ends at `after`."""

    kind: str
    begin: int
    end: int
    after: int


def stretches(requests: Requests, marks: list[tuple[int, str]], events: int) -> list[Stretch]:
    """The iterations between the marks. What follows a mark of the kind "" is none of them."""
    ends = [event for event, _ in marks] + [events]
    at = np.searchsorted(requests.event, ends).tolist()
    at.append(at[-1])
    # "step:1024" is an iteration of the kind "step" whose length was 1024
    found = [
        Stretch(kind.split(":")[0], at[i], at[i + 1], at[i + 2])
        for i, (_, kind) in enumerate(marks)
        if kind
    ]
    while found and found[-1].begin == found[-1].end:
        found.pop()  # a mark behind the last request
    return found


def lives_of(parts: Sequence[Part]) -> Lives:
    """When the blocks of all slots live, in the order of the parts, on one line of time: the head,
    then one iteration after the other. A block that outlives its part lives at the beginning of
    each iteration that may come next, too."""
    starts, now = [], 0
    for part in parts:
        starts.append(now)
        now += max(len(part), 1) if part.role != LATE else 0
    bodies = [
        (start, max(len(part), 1), i)
        for i, (part, start) in enumerate(zip(parts, starts, strict=True))
        if part.role == BODY
    ]
    pieces: list[NDArray[np.int64]] = []
    first = 0
    for i, (part, start) in enumerate(zip(parts, starts, strict=True)):
        born = np.arange(len(part), dtype=np.int64)
        over = part.over.astype(np.int64)
        # It meets the block that the same request gets in the next iteration.
        itself = (part.role == BODY) & (over > born)
        if part.role != LATE:
            begins = np.where(itself, 0, born)
            pieces.append(np.stack([first + born, start + begins, start + part.end]))
        for begin, length, body in bodies:
            there = (over > 0) & ~(itself & (body == i))
            ends = begin + np.minimum(over[there], length)
            pieces.append(np.stack([first + born[there], np.full(len(ends), begin), ends]))
        first += len(part)
    joined = np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), np.int64)
    block, birth, death = joined[:, np.argsort(joined[0], kind="stable")]
    return Lives(block, birth, death)
