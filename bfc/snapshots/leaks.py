"""What is live, whose it is, and the lines of Python that allocated it."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Self

from bfc.libraries import frame_of_rows
from bfc.snapshots.columns import CHUNK, STATES, RegionColumns
from bfc.snapshots.snapshot import Frame
from bfc.units import format_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_SHOWN = 10
IN_USE = STATES.index("in use")


@dataclass(frozen=True)
class Leak:
    """An allocation that is live.

    Attributes
    ----------
    ptr : int
        Its address.
    nbytes : int
        The bytes that were asked for.
    stream : int
        The stream that it was allocated for.
    frames : tuple of Frame
        The lines that allocated it, innermost first; empty if they were not recorded, or if it was
        not allocated from Python, but by a replay, say.
    owner : str
        Whose it is (`bfc.owner`); "" if nobody's.
    """

    ptr: int
    nbytes: int
    stream: int
    frames: tuple[Frame, ...] = ()
    owner: str = ""


class Leaks(tuple[Leak, ...]):
    """What is live in an allocator, in address order. `print()` shows the largest places first.

    Attributes
    ----------
    allocator : str
        The repr() of the allocator.
    """

    allocator: str

    def __new__(cls, found: Iterable[Leak] = (), allocator: str = "an allocator") -> Self:
        made = super().__new__(cls, found)
        made.allocator = allocator
        return made

    def to_frame(self) -> DataFrame:
        """The allocations as a table of pandas.

        Returns
        -------
        pandas.DataFrame
            A column for each attribute of `Leak`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.
        """
        return frame_of_rows(Leak, self)

    def __str__(self) -> str:
        if not self:
            return f"nothing is live in {self.allocator}"
        return describe(self.allocator, self, "lines are not known: record_history() keeps them")


def leaks_in(columns: RegionColumns, allocator: str) -> Leaks:
    """The leaks in a snapshot's columns."""
    found = []
    rows, owners = CHUNK.iter_unpack(columns.chunks), columns.owners
    for row, frames in zip(rows, columns.chunk_frames or repeat(()), strict=False):
        ptr, _size, requested, _last, stream, _count, _number, state, _tag, owner = row
        if state == IN_USE:
            found.append(Leak(ptr, requested, stream, frames, owners[owner]))
    return Leaks(found, allocator)


def describe(allocator: str, leaks: Sequence[Leak], unknown: str) -> str:
    """Leaks as a text, grouped by place and owner, the largest group first. `unknown` is shown in
    place of unknown lines."""
    places: defaultdict[tuple[str, tuple[Frame, ...]], list[Leak]] = defaultdict(list)
    for leak in leaks:
        places[leak.owner, leak.frames].append(leak)
    ordered = sorted(places.items(), key=lambda item: -sum(leak.nbytes for leak in item[1]))
    lines = [f"{amount(leaks)} still live in {allocator}"]
    for (owner, frames), together in ordered[:MOST_SHOWN]:
        whose = f" of {owner!r}," if owner else ""
        lines.append(f"\n{amount(together)}{whose} the first at {together[0].ptr:#x}, allocated")
        lines += [text_of(frame) for frame in frames] or [f"  {unknown}"]
    if len(ordered) > MOST_SHOWN:
        lines.append(f"\nand from {len(ordered) - MOST_SHOWN} more places")
    return "\n".join(lines)


def amount(leaks: Sequence[Leak]) -> str:
    """The number of leaks, and their bytes, as a text."""
    plural = "" if len(leaks) == 1 else "s"
    return f"{len(leaks)} allocation{plural}, {format_bytes(sum(leak.nbytes for leak in leaks))},"


def text_of(frame: Frame) -> str:
    """A frame as a traceback shows it."""
    line = linecache.getline(frame.filename, frame.line).strip()
    place = f'  in {frame.name}, "{frame.filename}", line {frame.line}'
    return f"{place}\n    {line}" if line else place
