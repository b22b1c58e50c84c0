"""`bfc predict --what-if`: what holds the memory, and what each change of the program would save,
predicted by making it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bfc.units import format_bytes, printable
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.changes import BY_NAME, WANTED
from bfc_tools.predicting.largest import device_of
from bfc_tools.predicting.tries import ANSWERS, UNFINISHED, Runs, Tried, held
from bfc_tools.study.candidates import CACHING

#: A setting of the allocator that is tried beside the changes of the program.
SETTING = "expandable_segments:True"
#: Changes that are made together where none of them is enough: the best so many.
TOGETHER = 3
#: What is never tried, and why.
NOT_TRIED = (
    "a fused or chunked loss: the loss is the program's own code",
    "parameters in 16 bits (model.to(torch.bfloat16)): training may need another optimizer then",
    "a program that shards over several GPUs: --nproc predicts it",
)
#: What is told by arithmetic: what it leaves of an optimizer's states, and the line to write. Of
#: those in 32 bits 8 bits are one byte of four, and four bytes for each 256 of them.
BY_ARITHMETIC = (
    (
        "states in 8 bits",
        (1 + 4 / 256) / 4,
        "an optimizer of bitsandbytes.optim, if the states are in 32 bits now",
    ),
    (
        "states on 2 GPUs",
        1 / 2,
        "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
    ),
)


@dataclass(frozen=True)
class Row:
    """A change, and what it saves, in bytes."""

    name: str  # of several changes, with commas
    fits: bool | None  # None if the program failed with it, or if it was not tried
    live: int
    reserved: int
    saved: int  # of what is reserved
    saved_live: int
    more_operators: float  # as a share of those without it
    line: str  # to write
    where: str = ""  # what it has changed, such as the names of modules
    tried: bool = True
    error: str = ""
    only_just: bool = False  # it fits, since PyTorch gives back what it keeps first

    @property
    def held(self) -> str:
        """Its name, and what is reserved with it, as an answer has it."""
        return self.name + held("it", self.reserved, self.only_just)


class WhatIf:
    """A script with each of the changes. What has been found so far can be read at any time. `told`
    is called with each change, and what the try came to."""

    def __init__(self, asked: Asked, told: Callable[[dict[str, str], Tried], object]) -> None:
        self.asked, self.told = asked, told
        self.base = Tried()
        self.is_finished = False
        self._waiting: dict[str, Tried] = {}  # for what the program needs as it is
        self.rows: list[Row] = []
        self.not_tried: list[str] = []

    def run(self, tries: Runs) -> None:
        """Tries the program as it is, each change alone, and, where none is enough, the best ones
        together."""
        questions = {"": replace(self.asked, advise=not self.asked.settings)}
        for one in WANTED:
            if one.name != "no_grad":
                changes = (*self.asked.changes, one.name)
                questions[one.name] = replace(self.asked, changes=changes)
        if not self.asked.settings:
            questions[SETTING] = replace(self.asked, settings=SETTING)
        self._try(tries, questions)
        if self.base.figures.get("kept_for_backward"):
            changes = (*self.asked.changes, "no_grad")
            self._try(tries, {"no_grad": replace(self.asked, changes=changes)})
        settings = _advised(self.base.figures.get("advice"))
        if settings:
            self._try(tries, {settings: replace(self.asked, settings=settings)})
        if self.base.fits is False:
            self._together(tries)
        self.rows.sort(key=lambda row: (-row.saved, row.name))
        self._by_arithmetic()
        self.is_finished = True

    def _try(self, tries: Runs, questions: dict[str, Asked]) -> None:
        for name, tried in tries.outcomes(questions):
            if name:
                self._waiting[name] = tried
            else:
                self.base = tried
            if self.base.figures:
                for one in list(self._waiting):
                    self._learn(one, self._waiting.pop(one))
            self.told({"with": name or "nothing changed"}, tried)

    def _together(self, tries: Runs) -> None:
        """Where no change is enough, two, and then three, that save most alone."""
        saving = [row for row in self.rows if row.saved > 0 and row.name in BY_NAME]
        names = [row.name for row in sorted(saving, key=lambda row: -row.saved)][:TOGETHER]
        for count in range(2, len(names) + 1):
            if any(row.fits for row in self.rows):
                return
            changes = (*self.asked.changes, *names[:count])
            together = {",".join(names[:count]): replace(self.asked, changes=changes)}
            self._try(tries, together)

    def _learn(self, name: str, tried: Tried) -> None:
        names = [name] if ":" in name else name.split(",")
        made = [one for one in tried.figures.get("changes", ()) if one["name"] in names]
        unmade = [one for one in made if not one["times"]]
        if unmade:
            self.not_tried.append(f"{name}: {unmade[0]['reason']}")
            return
        lines = {name: f"export PYTORCH_CUDA_ALLOC_CONF={name}"}  # of a setting
        lines |= {one: BY_NAME[one].line for one in names if one in BY_NAME}
        lines |= {one["name"]: one["line"] for one in made}
        line = "; ".join(lines[one] for one in names)
        where = ", ".join(path for one in made for path in one["where"])
        if not tried.figures or tried.fits is None:
            self.rows.append(Row(name, None, 0, 0, 0, 0, 0.0, line, where, error=tried.error))
            return
        before = self.base.figures.get("operators") or 1
        self.rows.append(
            Row(
                name,
                tried.fits,
                tried.live,
                tried.needs,
                self.base.needs - tried.needs,
                self.base.live - tried.live,
                tried.figures["operators"] / before - 1,
                line,
                where,
                only_just=tried.only_just,
            )
        )

    def _by_arithmetic(self) -> None:
        """The states of the optimizer, made smaller."""
        peak = self.base.figures.get("peak") or {}
        states = peak.get("by_kind", {}).get("optimizer state", 0)
        for name, left, line in BY_ARITHMETIC if states else ():
            saved = int(states * (1 - left))
            live, needs = self.base.live - saved, self.base.needs - saved
            self.rows.append(Row(name, None, live, needs, saved, saved, 0.0, line, tried=False))

    # -- what is said ---------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether it is known what the program needs."""
        return bool(self.base.figures)

    @property
    def failure(self) -> str:
        """What is said if it is not."""
        return self.base.error or "nothing was tried"

    @property
    def fits(self) -> bool:
        """Whether it fits, as it is or with a change."""
        return bool(self.base.fits) or any(row.fits for row in self.rows)

    @property
    def answer(self) -> str:
        """The first line."""
        return self._answer() if self.is_finished else UNFINISHED + self._answer()

    def _answer(self) -> str:
        answer = str(self.base.figures.get("answer", "Nothing was tried."))
        tried = [row for row in self.rows if row.tried and row.fits is not None]
        fitting = [row for row in tried if row.fits]
        if self.base.fits:
            best = next((row for row in tried if row.saved > 0), None)
            if best is None:
                return f"{answer} No change saves anything."
            return f"{answer} {best.name} would save most: {format_bytes(best.saved)}."
        if fitting:
            gentle = min(fitting, key=_gentleness)
            answer += f" It fits with {gentle.held}."
            roomy = [row for row in fitting if not row.only_just]
            if gentle.only_just and roomy:
                answer += f" With room to spare it fits with {min(roomy, key=_gentleness).held}."
            return answer
        return f"{answer} No change that was tried makes it fit."

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes."""
        figures = self.base.figures
        return {
            "fits": self.fits,
            "answer": self.answer,
            "fits_unchanged": self.base.fits,
            "device": device_of(figures) if figures else "",
            "limit": figures.get("limit", 0),
            "live": self.base.live,
            "reserved": self.base.needs,
            "operators": figures.get("operators", 0),
            "holders": figures.get("holders", []),
            "changes": [asdict(row) for row in self.rows],
            "not_tried": [*self.not_tried, *NOT_TRIED],
        }

    def __str__(self) -> str:
        lines = [self.answer, "", "What holds the memory at the peak:"]
        for one in self.base.figures.get("holders", ()):
            at = f", at {one['line']}" if one["line"] else ""
            lines.append(f"  {format_bytes(one['nbytes']):>11}  {one['what']}{at}")
            lines.append(f"{'':15}{one['cure']}")
        lines += ["", *self._table(), "", "Not tried:"]
        lines += [f"  {text}" for text in (*self.not_tried, *NOT_TRIED)]
        return "\n".join(map(printable, lines))

    def _table(self) -> list[str]:
        width = max([len("(as it is)"), *(len(row.name) for row in self.rows)])
        lines = [f"{'with':{width}}  fits        reserved        saved  operators"]
        needs = format_bytes(self.base.needs)
        note = f"{'':24}  only just" if self.base.only_just else ""
        lines.append(f"{'(as it is)':{width}}  {ANSWERS[self.base.fits]:6}   {needs:>11}{note}")
        for row in self.rows:
            answer = ANSWERS[row.fits] if row.tried else "-"
            start = f"{row.name:{width}}  {answer:6}"
            if row.reserved:
                start += f"   {format_bytes(row.reserved):>11}  {_signed(row.saved):>11}"
            if row.tried and row.reserved:
                start += f"  {row.more_operators:>+9.0%}"
            note = "only just" if row.only_just else row.error
            lines.append(f"{start}  {note}".rstrip())
        lines += ["", "What to write:"]
        for row in self.rows:
            if row.saved > 0 and ("," not in row.name or ":" in row.name):
                where = f"  # {row.where}" if row.where else ""
                note = "" if row.tried else "  # by arithmetic, and not tried"
                lines.append(f"  {row.name}: {row.line}{where}{note}")
        return lines


def _advised(advice: dict[str, Any] | None) -> str:
    """The settings of PyTorch's allocator that `bfc.advise` found, if they are not tried anyway."""
    best = None if advice is None else advice["best"]
    row = None if advice is None or best is None else advice["rows"][best]
    if row is None or row["policy"] != CACHING or row["settings"] == SETTING:
        return ""
    return str(row["settings"])


def _gentleness(row: Row) -> tuple[float, int]:
    """What is least where a change costs least."""
    return row.more_operators, row.reserved


def _signed(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes >= 0 else f"-{format_bytes(-nbytes)}"
