"""What a case says, and what it is given when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bfc_tools.museum.figures import Figure
from bfc_tools.museum.pools import BFCPool, PinnedPool, TorchPool

#: What cases are about; the page filters by them.
KINDS = (
    "fragmentation",
    "rounding",
    "limits",
    "streams",
    "private pools",
    "pinned memory",
    "expandable segments",
    "leaks",
    "sleep",
    "growth",
    "prediction",
    "snapshots",
)


class Trial:
    """What a case runs on: it makes the pools, and takes down the figures."""

    def __init__(self, *, recorded: bool = False) -> None:
        self.figures: list[Figure] = []
        self.before: TorchPool | BFCPool | None = None
        self.after: TorchPool | BFCPool | None = None
        self._recorded = recorded  # so that maps can be drawn

    def pytorch(
        self, capacity: int | str, settings: str = "", *, cure: bool = False, **options: Any
    ) -> TorchPool:
        """PyTorch's allocator. The first one is drawn as what was, and the first with `cure` as
        what it is under the cure."""
        made = TorchPool(capacity, settings, **options)
        self._keep(made, cure)
        return made

    def tensorflow(self, capacity: int | str, *, cure: bool = False, **options: Any) -> BFCPool:
        """TensorFlow's allocator, which is JAX's too; it is drawn in the same way."""
        made = BFCPool(capacity, **options)
        self._keep(made, cure)
        return made

    def pinned(self, settings: str = "", **options: Any) -> PinnedPool:
        """PyTorch's pinned memory, of which there is no map."""
        return PinnedPool(settings, **options)

    def _keep(self, made: TorchPool | BFCPool, cure: bool) -> None:
        if self._recorded:
            made.pool.record_history(context=None)
        if cure:
            self.after = self.after or made
        else:
            self.before = self.before or made

    def used(self, what: str, text: str, measured: float | str) -> None:
        """A figure that was published, and with whose help the case was built."""
        self.figures.append(Figure(what, text, measured, "used"))

    def published(self, what: str, text: str, measured: float | str, *, cure: bool = False) -> None:
        """A figure that was published, and that the case was not built with."""
        self.figures.append(
            Figure(what, text, measured, "cured, published" if cure else "published")
        )

    def cured(self, what: str, text: str, measured: float | str) -> None:
        """A figure after the cure, which nobody published."""
        self.figures.append(Figure(what, text, measured, "cured"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published report, and its reproduction."""

    title: str  # what happens, in one line
    source: str  # "pytorch/pytorch#193400"
    date: str  # of the text that has the figures, "2026-08-13"
    library: str  # whose memory it is: "PyTorch"
    kind: str  # one of KINDS
    version: str  # of that library, as the thread says
    observed: str  # what its author saw
    why: str  # in two sentences
    cure: str  # a setting, a policy, or a change of the program; "" if there is none
    upstream: str  # what the project did since, as of the day when the thread was read
    inferred: tuple[str, ...]  # what the thread does not say, and the case assumes
    reproduce: Callable[[Trial], None]
    #: How far a figure may be off, as a part of it; above half a percent only with a reason.
    within: float = 0.005
    needs_torch: bool = False

    def run(self, *, recorded: bool = False) -> Trial:
        """Runs it, and returns what was measured. The figures are not judged: see `failures`."""
        trial = Trial(recorded=recorded)
        self.reproduce(trial)
        return trial

    def failures(self, trial: Trial) -> list[Figure]:
        """The figures that are further off than this case allows. What is ours must be exact."""
        return [
            figure
            for figure in trial.figures
            if figure.error > (0 if figure.role == "cured" else self.within)
        ]


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """A thread that could not be reproduced, and why."""

    source: str
    date: str
    observed: str
    reason: str
    whose: str  # "ours": a fault or a gap of bfc; "hardware": only a device knows; "thread"
