"""What grew between two runs: groups of memory, moments, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.libraries import frame_of_rows
from bfc.snapshots.figures import NOBODY
from bfc.units import format_bytes, in_columns, parse_bytes
from bfc_tools.study.markdown import code, table
from bfc_tools.study.recorded_settings import shown

if TYPE_CHECKING:
    from pandas import DataFrame

#: How many rows of a table are printed.
SHOWN = 8
#: The most characters of a name in a table.
WIDEST = 60
KINDS = ("owner", "line", "size")
NO_LINE = "(no stack)"
HEADINGS = ("first", "second", "growth", "blocks")


@dataclass(frozen=True)
class Growth:
    """What one owner, one line or the blocks of one size hold, in each of two runs.

    Attributes
    ----------
    name : str
        The owner; the line, as in "/home/me/model.py:12 in forward"; or the size in bytes. "" is
        what has no owner, and what has no stack.
    bytes_a : int
        The bytes that were asked for and are live in the first run.
    bytes_b : int
        The same in the second run.
    count_a : int
        The number of these allocations in the first run.
    count_b : int
        The same in the second run.
    """

    name: str
    bytes_a: int = 0
    bytes_b: int = 0
    count_a: int = 0
    count_b: int = 0

    @property
    def bytes(self) -> int:
        """The bytes that the second run has more than the first; below 0 if it has fewer."""
        return self.bytes_b - self.bytes_a

    @property
    def count(self) -> int:
        """The allocations that the second run has more than the first."""
        return self.count_b - self.count_a

    def __neg__(self) -> Growth:
        return Growth(self.name, self.bytes_b, self.bytes_a, self.count_b, self.count_a)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            "name", "a", "b", "growth" in bytes; "count_a", "count_b".
        """
        return {
            "name": self.name,
            "a": self.bytes_a,
            "b": self.bytes_b,
            "growth": self.bytes,
            "count_a": self.count_a,
            "count_b": self.count_b,
        }


@dataclass(frozen=True)
class MomentGrowth:
    """What grew at one moment: at the peaks of two runs, or at their ends.

    Attributes
    ----------
    event_a : int
        The event of the first run after which memory was counted; -1 if it has no events.
    event_b : int
        The same in the second run.
    total : Growth
        All that was live.
    by_owner : tuple of Growth
        The same bytes in parts, by owner, what grew most first. What did not change is there too.
        The parts add up to `total`.
    by_line : tuple of Growth
        The same by line.
    by_size : tuple of Growth
        The same by the size that was asked for, each size by itself.
    """

    event_a: int
    event_b: int
    total: Growth
    by_owner: tuple[Growth, ...]
    by_line: tuple[Growth, ...]
    by_size: tuple[Growth, ...]

    def parts(self, kind: str) -> tuple[Growth, ...]:
        """The parts of one kind.

        Parameters
        ----------
        kind : {"owner", "line", "size"}
            Which.

        Returns
        -------
        tuple of Growth
            `by_owner`, `by_line` or `by_size`.
        """
        return {"owner": self.by_owner, "line": self.by_line, "size": self.by_size}[kind]

    def to_frame(self, kind: str) -> DataFrame:
        """The parts of one kind as a table of pandas.

        Parameters
        ----------
        kind : {"owner", "line", "size"}
            Which.

        Returns
        -------
        pandas.DataFrame
            A column for each attribute of `Growth`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.

        Examples
        --------
        >>> import bfc
        >>> found = bfc.diff(bfc.Trace([0], [0], [512]), bfc.Trace([0, 0], [0, 1], [512, 1024]))
        >>> found.peak.to_frame("size")["count_b"].tolist()
        [1, 1]
        """
        return frame_of_rows(Growth, self.parts(kind))

    def __neg__(self) -> MomentGrowth:
        def turned(parts: Sequence[Growth]) -> tuple[Growth, ...]:
            return ordered(-part for part in parts)

        return MomentGrowth(
            self.event_b, self.event_a, -self.total, *(turned(self.parts(kind)) for kind in KINDS)
        )

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Parameters
        ----------
        most : int, optional
            The rows of each kind at most, those that changed most; None is all.

        Returns
        -------
        dict
            "event_a", "event_b", "a", "b", "growth", "count_a", "count_b"; lists "by_owner",
            "by_line" and "by_size"; and "left_out", how many rows of each kind are not listed.
        """
        lists, left_out = {}, {}
        for kind in KINDS:
            parts = self.parts(kind)
            kept = parts if most is None else ordered(most_changed(parts)[:most])
            lists[f"by_{kind}"] = [part.as_dict() for part in kept]
            left_out[kind] = len(parts) - len(kept)
        total = self.total.as_dict()
        del total["name"]
        return {
            "event_a": self.event_a,
            "event_b": self.event_b,
            **total,
            **lists,
            "left_out": left_out,
        }


@dataclass(frozen=True)
class Diff:
    """What `bfc.diff` returns. `print` shows it; its first line is the two peaks.

    Attributes
    ----------
    name_a : str
        The first run: its path, or "a".
    name_b : str
        The second run: its path, or "b".
    peak : MomentGrowth
        What is live when most is, in each run.
    end : MomentGrowth
        What is live at the end of each run.
    reserved_a : int or None
        The most bytes in segments that the first recording tells of; None if it has no segments.
    reserved_b : int or None
        The same of the second.
    remarks : tuple of str
        What cannot be compared, and why.
    """

    name_a: str
    name_b: str
    peak: MomentGrowth
    end: MomentGrowth
    reserved_a: int | None = None
    reserved_b: int | None = None
    remarks: tuple[str, ...] = ()

    def __neg__(self) -> Diff:
        return Diff(
            self.name_b,
            self.name_a,
            -self.peak,
            -self.end,
            self.reserved_b,
            self.reserved_a,
            self.remarks,
        )

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Parameters
        ----------
        most : int, optional
            As in `MomentGrowth.as_dict`.

        Returns
        -------
        dict
            "a" and "b", the runs' names; "peak" and "end", as `MomentGrowth.as_dict` returns them;
            "reserved_a", "reserved_b" and "remarks".
        """
        return {
            "a": self.name_a,
            "b": self.name_b,
            "peak": self.peak.as_dict(most),
            "end": self.end.as_dict(most),
            "reserved_a": self.reserved_a,
            "reserved_b": self.reserved_b,
            "remarks": list(self.remarks),
        }

    def to_json(self) -> str:
        """All of it, as text.

        Returns
        -------
        str
            JSON.
        """
        return json.dumps(self.as_dict(), indent=2)

    def to_markdown(self, most: int = SHOWN) -> str:
        """The diff as a comment on a pull request.

        Parameters
        ----------
        most : int, optional
            The rows of each table at most, those that changed most.

        Returns
        -------
        str
            The peaks, and tables of what changed at them.
        """
        lines = [f"**Peak of live bytes: {change(self.peak.total)}**"]
        for heading, rows in self._changed_at_the_peak(most, ("owner", "line")):
            named = [(code(label), *figures) for label, *figures in rows]
            lines += ["", *table((heading, *HEADINGS), named)]
        return "\n".join(lines)

    def _changed_at_the_peak(
        self, most: int, kinds: Sequence[str] = KINDS
    ) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        """What changed most at the peaks: for each kind a heading, and the rows of a table."""
        for kind in kinds:
            parts = self.peak.parts(kind)
            if not _says_nothing(kind, parts):
                changed = [part for part in most_changed(parts) if part.bytes or part.count]
                rows = [_cells(kind, part) for part in ordered(changed[:most])]
                yield f"at the peak, by {kind}", rows

    def _repr_html_(self) -> str:
        """What a notebook shows: the peaks, and what changed most at them."""
        from bfc.snapshots import inline

        tables = [
            inline.table((heading, *HEADINGS), rows)
            for heading, rows in self._changed_at_the_peak(SHOWN)
        ]
        caption = f"{self.name_a} -> {self.name_b}, peak of live bytes: {change(self.peak.total)}"
        return inline.framed(caption, *tables)

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = SHOWN) -> str:
        """The diff for people.

        Parameters
        ----------
        most : int, optional
            The rows of each table at most.

        Returns
        -------
        str
            Several lines. A table has what changed, and says how much of it is not shown.
        """
        return "\n".join(self._lines(most))

    def _lines(self, most: int) -> Iterator[str]:
        yield f"peak, live bytes: {change(self.peak.total)}"
        yield f"live at the end:  {change(self.end.total)}"
        if self.reserved_a is not None and self.reserved_b is not None:
            reserved = Growth("", self.reserved_a, self.reserved_b)
            yield f"reserved at most: {change(reserved)}, as recorded"
        yield f"first: {shown(self.name_a)}; second: {shown(self.name_b)}"
        yield from (shown(remark) for remark in self.remarks)
        for title, moment in (("at the peak", self.peak), ("at the end", self.end)):
            yield ""
            yield from _tables(title, moment, most)


def ordered(parts: Iterator[Growth] | Sequence[Growth]) -> tuple[Growth, ...]:
    """The parts in order: what grew most first, and what grew equally by name."""
    return tuple(sorted(parts, key=lambda part: (-part.bytes, -part.count, part.name)))


def most_changed(parts: Sequence[Growth]) -> list[Growth]:
    """What changed most first, whether it grew or shrank."""
    return sorted(parts, key=lambda part: (-abs(part.bytes), -abs(part.count), part.name))


def signed(nbytes: int) -> str:
    """A change in bytes.

    >>> signed(1 << 20), signed(-700), signed(0)
    ('+1.00 MiB', '-700 B', '+0 B')
    """
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def change(part: Growth) -> str:
    """Two numbers of bytes and their difference, which is exact where the texts would be equal."""
    before, after = format_bytes(part.bytes_a), format_bytes(part.bytes_b)
    if part.bytes and before == after:
        before, after = f"{part.bytes_a} B", f"{part.bytes_b} B"
    share = f" ({part.bytes / part.bytes_a:+.1%})" if part.bytes_a and part.bytes else ""
    return f"{before} -> {after}, {signed(part.bytes)}{share}"


def _tables(title: str, moment: MomentGrowth, most: int) -> Iterator[str]:
    found = False
    for kind in KINDS:
        parts = moment.parts(kind)
        changed = [part for part in most_changed(parts) if part.bytes or part.count]
        if not changed or _says_nothing(kind, parts):
            continue
        if found:
            yield ""
        found = True
        kept = ordered(changed[:most])
        rows = [_cells(kind, part) for part in kept]
        indented = [(f"  {label}", *figures) for label, *figures in rows]
        yield from in_columns([(f"{title}, by {kind}", *HEADINGS), *indented])
        if rest := changed[most:]:
            yield f"  and {len(rest)} more, {signed(sum(part.bytes for part in rest))} together"
    if not found:
        yield f"{title}: nothing changed"


def _says_nothing(kind: str, parts: Sequence[Growth]) -> bool:
    """Whether all is without an owner, or without a stack: the total says it already."""
    return kind != "size" and all(not part.name for part in parts)


def _label(kind: str, part: Growth) -> str:
    if kind == "size":
        rounded = format_bytes(int(part.name))
        return rounded if _is_exact(rounded, part.name) else f"{rounded} ({part.name} B)"
    name = shown(part.name) or (NOBODY if kind == "owner" else NO_LINE)
    if len(name) <= WIDEST:
        return name
    return f"...{name[3 - WIDEST :]}" if ".py:" in name else f"{name[: WIDEST - 3]}..."


def _is_exact(rounded: str, nbytes: str) -> bool:
    # A size in PiB is absurd, and parse_bytes does not take it.
    return not rounded.endswith("PiB") and parse_bytes(rounded) == int(nbytes)


def _cells(kind: str, part: Growth) -> tuple[str, ...]:
    """A row of a table: the name, and what HEADINGS say."""
    sizes = format_bytes(part.bytes_a), format_bytes(part.bytes_b), signed(part.bytes)
    return _label(kind, part), *sizes, f"{part.count_a} -> {part.count_b}"
