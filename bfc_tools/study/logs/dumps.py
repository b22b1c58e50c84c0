"""The dumps of one log, put together from their lines.

Lines of several processes may stand between each other. A chunk then belongs to the dump of which
a region ends where the chunk begins. That this was right is not taken for granted: `Dump.faults`
compares all figures that a dump has twice.
"""

from __future__ import annotations

from bfc_tools.study.logs.dump import MOST_CHUNKS, Dump, Region
from bfc_tools.study.logs.sizes import Printed
from bfc_tools.study.logs.words import (
    BinOf,
    Chunk,
    Figures,
    Head,
    Map,
    Refused,
    RegionOf,
    Wanted,
    Word,
)

#: A dump that has had none of so many lines is over, cut off, or pushed aside.
STALE = 32
#: The most dumps of one process that are open at once.
MOST_OPEN = 16


class Dumps:
    """Takes what the lines of one process say. `done` has the dumps that are over, the newest
    last; of all but the last one the chunks are not kept."""

    def __init__(self) -> None:
        self.done: list[Dump] = []
        self._open: list[_Open] = []
        self._asked: list[Refused] = []
        self._clock = 0

    def take(self, word: Word, line: int) -> Dump | None:
        """Takes what a line says. Returns the dump that it belongs to, or None."""
        self._clock += 1
        if isinstance(word, Refused):
            if not word.may_fail:
                self._asked = [*self._asked[1 - MOST_OPEN :], word]
            return None
        if isinstance(word, Head):
            return self._begin(word.allocator, line).dump
        if isinstance(word, Map) and not self._open:
            return None
        is_chunk_of_one = isinstance(word, Chunk) and len(self._open) == 1
        it = self._open[0] if is_chunk_of_one else self._for(word, line)
        if it is None:
            return None
        it.fed = self._clock
        it.dump.last_line = line
        it.take(word)
        if isinstance(word, Map):
            self._end(it)
        return it.dump

    def waits_for(self, word: Word) -> bool:
        """Whether a line may belong to one of the open dumps."""
        return any(it.fits(word) for it in self._open)

    def finish(self) -> None:
        """Ends all that is open."""
        for it in list(self._open):
            self._end(it)

    def _begin(self, allocator: str, line: int) -> _Open:
        it = _Open(Dump(allocator, line), self._clock)
        at = next((n for n, one in enumerate(self._asked) if one.allocator == allocator), None)
        if at is not None:
            asked = self._asked.pop(at)
            it.dump.asked = asked.rounded or asked.asked
        for other in list(self._open):
            if other.has_end or len(self._open) >= MOST_OPEN:
                self._end(other)
        self._open.append(it)
        return it

    def _end(self, it: _Open) -> None:
        self._open.remove(it)
        it.end()
        it.dump.is_whole = not it.dump.faults()
        for before in self.done:  # memory is bounded whatever a log holds
            if self._replaces(it.dump, before):
                before.regions = []
        if len(self.done) >= 4 * MOST_OPEN:
            del self.done[0]
        self.done.append(it.dump)

    def _replaces(self, newer: Dump, before: Dump) -> bool:
        """Whether the chunks of a dump are of no use any more: it is of the same process."""
        is_later = before.last_line < newer.line and before.allocator == newer.allocator
        is_better = newer.is_whole or not before.is_whole
        return (is_later and is_better) or len(self.done) >= MOST_OPEN

    def _for(self, word: Word, line: int) -> _Open | None:
        """The open dump that a line belongs to: of several, the one that has waited longest."""
        fits = [it for it in self._open if it.fits(word)]
        if not fits and isinstance(word, (RegionOf, Chunk)):
            if self._open:
                newest = max(self._open, key=lambda it: it.fed)
                return newest if isinstance(word, Chunk) or not newest.has_end else None
            return self._begin("", line)  # its beginning is missing
        if not fits:
            return None
        fresh = [it for it in fits if self._clock - it.fed <= STALE]
        chosen = min(fresh, key=lambda it: it.fed) if fresh else max(fits, key=lambda it: it.fed)
        others = [it for it in self._open if self._clock - it.fed <= STALE]
        if len(others) > 1:
            for it in others:
                it.dump.is_mixed = True
        return chosen


class _Open:
    """A dump whose lines still come."""

    def __init__(self, dump: Dump, clock: int) -> None:
        self.dump = dump
        self.fed = clock
        self.has_end = False
        self._stats: set[str] = set()

    def fits(self, word: Word) -> bool:
        """Whether a line may be the next one of this dump."""
        dump = self.dump
        if isinstance(word, BinOf):
            return word.number not in dump.bins and not dump.regions
        if isinstance(word, Wanted):
            return not dump.regions
        if isinstance(word, RegionOf):
            return not self.has_end and (not dump.regions or _is_over(dump.regions[-1]))
        if isinstance(word, Chunk):
            return not self.has_end and bool(dump.regions) and _follows(dump.regions[-1], word)
        if isinstance(word, Figures):
            if word.is_stats:
                return not (word.values.keys() & self._stats)
            return not (word.values.keys() & dump.figures.keys() - {"asked", "free", "available"})
        return isinstance(word, Map) and self.has_end

    def take(self, word: Word) -> None:
        dump = self.dump
        if isinstance(word, BinOf):
            dump.bins[word.number] = (word.chunks, word.in_use)
        elif isinstance(word, Wanted):
            dump.asked = dump.asked or word.asked
        elif isinstance(word, RegionOf):
            dump.regions.append(Region(word.nbytes))
        elif isinstance(word, Chunk):
            self._chunk(word)
        elif isinstance(word, Figures):
            self._figures(word)
        elif isinstance(word, Map):
            dump.occupancy = word.text

    def end(self) -> None:
        self.dump.regions = [region for region in self.dump.regions if region.address]

    def _figures(self, word: Figures) -> None:
        self.has_end = True
        if word.is_stats:
            self._stats |= word.values.keys()
        for name, value in word.values.items():
            known: Printed | None = self.dump.figures.get(name)
            if known is None or value.off < known.off:
                self.dump.figures[name] = value
        if word.grows is not None:
            self.dump.grows = word.grows
        self.dump.end = word.end or self.dump.end

    def _chunk(self, chunk: Chunk) -> None:
        dump = self.dump
        region = dump.regions[-1] if dump.regions else None
        if region is None or (region.address and not _may_follow(region, chunk)):
            region = Region()
            dump.regions.append(region)
        if dump.chunks >= MOST_CHUNKS:
            dump.left_out += 1
            return
        if region.address and chunk.address != region.end:
            region.has_gaps = True
        number = len(region.address)
        region.address.append(chunk.address)
        region.nbytes.append(chunk.nbytes)
        region.in_use.append(chunk.in_use)
        if chunk.name:
            region.names[number] = chunk.name
        if chunk.waits:
            region.waits.add(number)
        region.is_ended = chunk.is_last
        dump.has_order |= chunk.successor is not None
        dump.chunks += 1


def _is_over(region: Region) -> bool:
    covered = region.end - region.start
    return region.is_ended or (region.size is not None and covered >= region.size)


def _follows(region: Region, chunk: Chunk) -> bool:
    """Whether a chunk is the very next one of a region."""
    if not region.address:
        return region.size is None or chunk.nbytes <= region.size
    return not region.is_ended and chunk.address == region.end and _may_follow(region, chunk)


def _may_follow(region: Region, chunk: Chunk) -> bool:
    """Whether a chunk may lie in a region, behind its last chunk: lines may be missing between. A
    region whose size no line says goes on only without a gap."""
    if region.is_ended:
        return False
    if region.size is None:
        return chunk.address == region.end
    inside = chunk.address + chunk.nbytes <= region.start + region.size
    return chunk.address >= region.end and inside
