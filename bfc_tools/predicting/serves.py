"""`bfc predict hf:MODEL --task serve`: whether a model serves on a GPU, for how many sequences of
how many tokens, and what else would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bfc.units import format_bytes, printable
from bfc_tools.models.options import load_in_words
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.axes import Axis
from bfc_tools.predicting.kinds import KINDS, KV_CACHE, PARAMETERS
from bfc_tools.predicting.largest import Largest, device_of, settle, table
from bfc_tools.predicting.tries import Runs, Tried, as_counted

CONTEXT, CONCURRENCY = "context", "concurrency"
#: Contexts are tried in steps of so many tokens, up to so many if the model names no length.
STEP, LONGEST = 256, 1 << 17
#: The most sequences that are tried.
MOST = 1024


@dataclass(frozen=True)
class Load:
    """What is served: so many sequences, of so many tokens."""

    context: int
    concurrency: int
    longest: int = LONGEST  # the most tokens that the model has positions for

    def __str__(self) -> str:
        return load_in_words(self.concurrency, self.context)


class Serves:
    """A model with what it is to serve, and with the most that it can. What has been found so far
    can be read at any time. `told` is called with each try."""

    def __init__(
        self, asked: Asked, load: Load, told: Callable[[dict[str, int], Tried], object]
    ) -> None:
        self.asked, self.load, self.told = asked, load, told
        self.base = Tried()
        #: By the name of what is varied.
        self.found: dict[str, Largest] = {}

    def run(self, tries: Runs) -> None:
        """Tries what is asked, and, unless the program fails, searches for the longest context, and
        for the most sequences."""
        load = self.load
        for _, tried in tries.outcomes({"": self.asked}):
            self.base = tried
            self.told({CONTEXT: load.context, CONCURRENCY: load.concurrency}, self.base)
        if self.base.fits is None:
            return
        contexts = range(STEP, max(STEP, load.longest) + 1, STEP)
        self.found = {
            CONTEXT: Largest(CONTEXT, contexts),
            CONCURRENCY: Largest(CONCURRENCY, range(1, MOST + 1)),
        }
        settle(tries, self.found, self._question, self._learned)

    def _question(self, name: str, value: int) -> Asked:
        return Axis(name, [value]).forms(self.asked)[0].give(self.asked, value)

    def _learned(self, name: str, value: int, tried: Tried) -> None:
        load = {CONTEXT: self.load.context, CONCURRENCY: self.load.concurrency}
        self.told(load | {name: value}, tried)

    # -- what is said ---------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether it is known what it needs."""
        return bool(self.base.figures)

    @property
    def failure(self) -> str:
        """What is said if it is not."""
        return self.base.error or "nothing was tried"

    @property
    def fits(self) -> bool | None:
        """Whether it serves what is asked; None if the program failed."""
        return self.base.fits

    @property
    def parts(self) -> dict[str, int]:
        """What is live at the peak, in bytes: the weights, the cache, and all else."""
        by_kind = (self.base.figures.get("peak") or {}).get("by_kind", {})
        weights, cache = (by_kind.get(KINDS[kind], 0) for kind in (PARAMETERS, KV_CACHE))
        return {
            "weights": weights,
            "cache": cache,
            "rest": sum(by_kind.values()) - weights - cache,
        }

    @property
    def answer(self) -> str:
        """The first line."""
        if not self.is_known:
            return f"It is not known whether it serves: {self.failure}"
        on, held = f"on {device_of(self.base.figures)}", format_bytes(self.base.needs)
        if self.fits is None:
            return f"It is not known whether it serves {self.load} {on}: the program failed."
        if not self.fits:
            return f"It does not serve {self.load} {on}: it would reserve {held}."
        doubt = as_counted(self.base.fits_at_most, "it")
        if self.base.needs > self.base.figures["limit"]:
            just = "if only just: with more room it would reserve"
            return f"It serves {self.load} {on}, {just} {held}.{doubt}"
        most = "" if self.base.is_unsure else "at most "
        return f"It serves {self.load} {on}: it reserves {most}{held}.{doubt}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes."""
        return {
            "fits": self.fits,
            "answer": self.answer,
            "context": self.load.context,
            "concurrency": self.load.concurrency,
            "parts": self.parts,
            "figures": self.base.figures,
            "largest": {name: one.to_dict() for name, one in self.found.items()},
        }

    def __str__(self) -> str:
        lines = [self.answer]
        if self.is_known:
            tokens = self.load.context * self.load.concurrency
            parts, each = self.parts, self.parts["cache"] / tokens
            most = "as counted" if self.base.is_unsure else "at most"
            lines += [
                f"weights    {format_bytes(parts['weights'])}",
                f"KV cache   {format_bytes(parts['cache'])}, {each:,.0f} bytes a token",
                f"the rest   {format_bytes(parts['rest'])} {most}: activations, workspaces",
                f"reserved   {format_bytes(self.base.needs)} {most}, by PyTorch's allocator",
            ]
        for name, one in self.found.items():
            others = CONCURRENCY if name == CONTEXT else CONTEXT
            lines += ["", f"With {others} {getattr(self.load, others)}: {one.answer}", *table(one)]
        if self.is_known:
            lines += ["", *self._not_counted()]
        return "\n".join(map(printable, lines))

    def _not_counted(self) -> list[str]:
        lines = ["not in these numbers (the ranges are rough):"]
        for one in self.base.figures["not_counted"]:
            low, high = format_bytes(one["low"]), format_bytes(one["high"])
            lines.append(f"  {one['what']}: {low} to {high}, {one['why']}")
        return lines
