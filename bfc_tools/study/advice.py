"""The result of a search: ranked rows, the best of them, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from bfc.libraries import frame_of_rows
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.words import CONF
from bfc.trace.beginning import AS_RECORDED
from bfc.units import format_bytes, in_columns
from bfc_tools.study.candidates import (
    BFC,
    CACHING,
    EXPANDABLE,
    MOST_PAGES,
    PAGES,
    PLANNED,
    STITCHED,
    Point,
)
from bfc_tools.study.iterations import Steady
from bfc_tools.study.ran_out import RanOut
from bfc_tools.study.recorded_settings import Recorded, shown

if TYPE_CHECKING:
    from pandas import DataFrame

#: How many rows a table shows, unless all are asked for.
SHOWN = 5
#: By how much the calls of the driver of two settings differ if that is said.
FEWER = 2
#: The settings that have rows of their own in any case.
KNOWN = ("", EXPANDABLE)
HEADINGS = ("settings", "fits", "refused", "reserved", "calls", "smallest device")
FIRST_ROW = (
    "The recording began in mid-run. In the first row, what was live then lies where it lay; in "
    "the others, where the policy would have put it."
)
NO_ROW = (
    "The recording began in mid-run. This device has no room for the layout that it began with, so "
    "each policy places anew what was live then. To be sure, record from the start of the program."
)
PLAN = (
    "caching+plan: the run repeats, and bfc.CachingAllocator serves a plan of it, `bfc plan`, in "
    "ordinary memory. What it reserves was tried without the iteration that was served."
)
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
        "caching" is PyTorch's, replayed strictly. The others are "caching+stitch", "bfc",
        "bfc+virtual_memory", and "caching+plan" where the run repeats.
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
    beginning : str
        Where the replay on the device put what was live when the recording began: "as recorded" or
        "as placed" by the policy; empty where the recording has the whole run.
    """

    policy: str
    settings: str
    fits: bool
    refused: int
    peak_reserved: int
    driver_calls: int
    smallest_device: int | None
    refused_above: tuple[int, ...] = ()
    beginning: str = ""

    @property
    def is_pytorch(self) -> bool:
        """Whether it needs nothing but PyTorch."""
        return self.policy == CACHING

    @property
    def name(self) -> str:
        """The name of the row in a table."""
        return Point(self.policy, self.settings).name


@dataclass(frozen=True)
class Advice:
    """What `bfc.advise` returns. `print` shows it; its first line is `answer`.

    Of a run that ran out of memory, the first line says how, and the second is `answer`.

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
        ours. It is the plainest (expandable segments, then one setting, then several) unless
        another needs a device that is 3 % smaller. Of equally plain ones whose smallest device is
        within 1 % of the smallest, it has the fewest calls of the driver. Where a less plain row
        needs half as many or fewer, the answer says so: it is `fewer_calls`.
    in_force : int
        The index of the row with the recorded settings, or with PyTorch's defaults where the
        recording names none.
    usual_calls : int
        The calls of the driver under the settings in force on a device with room for everything.
    events : int
        The number of events in the trace.
    replays : int
        How many replays it took.
    refused_at_the_end : int
        The bytes of the request whose refusal ended the recorded run, which was added to the trace;
        0 if none did.
    no_plan : str
        Why there is no row of a plan; empty if there is one.
    private_allocations : int
        The allocations that are from private pools, such as those of captured graphs.
    given_up : tuple of str
        What was not tried further, since it would map more than 262144 pages at a time: the names
        of rows, some of which have none then.
    ran_out : RanOut or None
        How the recorded run ran out of memory; None if it did not.
    steady : Steady or None
        The first iteration of the run beside the later ones; None where none were found.
    """

    live_peak: int
    device: int
    recorded: Recorded
    rows: tuple[AdviceRow, ...]
    best: int | None
    in_force: int = 0
    usual_calls: int = 0
    events: int = 0
    replays: int = 0
    refused_at_the_end: int = 0
    no_plan: str = ""
    private_allocations: int = 0
    given_up: tuple[str, ...] = ()
    ran_out: RanOut | None = None
    steady: Steady | None = None

    @property
    def fits(self) -> bool:
        """Whether any row fits."""
        return self.best is not None

    @property
    def answer(self) -> str:
        """The first line; the second of a run that ran out of memory.

        It names the version of PyTorch whose rules were followed, and says that the run fits as it
        is, or which line makes it fit and what that costs, or how much is missing.
        """
        return f"PyTorch {self.recorded.torch}: {self._answer()}"

    def _answer(self) -> str:
        now, device = self.rows[self.in_force], format_bytes(self.device)
        if now.fits:
            spare = format_bytes(self.device - now.peak_reserved)
            return (
                f"It fits on {device} as it is: {_under(now)} it reserves at most "
                f"{format_bytes(now.peak_reserved)}, which leaves {spare}. Nothing has to change."
            )
        if self.best is not None:
            return f"It fits on {device} with {self._proposed(self.rows[self.best])}."
        live = f"{format_bytes(self.live_peak)} are live at once"
        if self.live_peak > self.device:
            missing = format_bytes(self.live_peak - self.device)
            return f"Nothing makes it fit on {device}: {live}, {missing} too many."
        known = [row.smallest_device for row in self.rows if row.smallest_device is not None]
        if not known:
            return f"Nothing that was tried makes it fit on {device}: {live}."
        missing = format_bytes(min(known) - self.device)
        return (
            f"Nothing that was tried makes it fit on {device}: the least that was seen to be "
            f"enough is {format_bytes(min(known))}, {missing} more."
        )

    def _proposed(self, row: AdviceRow) -> str:
        """What to write, how much room it leaves, and what it costs."""
        text = (row.settings if row.is_pytorch else advised(row)) or "PyTorch's defaults"
        if not row.is_pytorch:
            text += " (in bfc; none of PyTorch's settings was enough)"
        text += f": it reserves at most {format_bytes(row.peak_reserved)}"
        if row.smallest_device is not None:
            spare = 1 - row.smallest_device / self.device
            text += f", would fit on {spare * 100:.1f} % less ({format_bytes(row.smallest_device)})"
        more = row.driver_calls - self.usual_calls
        change = f"{more} more" if more > 0 else f"{-more} fewer" if more else "as many"
        text += f", and costs {row.driver_calls} calls of the driver, {change}"
        text += " than now" if more else " as now"
        if row.refused_above:
            sizes = ", ".join(map(format_bytes, row.refused_above))
            text += f" (but on a device of {sizes} it is refused again)"
        if (other := self.fewer_calls) is not None:
            text += f"; {other.settings or 'the defaults'} would cost {other.driver_calls}"
        return text

    @property
    def fewer_calls(self) -> AdviceRow | None:
        """The row with the fewest calls of the driver, if they are half the best row's or fewer.

        It is one of PyTorch's that fits, and less plain than the best one. None if there is none,
        and where the run fits as it is.
        """
        if self.best is None or self.rows[self.in_force].fits:
            return None
        if not (best := self.rows[self.best]).is_pytorch:
            return None
        known = [row for row in self.rows if row.is_pytorch and row.fits and row.smallest_device]
        found = min(known, key=lambda row: row.driver_calls, default=best)
        return found if found.driver_calls * FEWER <= best.driver_calls else None

    @property
    def to_copy(self) -> str:
        """The line for a shell that sets what is proposed; empty if nothing of PyTorch's is."""
        if self.best is None or self.rows[self.in_force].fits:
            return ""
        row = self.rows[self.best]
        if not row.is_pytorch:
            return ""
        return f"export {CONF}={quote(row.settings)}" if row.settings else f"unset {CONF}"

    @property
    def proof(self) -> str:
        """Whether the recorded settings, replayed, reserve what was recorded."""
        return str(self.recorded)

    def _repr_html_(self) -> str:
        """What a notebook shows: the best row, and the first of the others."""
        from bfc.snapshots import inline

        caption = f"{self.events} events: {self.answer}"
        rows = []
        for row in map(self.rows.__getitem__, self._kinds()):
            name, fits, refused, *figures = self._cells(row)
            rows.append((name, fits if row.fits else f"{fits}, {refused} refused", *figures))
        headings = ("settings", "fits", "reserved", "calls", "smallest device")
        return inline.framed(caption, inline.table(headings, rows))

    def to_frame(self) -> DataFrame:
        """All rows as a table of pandas.

        Returns
        -------
        pandas.DataFrame
            One row for each of `rows`, in their order; the columns are those of `AdviceRow`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.
        """
        return frame_of_rows(AdviceRow, self.rows)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            "live_peak", "device", "recorded", "rows", "best", and more.
        """
        said = asdict(self)
        said["recorded"]["is_exact"] = self.recorded.is_exact
        said["ran_out"] = self.ran_out and self.ran_out.as_dict()
        texts = {"answer": self.answer, "proof": self.proof, "to_copy": self.to_copy}
        return {**said, "rows": list(said["rows"]), **texts}

    def to_json(self) -> str:
        """All of it, as text.

        Returns
        -------
        str
            JSON.
        """
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, every_row: bool = False) -> str:
        """What `print` shows.

        Parameters
        ----------
        every_row : bool, optional
            Show all rows. The default shows at most five that differ in kind, and that of a plan.

        Returns
        -------
        str
            How it ran out of memory, if it did, the answer, the line to copy, how far it can be
            trusted, and a table.
        """
        shown = range(len(self.rows)) if every_row else self._kinds()
        return "\n".join(self._lines([self.rows[at] for at in shown], every_row))

    def _lines(self, shown: Sequence[AdviceRow], every_row: bool) -> Iterator[str]:
        if self.ran_out is not None:
            yield self.ran_out.sentence
        yield self.answer
        if self.to_copy:
            yield self.to_copy
        yield f"{self.proof[0].upper()}{self.proof[1:]}."
        if self.recorded.torch_sign:
            alike = "; 2.13 and 2.14 place memory as 2.15 does" if self._is_newest else ""
            yield f"PyTorch {self.recorded.torch}, {self.recorded.torch_sign}{alike}."
        yield f"{self.events} events, {format_bytes(self.live_peak)} live at most."
        if self.steady is not None:
            yield self.steady.sentence
        if self.private_allocations:
            yield (
                f"{self.private_allocations} allocations are from private pools, such as those of "
                "captured graphs: every row keeps these apart, for as long as the run held them."
            )
        if self.refused_at_the_end:
            yield "The request that was refused at the end is replayed, too, and counts as live."
        if beginning := self.rows[self.in_force].beginning:
            yield FIRST_ROW if beginning == AS_RECORDED else NO_ROW
        yield ""
        yield from in_columns([HEADINGS, *map(self._cells, shown)])
        left = len(self.rows) - len(shown)
        if left:
            yield f"and {left} more (--all shows them, `Advice.rows` has them)"
        if self.given_up:
            yield (
                f"Given up where it maps more than {MOST_PAGES} pages: {'; '.join(self.given_up)}."
            )
        yield ""
        if self._plan_is_wanted or (every_row and any(row.policy == PLANNED for row in shown)):
            yield PLAN
        elif self.no_plan and every_row:
            yield f"A plan of it is no help: {self.no_plan}."
        yield CAUTION

    @property
    def _is_newest(self) -> bool:
        return self.recorded.torch == NEWEST

    @property
    def _plan_is_wanted(self) -> bool:
        """Whether nothing but a plan makes it fit."""
        return self.best is not None and self.rows[self.best].policy == PLANNED

    def _kinds(self) -> list[int]:
        """The rows that differ in kind, in this order: the settings in force, expandable segments,
        the best of PyTorch's others (that with fewer calls, if the answer names it), stitching, the
        defaults, TensorFlow's policy."""
        at, fewer = range(len(self.rows)), self.fewer_calls
        pytorch = [i for i in at if self.rows[i].is_pytorch]
        pytorch.sort(key=lambda i: self.rows[i] is not fewer)
        wanted = [
            [self.in_force],
            [i for i in pytorch if self.rows[i].settings == EXPANDABLE],
            [i for i in pytorch if self.rows[i].settings not in KNOWN and i != self.in_force],
            [i for i in at if self.rows[i].policy in (STITCHED, PAGES)],
            [i for i in pytorch if not self.rows[i].settings],
            [i for i in at if self.rows[i].policy == BFC],
        ]
        found = dict.fromkeys(listed[0] for listed in wanted if listed)
        return list(found)[:SHOWN] + [i for i in at if self.rows[i].policy == PLANNED]

    @staticmethod
    def _cells(row: AdviceRow) -> tuple[str, ...]:
        smallest = "-" if row.smallest_device is None else format_bytes(row.smallest_device)
        return (
            row.name,
            "yes" if row.fits else "no",
            str(row.refused),
            format_bytes(row.peak_reserved),
            str(row.driver_calls),
            smallest,
        )


def _under(row: AdviceRow) -> str:
    return f"under {shown(row.settings)}," if row.settings else "under PyTorch's defaults"


def advised(row: AdviceRow) -> str:
    """What a user has to write to get a row's settings."""
    if row.is_pytorch:
        return f"{CONF}={row.settings}" if row.settings else "PyTorch's defaults"
    if row.policy == PLANNED:
        return "bfc.CachingAllocator(sub_allocator, plan=plan), where plan is one of this run"
    if row.policy == STITCHED:
        return "bfc.CachingAllocator(sub_allocator, stitch=True)"
    name, _, value = row.settings.partition("=")
    if row.policy == BFC:
        return f"bfc.BFCAllocator(sub_allocator{', allow_growth=True' if name else ''})"
    option = f", {name}={value!r}" if name else ""
    return f"bfc.BFCAllocator(sub_allocator, virtual_memory=True{option})"
