"""The records that the model of PyTorch's allocator keeps. Numbers in brackets are the sections of
the description of PyTorch's allocator."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bfc_slow_models.torch_words import DEFAULT_POOL, Block, Pool, Segment

if TYPE_CHECKING:
    from bfc_slow_models.torch_ranges import Range

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
MIN_BLOCK = 512
SMALL_SEGMENT = LARGE_GRANULE = 2 * MIB
STATES = ("inactive", "active_pending_free", "active_allocated")


def round_up(size: int, granule: int) -> int:
    return -(-size // granule) * granule


@dataclass
class Stat:
    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        self.allocated += max(amount, 0)
        self.freed += max(-amount, 0)


@dataclass
class PrivatePool:
    """A private pool [2.14]. `segments` counts what it has from the device: with ranges, upstream
    counts the requests that mapped and the blocks that were unmapped, ours the pages [2.16]."""

    id: Pool
    references: int = 1
    segments: int = 0
    sub_pools: tuple[SubPool, ...] = ()

    def __post_init__(self) -> None:
        self.sub_pools = SubPool("small_pool", self), SubPool("large_pool", self)


@dataclass(eq=False)
class SubPool:
    """Free blocks of one kind. `searches` is what ages are counted in [2.8]."""

    kind: str
    owner: PrivatePool | None = None
    free: list[Chunk] = field(default_factory=list)
    #: Addresses of ranges without memory.
    unmapped: list[Chunk] = field(default_factory=list)
    searches: int = 0

    @property
    def id(self) -> Pool:
        return DEFAULT_POOL if self.owner is None else self.owner.id

    def in_order(self) -> list[Chunk]:
        return sorted(
            self.free,
            key=lambda chunk: (chunk.stream, chunk.size, chunk.number, chunk.address),
        )

    def put(self, chunk: Chunk) -> None:
        chunk.born = self.searches
        self.free.append(chunk)


@dataclass(eq=False)
class Chunk:
    """A block [1.3]. `segment` is the list of all chunks of its segment, in address order."""

    address: int
    size: int
    stream: int
    pool: SubPool
    segment: list[Chunk] = field(default_factory=list)
    requested: int = 0
    allocated: bool = False
    events: int = 0
    uses: set[int] = field(default_factory=set)
    #: Uses on other streams that were recorded in a scope [2.15].
    scope_uses: set[int] = field(default_factory=set)
    #: The last nodes of a graph that use it, from its free in a capture on.
    markers: set[int] = field(default_factory=set)
    born: int = 0
    #: Where it is a part of an expandable segment; only there, memory may be missing.
    range: Range | None = None
    mapped: bool = True
    #: Counts segments and ranges as they come; always 0 where that does not matter.
    number: int = 0

    @property
    def is_split(self) -> bool:
        return len(self.segment) > 1

    @property
    def is_active(self) -> bool:
        return self.allocated or self.events > 0 or bool(self.uses)

    @property
    def age(self) -> int:
        return self.pool.searches - self.born


@dataclass
class Request:
    """A request on its way through the ladder of tries [2.5]."""

    nbytes: int
    size: int
    stream: int
    pool: SubPool
    grow_by: int
    #: Whether it may be served from expandable segments.
    expandable: bool = False


@dataclass(frozen=True)
class Scope:
    """Allocations on these streams go to this pool."""

    pool: PrivatePool
    streams: str | int

    def takes(self, stream: int) -> bool:
        return self.streams == "all" or self.streams == stream


def mapped_runs(segment: list[Chunk]) -> list[list[Chunk]]:
    """The parts of a segment that have memory: of an ordinary one, all of it."""
    runs = itertools.groupby(segment, key=lambda chunk: chunk.mapped)
    return [list(run) for mapped, run in runs if mapped]


def segment_of(chunks: list[Chunk]) -> Segment:
    """A segment in the words of a snapshot."""
    active = [chunk for chunk in chunks if chunk.is_active]
    return Segment(
        address=chunks[0].address,
        total_size=sum(chunk.size for chunk in chunks),
        requested_size=sum(chunk.requested for chunk in active),
        allocated_size=sum(chunk.size for chunk in active if chunk.allocated),
        active_size=sum(chunk.size for chunk in active),
        stream=chunks[0].stream,
        segment_type=chunks[0].pool.kind.removesuffix("_pool"),
        is_expandable=chunks[0].range is not None,
        segment_pool_id=chunks[0].pool.id,
        blocks=[
            Block(
                address=chunk.address,
                size=chunk.size,
                requested_size=chunk.requested,
                state=STATES[chunk.allocated + chunk.is_active],
            )
            for chunk in chunks
        ],
    )
