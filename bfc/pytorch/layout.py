"""Where PyTorch's blocks lie: the segments as they change, and the requests that reproduce them."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bfc.errors import SettingsError
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.sizes import ENTRIES, MIN_BLOCK, MOST_SMALL, SMALL_SEGMENT
from bfc.pytorch.words import ALLOC, CONF, FREE_COMPLETED

#: A limit for the requests, of 1 MiB each, that fill holes in expandable segments of small blocks:
#: a few bytes of a file can claim a hole as large as all memory.
MOST_PIECES = 1 << 14

_LARGE = re.compile(r"large_segment_size_mb:[^,]*")


class Live(NamedTuple):
    """An allocation of the trace: its number, the bytes asked for, and the ordinals of its stream
    and of its private pool."""

    id: int
    size: int
    stream: int
    pool: int


class Columns:
    """The events of a trace that is being written, with their addresses, and what is live."""

    def __init__(self) -> None:
        self.op, self.id, self.stream = array("B"), array("L"), array("L")
        self.pool = array("H")
        self.size, self.addresses = array("Q"), array("Q")
        #: The entry of the history that each event comes from, and the current one; -1 for none.
        self.entries = array("q")
        self.entry = -1
        self.live: dict[int, Live] = {}
        #: Ordinals by stream handle: the default stream, then the others in order of first use.
        self.streams: dict[int, int] = {0: 0}
        self._in_order: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self.op)

    def allocate(self, address: int, size: int, stream: int, pool: int) -> None:
        """Adds an allocation on a stream (its handle), at an address where nothing is live, from a
        private pool (its number; 0: none)."""
        ordinal = self.streams.setdefault(stream, len(self.streams))
        made = self.live[address] = Live(self._next, size, ordinal, pool)
        insort(self._in_order, address)
        self._next += 1
        self._append(0, made, size, address)

    def free(self, address: int) -> None:
        """Adds the free of what is live at an address."""
        gone = self.live.pop(address)
        del self._in_order[bisect_left(self._in_order, address)]
        self._append(1, gone, 0, 0)

    def release(self, pool: int = 0) -> None:
        """Adds the release of what is cached, or of what one private pool caches."""
        self._append(2, Live(0, 0, 0, pool), 0, 0)

    def live_between(self, start: int, end: int) -> list[int]:
        """The addresses of live allocations that overlap [start, end)."""
        first = bisect_left(self._in_order, start)
        found = self._in_order[first : bisect_left(self._in_order, end, first)]
        if first:
            before = self._in_order[first - 1]
            if before + self.live[before].size > start:
                found.insert(0, before)
        return found

    def _append(self, op: int, what: Live, size: int, address: int) -> None:
        self.op.append(op)
        self.id.append(what.id)
        self.size.append(size)
        self.stream.append(what.stream)
        self.pool.append(what.pool)
        self.addresses.append(address)
        self.entries.append(self.entry)


@dataclass(slots=True)
class Block:
    """A live block. `size` is 0 if the file does not contain it."""

    address: int
    requested: int
    stream: int
    size: int = 0
    waiting: bool = False
    stack: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(slots=True)
class Span:
    """A segment, or a mapped part of an expandable one."""

    start: int
    end: int
    stream: int
    is_small: bool
    is_expandable: bool
    #: The number of its private pool; 0 for none.
    pool: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def owner(self) -> tuple[int, bool, int]:
        """What a reservation is made for."""
        return self.stream, self.is_small, self.pool


class Spans:
    """Segments that do not overlap, by address, as entries are undone.

    A look-up is O(log n), a change O(n).

    `add` and `cut` return False, and change nothing, if they contradict the segments.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = {span.start: replace(span) for span in spans}
        self._starts = sorted(self._spans)

    def all(self) -> Iterator[Span]:
        return (self._spans[start] for start in self._starts)

    def holding(self, address: int) -> Span | None:
        """The segment that an address lies in."""
        index = bisect_right(self._starts, address) - 1
        span = self._spans[self._starts[index]] if index >= 0 else None
        return span if span is not None and address < span.end else None

    def overlap(self, start: int, end: int) -> bool:
        """Whether a part of [start, end) lies in a segment."""
        above = bisect_left(self._starts, end)
        return above > 0 and self._spans[self._starts[above - 1]].end > start

    def add(self, new: Span) -> bool:
        """Adds a segment, and joins it to expandable neighbours on its stream."""
        if self.overlap(new.start, new.end):
            return False
        if new.is_expandable:
            above = bisect_left(self._starts, new.end)
            before = self._spans[self._starts[above - 1]] if above else None
            after = self._spans.get(new.end)
            if before is not None and before.end == new.start and _are_one(before, new):
                self._remove(before)
                new = replace(before, end=new.end)
            if after is not None and _are_one(new, after):
                self._remove(after)
                new = replace(new, end=after.end, is_small=after.is_small)
        self._insert(new)
        return True

    def cut(self, start: int, size: int, in_part: bool) -> bool:
        """Removes a whole segment, or a part of an expandable one."""
        span, end = self.holding(start), start + size
        if span is None or end > span.end:
            return False
        if not in_part and (span.start, span.end) != (start, end):
            return False
        self._remove(span)
        for rest in (replace(span, end=start), replace(span, start=end)):
            if rest.size:
                self._insert(rest)
        return True

    def _insert(self, span: Span) -> None:
        insort(self._starts, span.start)
        self._spans[span.start] = span

    def _remove(self, span: Span) -> None:
        del self._spans[span.start], self._starts[bisect_left(self._starts, span.start)]


def _are_one(first: Span, second: Span) -> bool:
    return (
        first.is_expandable
        and second.is_expandable
        and (first.stream, first.pool) == (second.stream, second.pool)
    )


class Sizes:
    """What the settings of a snapshot round requests to, and which blocks stay unsplit.

    >>> Sizes({}).rounded(1000), Sizes({"roundup_power2_divisions": {"1": 4}}).rounded(5000)
    (1024, 5120)
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        table = settings.get("roundup_power2_divisions")
        table = table if isinstance(table, dict) else {}
        named = [table.get(str(1 << interval), 0) for interval in range(ENTRIES)]
        self._settings = CachingSettings(
            roundup_power2_divisions=tuple(_divisions(value) for value in named),
            max_non_split_rounding=(large := _large_segment(settings)),
            large_segment_size=large,
        )
        most = settings.get("max_split_size")
        #: Blocks of at least this are not split.
        self.most_split = most if type(most) is int and most > 0 else 1 << 64
        self._pieces_left = MOST_PIECES

    def rounded(self, size: int) -> int:
        """The size of the block that a request needs."""
        return self._settings.round_size(size)

    def rounded_down(self, size: int) -> int:
        """The largest request up to `size` whose block has exactly its own size; 0 for none."""
        step = self._settings.step_for(size)
        return size // step * step

    @property
    def large_page(self) -> int:
        """The page size of expandable segments of large blocks."""
        return self._settings.large_segment_size

    def segment(self, size: int) -> int:
        """The size of the segment that a request gets if nothing is free (2.4)."""
        return self._settings.segment_size(size)

    def most_slack(self, span: Span) -> int:
        """How much larger a block may be than its request needs (2.10)."""
        return MIN_BLOCK - 1 if span.is_small or span.is_expandable else MOST_SMALL

    def pieces(self, size: int, span: Span) -> list[int] | None:
        """Requests whose blocks fill that many bytes of a segment; None if there are none, or
        too many (`MOST_PIECES`)."""
        if span.is_small and not self._can_be_cut(size, span):
            return None
        pieces = []
        while size:
            piece = self.rounded_down(min(size, MOST_SMALL) if span.is_small else size)
            if not span.is_small and 0 < size - piece <= MOST_SMALL:
                piece = self.rounded_down(max(size - MOST_SMALL - MIN_BLOCK, 0))
            if piece == 0 or (not span.is_small and piece <= MOST_SMALL):
                return None
            pieces.append(piece)
            size -= piece
        return pieces

    def _can_be_cut(self, size: int, span: Span) -> bool:
        """PyTorch's segments of small blocks have one size, except expandable ones. Those share one
        limit for the number of pieces."""
        if not span.is_expandable:
            return span.size == SMALL_SEGMENT
        needed = size // MOST_SMALL
        can_be = needed <= self._pieces_left
        self._pieces_left -= needed if can_be else 0
        return can_be


def _divisions(value: Any) -> int:
    is_one = type(value) is int and 1 < value < 1 << 64 and value.bit_count() == 1
    return value if is_one else 0


def _large_segment(settings: dict[str, Any]) -> int:
    """The large segment size that the text of the settings names, or the default."""
    text = settings.get(CONF)
    # Only this part is read: bfc may refuse other parts of the text.
    found = _LARGE.findall("".join(text.split())) if isinstance(text, str) else []
    try:
        return CachingSettings().apply(found[-1] if found else "", strict=True).large_segment_size
    except SettingsError:
        return CachingSettings().large_segment_size


@dataclass
class Layout:
    """The result of `lay_out`."""

    #: [event, address, size] of each segment, with the event for which it is taken.
    segments: list[list[int]] = field(default_factory=list)
    #: The segment of each allocation that lies in one.
    filled: list[Span] = field(default_factory=list)
    #: The number of segments whose blocks cannot be reproduced by requests.
    inexact: int = 0
    #: The number of allocations that lie in no segment.
    outside: int = 0
    #: The number of those blocks that lie over another one, and are not allocated.
    left_out: int = 0
    #: The number of blocks that may have been up to 1 MiB larger than they are made here.
    unsure: int = 0


def lay_out(
    spans: list[Span],
    live: dict[int, Block],
    history: Iterable[tuple[str, int, int]],
    sizes: Sizes,
    columns: Columns,
) -> Layout:
    """Writes events that reproduce the segments and blocks as they were before a history.

    Segment by segment, every block and every hole is allocated in address order; then the holes
    are freed. So each request finds nothing free except the rest of its own segment. With
    expandable segments the parts of one reservation are filled end to end, without the addresses
    between them: this is exact only if there is one part.

    A block that fits into no segment contradicts the segments. It is allocated before the holes
    are freed, so that it takes none of them. One that lies over a hole comes after that, and one
    that lies over another block is left out.
    """
    layout = Layout()
    placed, homeless = _placed(spans, live)
    layout.outside = len(homeless)
    layout.unsure = _find_sizes(spans, placed, history, sizes)
    holes: list[int] = []
    parts = Counter(span.owner for span in spans if span.is_expandable)
    for span in spans:
        blocks = placed[span.start]
        layout.filled += [span] * len(blocks)
        layout.segments.append([len(columns), span.start, span.size])
        filler = _Filler(span, sizes, columns, parts[span.owner] <= 1)
        holes += filler.fill(blocks)
        layout.inexact += not filler.is_exact
    homeless = _allocated(homeless, columns)
    for address in holes:
        columns.free(address)
    layout.left_out = len(_allocated(homeless, columns))
    layout.outside -= layout.left_out
    return layout


def _allocated(blocks: list[Block], columns: Columns) -> list[Block]:
    """Allocates blocks that lie in no segment. Returns those that lie over something live."""
    left = []
    for block in blocks:
        if columns.live_between(block.address, block.address + max(block.requested, 1)):
            left.append(block)
        else:
            columns.allocate(block.address, block.requested, block.stream, 0)
    return left


def _placed(
    spans: list[Span], live: dict[int, Block]
) -> tuple[dict[int, list[Block]], list[Block]]:
    """The live blocks of each segment by address, and those in no segment or over another block."""
    lookup = Spans(spans)
    placed: dict[int, list[Block]] = {span.start: [] for span in spans}
    homeless = []
    for address in sorted(live):
        block, span = live[address], lookup.holding(address)
        inside = placed[span.start] if span is not None else []
        reaches = address + max(block.requested, block.size, 1)
        below = inside[-1].address + max(inside[-1].requested, inside[-1].size, 1) if inside else 0
        if span is None or reaches > span.end or below > address:
            homeless.append(block)
        else:
            inside.append(block)
    return placed, homeless


def _find_sizes(
    spans: list[Span],
    placed: dict[int, list[Block]],
    history: Iterable[tuple[str, int, int]],
    sizes: Sizes,
) -> int:
    """Finds the size of every block that the history frees and whose size is not in the file.

    It is the rounded request, plus a rest that would have been too small to split off. If a hole
    follows, the first allocation in the hole shows where the hole begins. Without one, the block
    gets the smallest possible size. Returns the number of such blocks.
    """
    open_ends: dict[int, tuple[Block, int, int]] = {}
    for span in spans:
        blocks = placed[span.start]
        nexts = [*(block.address for block in blocks[1:]), span.end]
        for block, limit in zip(blocks, nexts, strict=False):
            if block.size:
                continue
            slack = sizes.most_slack(span)
            room = limit - block.address
            block.size = min(sizes.rounded(block.requested), room)
            if room - block.size <= slack or block.size >= sizes.most_split:
                block.size = room
            elif slack >= MIN_BLOCK:
                most = min(block.address + block.size + slack, limit)
                open_ends[block.address] = (block, most, limit)
    return _watch(open_ends, history)


def _watch(
    open_ends: dict[int, tuple[Block, int, int]], history: Iterable[tuple[str, int, int]]
) -> int:
    """Looks for the first allocation in the hole behind each of these blocks while the block lives.
    Returns the number of blocks for which there is none."""
    starts = sorted(open_ends)
    unsure = len(starts)
    for action, address, _ in history:
        if not starts:
            break
        if action == FREE_COMPLETED and address in open_ends:
            del open_ends[address], starts[bisect_left(starts, address)]
        elif action == ALLOC:
            index = bisect_right(starts, address) - 1
            if index < 0:
                continue
            block, most, limit = open_ends[starts[index]]
            if address < limit:
                if block.end <= address <= most:
                    block.size = address - block.address
                    unsure -= 1
                del open_ends[starts[index]], starts[index]
    return unsure


class _Filler:
    """Fills one segment."""

    def __init__(self, span: Span, sizes: Sizes, columns: Columns, is_alone: bool) -> None:
        self.span, self.sizes, self.columns = span, sizes, columns
        self.is_exact = is_alone

    def fill(self, blocks: list[Block]) -> list[int]:
        """Returns the addresses of what is to be freed once every segment is full."""
        tiles = self._tiles(blocks)
        if not self.span.is_expandable:
            self._take_segment(tiles)
        elif not self.span.is_small:
            tiles = self._without_small_holes(tiles)
        holes: list[int] = []
        loose: list[tuple[Block, list[int]]] = []
        for address, size, block in tiles:
            if block is None:
                holes += self._fill_up(address, size)
            elif size == block.size and self._fits(block):
                self._allocate(address, block.requested)
            else:
                loose.append((block, self._fill_up(address, size)))
        for block, fillers in loose:  # each is the only free block now, and is taken whole
            for address in fillers:
                self.columns.free(address)
            self._allocate(block.address, block.requested)
        return holes

    def _tiles(self, blocks: list[Block]) -> list[tuple[int, int, Block | None]]:
        """(address, bytes, live block or None) of every block and hole."""
        tiles: list[tuple[int, int, Block | None]] = []
        at = self.span.start
        for block in blocks:
            if block.address > at:
                tiles.append((at, block.address - at, None))
            tiles.append((block.address, block.size, block))
            at = block.end
        if at < self.span.end:
            tiles.append((at, self.span.end - at, None))
        return tiles

    def _without_small_holes(
        self, tiles: list[tuple[int, int, Block | None]]
    ) -> list[tuple[int, int, Block | None]]:
        """Adds small holes to the block before them: a request for such a hole would be served from
        another segment. The hole comes back when the block is cut off."""
        joined: list[tuple[int, int, Block | None]] = []
        for address, size, block in tiles:
            if block is None and size <= MOST_SMALL and joined and joined[-1][2] is not None:
                before, its_size, its_block = joined.pop()
                joined.append((before, its_size + size, its_block))
            else:
                joined.append((address, size, block))
        return joined

    def _fits(self, block: Block) -> bool:
        """Whether the block's own request yields a block of exactly its size."""
        spare = block.size - self.sizes.rounded(block.requested)
        is_last = block.end == self.span.end
        return spare == 0 or (is_last and 0 < spare <= self.sizes.most_slack(self.span))

    def _take_segment(self, tiles: list[tuple[int, int, Block | None]]) -> None:
        """Allocates and frees the whole segment if its first block would get another size."""
        address, size, block = tiles[0]
        pieces = self.sizes.pieces(size, self.span)
        first = (
            block.requested if block is not None and self._fits(block) else (pieces or [size])[0]
        )
        self.is_exact &= (self.sizes.rounded(first) <= MOST_SMALL) == self.span.is_small
        if self.sizes.segment(first) == self.span.size:
            return
        self.is_exact &= self.sizes.segment(self.span.size) == self.span.size
        self._allocate(address, self.span.size)
        self.columns.free(address)

    def _fill_up(self, address: int, size: int) -> list[int]:
        """Allocates all of a hole. Returns the addresses of the pieces."""
        pieces = self.sizes.pieces(size, self.span)
        if pieces is None:
            self.is_exact = False
            pieces = [size]
        made = []
        for piece in pieces:
            self._allocate(address, piece)
            made.append(address)
            address += piece
        return made

    def _allocate(self, address: int, size: int) -> None:
        if self.span.is_expandable:
            self.is_exact &= (self.sizes.rounded(size) <= MOST_SMALL) == self.span.is_small
        self.columns.allocate(address, size, self.span.stream, self.span.pool)
