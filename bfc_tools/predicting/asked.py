"""A program, what is asked of it, and the figures that answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bfc_tools.predicting import script as scripts
from bfc_tools.predicting.failures import allocated_nothing, failed, hint_to_oom, how_it_ended
from bfc_tools.predicting.script import Ran
from bfc_tools.predicting.stopping import Limits, text_of_program

if TYPE_CHECKING:
    from bfc_tools.predicting.verdict import Verdict
    from bfc_tools.study.advice import Advice

#: What a module's file is called, behind the module's name.
MODULE_ENDS = (".py", "/__main__.py")


@dataclass(frozen=True)
class Asked:
    """A script, or a module, with its arguments, and the device that is asked about. It can be sent
    to other processes."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    title: str = ""  # what it is called, if the script is one of bfc's own
    limits: Limits = field(default_factory=Limits)
    device: str = "h100"
    budget: int | None = None  # bytes that PyTorch may take there, if not all
    cc: str | None = None
    sms: int | None = None
    settings: str | None = None
    oom: bool = False
    real_files: bool = False
    changes: tuple[str, ...] = ()
    as_torch: str | None = None  # the release whose rules hold
    #: Whether its answer looks for settings of the allocator, where it does not fit.
    advise: bool = False
    #: Variables of the environment that it gets.
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def called(self) -> str:
        """What it is called where it is talked about."""
        return self.title or self.script

    def run(self, progress: Callable[[Ran], object] | None = None) -> Ran:
        """Runs it in this process."""
        os.environ.update(self.environment)
        return scripts.run(
            self.script,
            self.arguments,
            module=self.module,
            files=str(_file_of(self.script).parent) if self.title else None,
            limits=self.limits,
            progress=progress,
            device=self.device,
            cc=self.cc,
            sms=self.sms,
            settings=self.settings,
            oom=self.oom,
            real_files=self.real_files,
            changes=self.changes,
            as_torch=self.as_torch,
        )

    def answer(self) -> dict[str, Any]:
        """Runs it, and returns the figures, as `bfc predict --json` has them.

        Raises ValueError or RuntimeError if there are none.
        """
        ran = self.run()
        verdict = verdict_of(ran, self.called, self.budget)
        advice = None
        if self.advise and verdict.fits is False and not ran.prediction.refusals:
            advice = ran.prediction.advise(self.budget and verdict.limit)
        return figures(ran, verdict, self.hint(ran, verdict), advice, self.budget)

    def hint(self, ran: Ran, verdict: Verdict) -> str:
        """What is said to a program that may adapt to the memory."""
        return hint_to_oom(ran, verdict, self.text() + text_of_program(ran.stopping.folder))

    def text(self) -> str:
        """The text of the script; empty if it cannot be read, which is said when it is run."""
        file = _file_of(self.script) if self.module else Path(self.script)
        try:
            return file.read_text(errors="replace")
        except OSError:
            return ""


def _file_of(module: str) -> Path:
    """The file that `python -m` runs, found without importing its package."""
    inside = module.replace(".", "/")
    files = [Path(folder, inside + end) for folder in ("", *sys.path) for end in MODULE_ENDS]
    return next((file for file in files if file.is_file()), files[0])


def verdict_of(
    ran: Ran, script: str, budget: int | None = None, error: BaseException | None = None
) -> Verdict:
    """The verdict of what ran. Raises `error`, else RuntimeError or ValueError, if that has not
    used the GPU."""
    if not len(ran.prediction.trace) and not ran.prediction.refusals:
        raise error or failed(script, ran) or allocated_nothing(script)
    return ran.prediction.verdict(budget=budget, until=how_it_ended(ran))


def fits_gpu(ran: Ran, verdict: Verdict, budget: int | None) -> bool | None:
    """Whether it fits on the GPU, whatever the budget. The verdict is that for the budget."""
    if budget is None or verdict.fits:
        return verdict.fits
    return ran.prediction.verdict(until=how_it_ended(ran)).fits


def figures(
    ran: Ran, verdict: Verdict, hint: str, advice: Advice | None, budget: int | None = None
) -> dict[str, Any]:
    """All that is known of a program that ran, for JSON."""
    error = None if ran.error is None else f"{type(ran.error).__name__}: {ran.error}"
    return ran.prediction._figures(verdict) | {
        "budget": budget,
        "fits_gpu": fits_gpu(ran, verdict, budget),
        "hint": hint,
        "steps": ran.steps,
        "forwards": ran.stopping.forwards,
        "stopped": bool(ran.stopped),
        "stopped_after": ran.stopped,
        "error": error,
        "advice": None if advice is None else json.loads(advice.to_json()),
    }
