"""The result of a search: ranked rows, the best of them, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bfc.study.points import CACHING
from bfc.study.recorded import Recorded
from bfc.trace.beginning import VARIABLE
from bfc.units import format_bytes

#: A key that older releases of PyTorch refuse.
NEWEST = "large_segment_size_mb"
#: How many rows of PyTorch's policy a table shows.
SHOWN = 8
HEADINGS = ("settings", "fits", "refused", "reserved", "calls", "smallest device")
CAUTION = (
    "Sizes and their order are as recorded: under other settings a framework may pick other "
    "algorithms. The device is what the allocator may take, without the CUDA context, NCCL and "
    "cuBLAS."
)


@dataclass(frozen=True)
class AdviceRow:
    """A policy with its settings, and what became of the run. Sizes are in bytes.

    Attributes
    ----------
    policy : str
        "caching" is PyTorch's, replayed strictly. The others are "caching+stitch", "bfc" and
        "bfc+virtual_memory".
    settings : str
        What PYTORCH_CUDA_ALLOC_CONF takes, or arguments of `BFCAllocator`, such as
        "page_size=2MiB".
    fits : bool
        Whether the run completed on the device.
    refused : int
        The allocations that the device was too small for.
    peak_reserved : int
        The most that was taken from the device.
    driver_calls : int
        The calls of the driver on the device that took memory or gave it back.
    smallest_device : int or None
        The smallest device on which it was seen to complete; None if that was not searched.
    refused_above : tuple of int
        Larger devices than `smallest_device` on which it was refused.
    """

    policy: str
    settings: str
    fits: bool
    refused: int
    peak_reserved: int
    driver_calls: int
    smallest_device: int | None
    refused_above: tuple[int, ...] = ()

    @property
    def is_pytorch(self) -> bool:
        """Whether it needs nothing but PyTorch."""
        return self.policy == CACHING

    @property
    def name(self) -> str:
        """The name of the row in a table."""
        if self.is_pytorch:
            return self.settings or "(the defaults)"
        return f"{self.policy} {self.settings}".strip()


@dataclass(frozen=True)
class Advice:
    """What `bfc.advise` returns. `print` shows it; its first line is `proof`.

    Attributes
    ----------
    live_peak : int
        The most bytes that the run has asked for and not freed: no setting fits it on less.
    device : int
        The bytes that the allocator may take.
    recorded : Recorded
        What the recording says of its own run, and what a replay of that run reserves.
    rows : tuple of AdviceRow
        PyTorch's policy first, the best rows first.
    best : int or None
        The index of the best row; None if none fits. Of the rows that fit, PyTorch's come before
        ours. Of those whose smallest device is within 1 % of the smallest of all, it has the fewest
        calls of the driver, and of several such, the smallest device.
    events : int
        The number of events in the trace.
    replays : int
        How many replays it took.
    refused_at_the_end : int
        The bytes of the request whose refusal ended the recorded run, which was added to the trace;
        0 if none did.
    """

    live_peak: int
    device: int
    recorded: Recorded
    rows: tuple[AdviceRow, ...]
    best: int | None
    events: int = 0
    replays: int = 0
    refused_at_the_end: int = 0

    @property
    def fits(self) -> bool:
        """Whether any row fits."""
        return self.best is not None

    @property
    def proof(self) -> str:
        """Whether the recorded settings, replayed, reserve what was recorded."""
        return str(self.recorded)

    def _repr_html_(self) -> str:
        """What a notebook shows: the best row, and the first of the others."""
        from bfc.snapshots import inline

        best = "nothing fits" if self.best is None else f"best: {self.rows[self.best].name}"
        caption = f"{self.events} events on {format_bytes(self.device)}: {best}"
        rows = [
            (
                row.name,
                "yes" if row.fits else f"no, {row.refused} refused",
                format_bytes(row.peak_reserved),
                row.driver_calls,
                "-" if row.smallest_device is None else format_bytes(row.smallest_device),
            )
            for row in self.rows[:12]
        ]
        headings = ("settings", "fits", "reserved", "calls", "smallest device")
        return inline.framed(caption, inline.table(headings, rows))

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            "live_peak", "device", "recorded", "rows", "best", and more.
        """
        return {
            "live_peak": self.live_peak,
            "device": self.device,
            "recorded": {**asdict(self.recorded), "is_exact": self.recorded.is_exact},
            "rows": [asdict(row) for row in self.rows],
            "best": self.best,
            "events": self.events,
            "replays": self.replays,
            "refused_at_the_end": self.refused_at_the_end,
            "proof": self.proof,
        }

    def to_json(self) -> str:
        """All of it, as text.

        Returns
        -------
        str
            JSON.
        """
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.proof
        yield (
            f"{self.events} events, {format_bytes(self.live_peak)} live at most, "
            f"on a device of {format_bytes(self.device)}"
        )
        if self.refused_at_the_end:
            yield (
                f"The run ended when {format_bytes(self.refused_at_the_end)} were refused: this "
                "request is replayed, too, and counts as live."
            )
        yield ""
        yield from self._table()
        yield ""
        yield self._verdict()
        yield CAUTION

    def _table(self) -> Iterator[str]:
        """PyTorch's rows, and then ours, under one heading."""
        pytorch = [row for row in self.rows if row.is_pytorch]
        ours = [row for row in self.rows if not row.is_pytorch]
        shown = self._worth_showing(pytorch)
        lines = [HEADINGS, *map(self._cells, shown), *map(self._cells, ours)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
        texts = [
            "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))).rstrip()
            for line in lines
        ]
        yield from texts[: 1 + len(shown)]
        if len(pytorch) > len(shown):
            yield f"and {len(pytorch) - len(shown)} more of PyTorch's"
        yield "not in PyTorch, but in bfc:"
        yield from texts[1 + len(shown) :]

    def _worth_showing(self, rows: Sequence[AdviceRow]) -> list[AdviceRow]:
        """The first rows whose figures differ, and those that everybody compares with: the
        defaults, expandable segments and the recorded settings."""
        known = ("", "expandable_segments:True", self.recorded.settings)
        shown: list[AdviceRow] = []
        seen = set()
        for row in rows:
            if not row.fits and row.smallest_device is None:
                continue
            is_new = self._cells(row)[1:] not in seen and len(shown) < SHOWN
            if is_new or row.settings in known:
                shown.append(row)
                seen.add(self._cells(row)[1:])
        return shown

    def _cells(self, row: AdviceRow) -> tuple[str, ...]:
        smallest = "-" if row.smallest_device is None else format_bytes(row.smallest_device)
        return (
            row.name,
            "yes" if row.fits else "no",
            str(row.refused),
            format_bytes(row.peak_reserved),
            str(row.driver_calls),
            smallest,
        )

    def _verdict(self) -> str:
        if self.best is None:
            text = (
                f"Nothing fits on {format_bytes(self.device)}. No setting fits on less than "
                f"{format_bytes(self.live_peak)}, which is live at once"
            )
            known = [row.smallest_device for row in self.rows if row.smallest_device is not None]
            if not known:
                return f"{text}."
            return f"{text}. The smallest device that a row fits on has {format_bytes(min(known))}."
        row = self.rows[self.best]
        text = f"best: {advised(row)}"
        if row.is_pytorch and NEWEST in row.settings:
            text += f" ({NEWEST} needs PyTorch 2.11 or later)"
        if row.refused_above:
            sizes = ", ".join(map(format_bytes, row.refused_above))
            text += f" (but on a device of {sizes} it is refused again)"
        return text


def advised(row: AdviceRow) -> str:
    """What a user has to write to get a row's settings."""
    if row.is_pytorch:
        return f"{VARIABLE}={row.settings}" if row.settings else "PyTorch's defaults"
    if row.policy == "caching+stitch":
        return "bfc.CachingAllocator(sub_allocator, stitch=True)"
    name, _, value = row.settings.partition("=")
    if row.policy == "bfc":
        return f"bfc.BFCAllocator(sub_allocator{', allow_growth=True' if name else ''})"
    option = f", {name}={value!r}" if name else ""
    return f"bfc.BFCAllocator(sub_allocator, virtual_memory=True{option})"
