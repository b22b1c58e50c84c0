"""An account of mapped memory that is kept from outside, slow and obvious.

`LedgerDevice` is a simulated device. Whatever it does stands in its log `calls`, and `PageLedger`
reads that log at once, entry by entry. The test tells the ledger what the allocator hands out and
takes back. So it knows which piece of which page every block has, whichever addresses the page is
mapped at, and raises `RuleError` where

- memory is handed out that is not mapped, has no access, or is somebody's already;
- memory goes to a stream that does not wait for those who used it before;
- addresses are unmapped that a live block lies at, or that unfinished work uses;
- a page is released that is mapped;
- the allocator's figures are not those of the log, or anything is left after `close()`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import bfc

#: How `page_stats` names what the log calls otherwise.
COUNTERS = {
    "create": "creates",
    "map": "maps",
    "access": "set_accesses",
    "unmap": "unmaps",
    "release": "releases",
}


class RuleError(AssertionError):
    """A rule does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RuleError(what)


class LedgerDevice(bfc.SimulatedSubAllocator):
    """A simulated device that tells its ledger of each call when it is over.

    With `is_late`, work on a stream may be unfinished even while no stream is held: the allocator
    must then order streams as on a GPU. Such a device says `asynchronous` always.
    """

    def __init__(self, capacity: int | str, *, is_late: bool = False, **options: Any) -> None:
        super().__init__(capacity, **options)
        self.is_late = is_late
        self.ledger: PageLedger | None = None
        #: The page of each entry "map" of the log, by its index there.
        self.page_of_entry: dict[int, int] = {}

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        return self.is_late or bool(self._held)

    def is_held(self, stream: int) -> bool:
        return stream in self._held

    def tell(self) -> None:
        if self.ledger is not None:
            self.ledger.follow()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block = super().alloc(alignment, nbytes)
        self.tell()
        return block

    def free(self, address: int, nbytes: int) -> None:
        super().free(address, nbytes)
        self.tell()

    def reserve(self, nbytes: int) -> int | None:
        address = super().reserve(nbytes)
        self.tell()
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        super().unreserve(address, nbytes)
        self.tell()

    def create(self, nbytes: int) -> int | None:
        page = super().create(nbytes)
        self.tell()
        return page

    def release(self, page: int) -> None:
        super().release(page)
        self.tell()

    def map(self, address: int, pages: Sequence[int]) -> None:
        first = len(self.calls)
        asked = iter(pages)
        try:
            super().map(address, pages)
        finally:
            for at in range(first, len(self.calls)):
                kind, _nbytes, place = self.calls[at]
                if kind == "map" and place is not None:
                    self.page_of_entry[at] = next(asked)
            self.tell()

    def set_access(self, address: int, nbytes: int) -> None:
        super().set_access(address, nbytes)
        self.tell()

    def unmap(self, address: int, nbytes: int) -> None:
        super().unmap(address, nbytes)
        self.tell()

    def order(self, first: int, then: int) -> None:
        if self.is_held(first) and not self.is_held(then):
            self.hold(then)  # it cannot be done before the other is
        if self.ledger is not None:
            self.ledger.ordered(first, then)

    def hold(self, stream: bfc.StreamLike) -> None:
        if self.ledger is not None and not self.is_held(int(stream)):
            self.ledger.finished(int(stream))
        super().hold(stream)

    def finish(self, stream: bfc.StreamLike) -> None:
        if self.ledger is not None:
            self.ledger.finished(int(stream))
        super().finish(stream)

    def wait(self, stream: int) -> None:
        super().wait(stream)
        if self.ledger is not None:
            self.ledger.finished(stream)


@dataclass(eq=False)
class Block:
    """What was handed out."""

    ptr: int
    nbytes: int
    streams: set[int]
    is_live: bool = True
    #: After it was given back: how far each stream was that used it.
    stamps: dict[int, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes at {self.ptr:#x} of streams {sorted(self.streams)}"


@dataclass(eq=False, order=False)
class Piece:
    """The part of a block, live or given back, that lies in one page."""

    low: int
    high: int
    block: Block


@dataclass(eq=False)
class Mapping:
    """A page at an address, and who used it there."""

    start: int
    page: int
    nbytes: int
    has_access: bool = False
    stamps: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class PageLedger:
    """The account. See the top of this file."""

    def __init__(self, device: LedgerDevice, allocator: Any) -> None:
        require(not device.pages, "the allocator has made pages before anybody asked")
        self.device = device
        self.allocator = allocator
        self.reservations: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.live: dict[int, Block] = {}
        self._mappings: dict[int, Mapping] = {}
        self._starts: list[int] = []
        self._times_mapped: Counter[int] = Counter()
        #: The pieces of each page, by address inside the page. None overlaps another.
        self._pieces: dict[int, list[Piece]] = {}
        #: How far each stream has come, and what it knows of others: by `order`, or from the host.
        self._clocks: dict[int, Counter[int]] = {}
        self._host: Counter[int] = Counter()
        self._read = 0
        self._faults: list[RuleError] = []
        device.ledger = self
        self.read()

    # -- the log ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the log in the middle of a call of the allocator, which must not get an error of
        ours from its source: a fault is raised later."""
        try:
            self._read_on()
        except RuleError as fault:
            self._faults.append(fault)

    def read(self) -> None:
        """Enter what the device has done since. Raises the first fault of the log."""
        self._read_on()
        if self._faults:
            raise self._faults[0]

    def _read_on(self) -> None:
        while self._read < len(self.device.calls):
            at = self._read
            self._read += 1
            kind, nbytes, place = self.device.calls[at]
            if place is not None:
                self.counts[kind] += 1
                self._enter(at, kind, nbytes, place)

    def _enter(self, at: int, kind: str, nbytes: int, place: int) -> None:
        if kind == "reserve":
            self.reservations[place] = nbytes
        elif kind == "unreserve":
            require(self.reservations.pop(place, None) == nbytes, "no such reservation")
            inside = [it for it in self._starts if place <= it < place + nbytes]
            require(not inside, f"addresses go back with pages at {inside[:1]}")
        elif kind == "create":
            self.pages[place] = nbytes
        elif kind == "release":
            require(not self._times_mapped[place], f"page {place} is released while mapped")
            self._forget_page(place)
        elif kind == "map":
            self._map(place, self.device.page_of_entry[at], nbytes)
        elif kind == "access":
            for mapping in self._inside(place, nbytes):
                mapping.has_access = True
        elif kind == "unmap":
            self._unmap(place, nbytes)
        elif kind == "alloc":  # a whole block is a page that lies at one place for ever
            self._map(place, -place, nbytes)
            self._mappings[place].has_access = True
        elif kind == "free":
            self._unmap(place, nbytes, waits=True)
            self._pieces.pop(-place, None)

    def _forget_page(self, page: int) -> None:
        for piece in self._pieces.pop(page, ()):
            self._require_finished(piece.block, f"page {page} is released")
        del self.pages[page]

    def _map(self, address: int, page: int, nbytes: int) -> None:
        require(self.pages.get(page, nbytes) == nbytes, "the log has another size of the page")
        insort(self._starts, address)
        self._mappings[address] = Mapping(address, page, nbytes)
        self._times_mapped[page] += 1

    def _unmap(self, address: int, nbytes: int, waits: bool = False) -> None:
        for mapping in self._inside(address, nbytes):
            low, high = mapping.start, mapping.end
            under = [it for it in self.live.values() if it.ptr < high and it.ptr + it.nbytes > low]
            require(not under, f"{low:#x} is unmapped under {under and under[0]}")
            for stream, stamp in mapping.stamps.items():
                require(
                    waits or self.is_finished(stream, stamp),
                    f"{mapping.start:#x} is unmapped while stream {stream} may use it",
                )
            del self._mappings[mapping.start]
            self._starts.remove(mapping.start)
            self._times_mapped[mapping.page] -= 1

    def _inside(self, address: int, nbytes: int) -> list[Mapping]:
        """The mappings that begin in a range of addresses."""
        first = bisect_left(self._starts, address)
        last = bisect_left(self._starts, address + nbytes)
        return [self._mappings[start] for start in self._starts[first:last]]

    # -- what the allocator hands out and takes back ----------------------------------------------

    def take(self, ptr: int, stream: int = 0) -> Block:
        """The allocator has handed out memory. Call it before anything else is asked of it."""
        self.read()
        require(ptr not in self.live, f"{ptr:#x} is handed out twice")
        nbytes = self.allocator.allocated_size(ptr)
        require(nbytes >= self.allocator.requested_size(ptr), "fewer bytes than requested")
        block = Block(ptr, nbytes, {stream})
        for page, low, high in self._places(ptr, nbytes):
            self._put(page, Piece(low, high, block), stream)
        self.live[ptr] = block
        return block

    def record(self, ptr: int, stream: int) -> None:
        """`record_stream` was called."""
        self.live[ptr].streams.add(stream)

    def give_back(self, ptr: int) -> None:
        """The allocator is to take memory back: call it before that is asked."""
        self.read()
        block = self.live.pop(ptr)
        for stream in block.streams:
            self._clock(stream)[stream] += 1
            block.stamps[stream] = self._clock(stream)[stream]
        for mapping in self._under(ptr, block.nbytes):
            mapping.stamps.update(block.stamps)
        block.is_live = False

    def _places(self, ptr: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Page, and first and last byte in it, of each part of a run of addresses."""
        at = ptr
        for mapping in self._under(ptr, nbytes):
            require(mapping.start <= at, f"{at:#x} is handed out with no page behind it")
            require(mapping.has_access, f"{at:#x} is handed out without access")
            end = min(mapping.end, ptr + nbytes)
            yield mapping.page, at - mapping.start, end - mapping.start
            at = end
        require(at == ptr + nbytes, f"{at:#x} is handed out with no page behind it")

    def _under(self, ptr: int, nbytes: int) -> list[Mapping]:
        """The mappings that a run of addresses touches."""
        first = max(0, bisect_right(self._starts, ptr) - 1)
        last = bisect_left(self._starts, ptr + nbytes)
        touched = [self._mappings[start] for start in self._starts[first:last]]
        return [mapping for mapping in touched if mapping.end > ptr]

    def _put(self, page: int, new: Piece, stream: int) -> None:
        """Lay a piece into a page, in place of what was given back before."""
        kept = []
        for old in self._pieces.get(page, ()):
            if old.high <= new.low or old.low >= new.high:
                kept.append(old)
                continue
            fault = ""  # few texts are read, and each would be made a hundred thousand times
            if old.block.is_live:
                fault = f"are handed out: {old.block} has them"
            for user, stamp in old.block.stamps.items():
                if not fault and user != stream and not self._knows(stream, user, stamp):
                    fault = f"go to stream {stream}, which does not wait for stream {user}"
            if fault:
                raise RuleError(f"bytes {new.low} to {new.high} of page {page} {fault}")
            if old.low < new.low:
                kept.append(Piece(old.low, new.low, old.block))
            if old.high > new.high:
                kept.append(Piece(new.high, old.high, old.block))
        kept.append(new)
        kept.sort(key=lambda piece: piece.low)
        self._pieces[page] = kept

    # -- streams ----------------------------------------------------------------------------------

    def _clock(self, stream: int) -> Counter[int]:
        return self._clocks.setdefault(stream, Counter())

    def ordered(self, first: int, then: int) -> None:
        """What is queued on `then` from now on runs after what is queued on `first` now."""
        self._clocks[then] = self._clock(then) | self._clock(first)

    def finished(self, stream: int) -> None:
        """All that is queued on a stream has run, and all that it has waited for."""
        self._host |= self._clock(stream)

    def is_finished(self, stream: int, stamp: int) -> bool:
        return not self._may_be_late(stream) or self._host[stream] >= stamp

    def _may_be_late(self, stream: int) -> bool:
        return self.device.is_held(stream)

    def _knows(self, stream: int, other: int, stamp: int) -> bool:
        return self.is_finished(other, stamp) or self._clock(stream)[other] >= stamp

    def _require_finished(self, block: Block, what: str) -> None:
        require(not block.is_live, f"{what} under {block}")
        for stream, stamp in block.stamps.items():
            require(
                self.is_finished(stream, stamp), f"{what} while stream {stream} may use {block}"
            )

    # -- what must hold ---------------------------------------------------------------------------

    @property
    def mapped_slots(self) -> int:
        return sum(it.page > 0 for it in self._mappings.values())

    def pages_in_use(self) -> int:
        """Pages of which a live block has a byte."""
        return sum(
            any(it.block.is_live for it in pieces)
            for page, pieces in self._pieces.items()
            if page > 0
        )

    def examine(self) -> None:
        """The log, the device and the allocator agree. A lost slot may differ: see `lost_slots`."""
        self.read()
        self.allocator.check()
        require(self.reservations == self.device.reservations, "reservations differ")
        require(self.pages == self.device.pages, "pages differ")
        places = {start: it.page for start, it in self._mappings.items() if it.page > 0}
        require(places == self.device.mappings, "mappings differ")
        stats = self.allocator.stats()  # which asks fences: first
        figures = self.allocator.page_stats()
        self._equal(figures, "pages", len(self.pages))
        require(set(self.pages.values()) <= {figures["page_size"]}, "a page of another size")
        reserved = figures["pages"] * figures["page_size"] + sum(self.device.live.values())
        require(
            stats.bytes_reserved == reserved,
            f"bytes_reserved is {stats.bytes_reserved}, and the pages have {reserved}",
        )
        in_use = stats.bytes_in_use - stats.bytes_waiting_for_streams
        live = sum(block.nbytes for block in self.live.values())
        require(in_use == live, f"bytes_in_use is {in_use}, not {live}")
        require(figures["pages_owned"] >= self.pages_in_use(), "a page in use is not owned")
        if not stats.bytes_waiting_for_streams:
            self._equal(figures, "pages_owned", self.pages_in_use())

    def examine_counters(self) -> None:
        """Where no call has failed: each counter, too."""
        figures = self.allocator.page_stats()
        for kind, name in COUNTERS.items():
            self._equal(figures, name, self.counts[kind])
        self._equal(figures, "slots_mapped", self.mapped_slots)
        self._equal(figures, "lost_slots", 0)

    def _equal(self, figures: dict[str, Any], name: str, expected: int) -> None:
        require(figures[name] == expected, f"page_stats: {name} is {figures[name]}, not {expected}")

    def examine_closed(self) -> None:
        """After `close()` the driver has nothing of this allocator."""
        self.read()
        left = (self.pages, self._mappings, self.reservations, self.device.live)
        require(not any(left), f"after close() the driver still has {left}")
        require(self.device.live_bytes == 0, "after close() memory is live")
