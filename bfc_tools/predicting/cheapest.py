"""The GPUs on which a script fits: each of the table is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bfc.units import format_bytes, printable
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.devices import DEVICES
from bfc_tools.predicting.tries import ANSWERS, UNFINISHED, Runs, Tried, all_of, as_counted


@dataclass(frozen=True)
class Row:
    """What a script needs on one GPU, in bytes, and what PyTorch can take there."""

    device: str  # as --device has it
    fits: bool | None  # None if the program failed
    limit: int
    live: int
    reserved: int
    error: str = ""
    fits_at_most: bool | None = None  # with the most of what is not known

    @property
    def spare(self) -> float:
        """What is left, as a share of what PyTorch can take. Below 0 it may fit all the same, since
        PyTorch gives back what it keeps before it refuses a request."""
        return 1 - self.reserved / self.limit if self.limit else 0.0

    @property
    def held(self) -> str:
        """What is reserved there, and what is left, as an answer has it."""
        of = f"{format_bytes(self.reserved)} of {format_bytes(self.limit)}"
        if self.spare < 0:
            return f"{self.device}, if only just: with more room it would reserve {of}"
        return f"{self.device}: it reserves {of}, which leaves {self.spare:.0%}"


class Cheapest:
    """A script on all GPUs of the table, from the one with least memory. What has been found so far
    can be read at any time. `told` is called with each GPU's name, and what the try came to."""

    def __init__(self, asked: Asked, told: Callable[[str, Tried], object]) -> None:
        self.asked, self.told = asked, told
        self.rows: list[Row] = []
        self.is_finished = False

    def run(self, tries: Runs) -> None:
        """Tries them all."""
        places = sorted(DEVICES, key=lambda name: (DEVICES[name].usable, name))
        questions = {name: replace(self.asked, device=name) for name in places}
        for name, tried in tries.outcomes(questions):
            limit = tried.figures.get("limit", 0)
            error = tried.error if tried.fits is None else ""
            sizes = limit, tried.live, tried.needs
            self.rows.append(Row(name, tried.fits, *sizes, error, tried.fits_at_most))
            self.rows.sort(key=lambda row: places.index(row.device))
            self.told(name, tried)
        self.is_finished = True

    @property
    def fits(self) -> bool:
        """Whether it fits on one."""
        return any(row.fits for row in self.rows)

    @property
    def is_known(self) -> bool:
        """Whether anything is known of any GPU."""
        return any(row.fits is not None for row in self.rows)

    @property
    def failure(self) -> str:
        """What is said if nothing is known."""
        return self.rows[0].error if self.rows else "nothing was tried"

    @property
    def answer(self) -> str:
        """The first line."""
        return self._answer() if self.is_finished else UNFINISHED + self._answer()

    def _answer(self) -> str:
        smallest = next((row for row in self.rows if row.fits), None)
        if smallest is not None:
            answer = f"The smallest GPU that it fits on is {smallest.held}."
            roomy = next((row for row in self.rows if row.fits and row.spare >= 0), smallest)
            if roomy is not smallest:
                answer += f" The smallest with room to spare is {roomy.held}."
            at_most = all_of([smallest.fits_at_most, roomy.fits_at_most])
            sure = next((f"It would on {row.device}" for row in self.rows if row.fits_at_most), "")
            return answer + as_counted(at_most, "it", sure)
        known = [row for row in self.rows if row.fits is False]
        if known:
            return (
                f"It fits on none of {len(known)} GPUs: on {known[-1].device} it would reserve "
                f"{format_bytes(known[-1].reserved)} of {format_bytes(known[-1].limit)}."
            )
        return f"No answer: {self.failure}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes."""
        rows = [asdict(row) | {"spare": row.spare} for row in self.rows]
        return {"fits": self.fits, "answer": self.answer, "devices": rows}

    def __str__(self) -> str:
        width = max(len(name) for name in DEVICES)
        lines = [
            self.answer,
            "bfc knows no prices. These are all of its GPUs, the smallest first:",
            "",
            f"{'device':{width}}  fits     for PyTorch         live     reserved  to spare",
        ]
        for row in self.rows:
            start = f"{row.device:{width}}  {ANSWERS[row.fits]:6}"
            if row.limit:
                sizes = (row.limit, row.live, row.reserved)
                start += "".join(f" {format_bytes(size):>12}" for size in sizes)
                left = f"{row.spare:.0%}" if row.spare >= 0 else "only just"
                start += f"{left:>10}" if row.fits else ""
            lines.append(f"{start}  {row.error}".rstrip())
        return "\n".join(map(printable, lines))
