"""What an allocator needs of a plan: its places, and which requests they are for, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.errors import PlanError
from bfc.libraries import NDArray, np
from bfc.plans.parts import BODY, FOREVER, HEAD, LATE, Part

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class Order:
    """Requests of one stream."""

    stream: int  # its index in `Served.streams`
    place: NDArray[np.uint32]  # of each
    end: NDArray[np.uint32]  # the request of this order before which the block is freed


@dataclass(frozen=True, eq=False)
class Served:
    """A plan as an allocator takes it."""

    offset: NDArray[np.uint64]  # of each place
    size: NDArray[np.uint64]
    base: int  # where the region of what is never freed ends
    span: int  # where that of all else ends
    once: NDArray[np.uint8]  # of each place: 1 if a block there outlives all iterations
    streams: list[int]  # their numbers in the recording
    #: Begin, end and stream of what each stream may use, all of it in one of the regions.
    areas: list[tuple[int, int, int]]
    head: list[Order]  # before the first step
    first: dict[str, list[Order]]  # of the first step of a kind
    later: dict[str, list[Order]]  # of each later one
    #: Of kinds whose lengths vary, for each length: the place of the request that tells it, how
    #: many bytes a length of 1 is, the longest for which there is room, the longest that was
    #: recorded, and whether more room can be made when it is told.
    lengths: dict[str, list[tuple[int, int, int, int, bool]]]
    followers: dict[str, str]  # the kind that always comes after each, where one does
    #: The bytes of each place before they are rounded, as a polynomial of the length, shape
    #: (places, 3), and which of its kind's lengths that is. Empty if there are no lengths.
    growth: NDArray[np.int64]
    follows: NDArray[np.uint32]


def served(parts: Sequence[Part], base: int, span: int, apart: bool) -> Served:
    """Prepares the parts of a plan. With `apart`, streams share no memory.

    Raises PlanError if the places of two streams interleave then.
    """
    offset, size, stream = (
        np.ascontiguousarray(np.concatenate([getattr(part, name) for part in parts]))
        for name in ("offset", "size", "stream")
    )
    streams = np.unique(stream).tolist() or [0]
    firsts = np.cumsum([0, *map(len, parts)])
    known = {part.kind: i for i, part in enumerate(parts) if part.role == BODY}
    late = {part.kind: i for i, part in enumerate(parts) if part.role == LATE}
    orders: dict[str, list[Order]] = {}
    first: dict[str, list[Order]] = {}
    for kind, i in known.items():
        orders[kind] = _orders(parts[i], int(firsts[i]), streams)
        first[kind] = orders[kind]
        if kind in late:
            j = late[kind]
            first[kind] = _merged(parts[i], parts[j], int(firsts[i]), int(firsts[j]), streams)
    head = _orders(parts[0], 0, streams) if parts[0].role == HEAD else []
    areas = _areas(offset, size, np.searchsorted(streams, stream), base, span, len(streams), apart)
    lengths = {
        kind: [
            (int(firsts[i]) + key.request, key.unit, key.longest, key.recorded, bool(key.clear))
            for key in told.keys
        ]
        for kind, i in known.items()
        if (told := parts[i].lengths) is not None
    }
    growth, follows = _growth(parts if lengths else ())
    once = np.concatenate([part.over == FOREVER for part in parts]).astype(np.uint8)
    return Served(
        offset,
        size,
        base,
        span,
        once,
        streams,
        areas,
        head,
        first,
        orders,
        lengths,
        {part.kind: part.follower for part in parts if part.follower},
        growth,
        follows,
    )


def _growth(parts: Sequence[Part]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """The polynomials of all places, constants where there are no lengths, and of which lengths."""
    rows, follows = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.uint32)]
    for part in parts:
        if part.lengths is not None:
            rows.append(part.lengths.growth)
            follows.append(part.lengths.follows)
            continue
        row = np.zeros((len(part), 3), np.int64)
        row[:, 0] = part.size
        rows.append(row)
        follows.append(np.zeros(len(part), np.uint32))
    return np.ascontiguousarray(np.concatenate(rows)), np.concatenate(follows)


def _orders(part: Part, begin: int, streams: list[int]) -> list[Order]:
    """A part's requests, by stream."""
    place = np.arange(begin, begin + len(part), dtype=np.uint32)
    return _by_stream(place, part.end.astype(np.int64), part.stream, streams)


def _merged(body: Part, late: Part, begin: int, late_begin: int, streams: list[int]) -> list[Order]:
    """The requests of a kind's first iteration: the body's, and between them the late ones."""
    key = np.concatenate([np.arange(len(body)), late.end - 0.5])
    order = np.argsort(key, kind="stable")
    place = np.concatenate(
        [np.arange(begin, begin + len(body)), np.arange(late_begin, late_begin + len(late))]
    ).astype(np.uint32)
    ends = np.searchsorted(key[order], body.end.astype(np.int64))
    end = np.concatenate([ends, np.full(len(late), len(order))])
    stream = np.concatenate([body.stream, late.stream])
    return _by_stream(place[order], end[order], stream[order], streams)


def _by_stream(
    place: NDArray[np.uint32],
    end: NDArray[np.int64],
    stream: NDArray[np.uint16],
    streams: list[int],
) -> list[Order]:
    orders = []
    for i, number in enumerate(streams):
        there = np.flatnonzero(stream == number)
        if len(there):
            ends = np.searchsorted(there, end[there]).astype(np.uint32)
            orders.append(Order(i, np.ascontiguousarray(place[there]), ends))
    return orders


def _areas(
    offset: NDArray[np.uint64],
    size: NDArray[np.uint64],
    stream: NDArray[np.intp],
    base: int,
    span: int,
    streams: int,
    apart: bool,
) -> list[tuple[int, int, int]]:
    """What each stream may use of each region."""
    regions = [(low, high) for low, high in ((0, base), (base, span)) if low < high]
    if not apart:
        return [(low, high, i) for i in range(streams) for low, high in regions]
    found = []
    for low, high in regions:
        here = []
        for i in range(streams):
            own = np.flatnonzero((stream == i) & (offset >= low) & (offset < high))
            if len(own):
                here.append((int(offset[own].min()), int((offset[own] + size[own]).max()), i))
        here.sort()
        if any(one[1] > other[0] for one, other in itertools.pairwise(here)):
            raise PlanError("places of different streams interleave")
        found += here
    return found
