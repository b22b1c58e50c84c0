"""The answers of `bfc predict --largest` beside recordings of GPUs, and what a search costs.

`python -m bench.largest recordings` searches for the longest context of a language model whose runs
strangers recorded on A100s (`tests/recordings`), on devices around what these runs took. The
recordings answer, too: each is replayed on the same device.

`python -m bench.largest programs` asks of programs in `bench/programs` that an H200 ran whether
they fit where they ran, and where less is left than they had live. It needs what they need.

`python -m bench.largest cost` makes searches and single predictions in turns, and `operators` says
what an operator of a prediction takes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import bfc
from bench.report import machine, say
from bfc_tools.predicting.asked import Asked, figures, verdict_of
from bfc_tools.predicting.axes import Axis
from bfc_tools.predicting.script import follow
from bfc_tools.predicting.search import Search
from bfc_tools.predicting.stopping import Limits
from bfc_tools.predicting.tries import Question, Tried, Tries
from bfc_tools.predicting.verdict import places_that_fit, settings_under_a_limit
from bfc_tools.study.candidates import CACHING, Point, replay

Key = TypeVar("Key")
ROOT = Path(__file__).parents[1]
MIB = 1 << 20
#: PyTorch takes memory from a GPU by this much at least.
SEGMENT = 2 * MIB
CONTEXTS = (128, 256, 512)
#: The programs of the recordings, by what was recorded.
RECORDED = {"inference": "inference", "training": "training"}
SCRIPT = """
import sys
sys.path.insert(0, {helpers!r})
import transformer_lm as programs

context = int(sys.argv[1].partition("=")[2])
programs.{program}(programs.medium(context), programs.WARM_ONES, "snapshot.pickle", context == 512)
"""

#: What an H200 reserved for programs, in MiB, and the ratio of what was predicted to be live to
#: what was: the table in `bench/README.md`.
MEASURED = {
    "lora": (2332, 1.00000),
    "bert": (3420, 1.00000),
    "gpt2": (5174, 0.99985),
    "llama_checkpoints": (2920, 1.00049),
    "t5": (1516, 1.00000),
    "gpt2_autocast": (9340, 1.00000),
    "vit": (1610, 1.00000),
    "convnext_channels_last": (1730, 1.00000),
    "swin": (1446, 1.00000),
    "evaluates": (1250, 1.00000),
    "qwen_generates": (1170, 1.00000),
    "lstm": (1864, 1.00000),
    "graph_network": (1200, 1.00004),
    "resnet50": (3514, 1.00068),
    "encoder_scaled": (1328, 1.00152),
    "unet": (1106, 1.00092),
    "click_model": (408, 1.06484),
    "experts": (660, 5.738),
}
STEPS = 3
#: The part of what was live that is surely too little.
TOO_LITTLE = 0.99


# -- recordings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnEach:
    """A program, and what is asked of it: figures for each of several budgets."""

    asked: Asked
    budgets: tuple[int, ...]

    @property
    def real_files(self) -> bool:
        """Whether the program works on the user's files."""
        return self.asked.real_files

    def answer(self) -> dict[str, Any]:
        """Runs it once."""
        ran = self.asked.run()
        found = {}
        for budget in self.budgets:
            verdict = verdict_of(ran, self.asked.script, budget)
            found[budget] = figures(ran, verdict, "", None, budget)
        return found[self.budgets[0]] | {"by_budget": found}


class Known:
    """Answers what a search asks from predictions that were made before."""

    width = 2

    def __init__(self, found: Mapping[tuple[str, ...], Tried]) -> None:
        self.found = found

    def outcomes(self, questions: Mapping[Key, Question]) -> Iterator[tuple[Key, Tried]]:
        """As `Tries` has them."""
        for key, asked in questions.items():
            assert isinstance(asked, Asked)
            tried = self.found[asked.arguments]
            told = tried.figures.get("by_budget", {}).get(str(asked.budget), {})
            yield key, Tried(told, tried.error, tried.output)


def recordings(folder: str) -> None:
    """A table for each program: of each device the longest context that fits."""
    os.chdir(folder)
    for what, program in RECORDED.items():
        Path(f"{what}.py").write_text(
            SCRIPT.format(helpers=str(ROOT / "tests" / "helpers"), program=program)
        )
        traces = {
            context: bfc.Trace.load(
                ROOT / "tests" / "recordings" / f"rec_wedsonlin_medium_{context}_{what}.npz"
            )
            for context in CONTEXTS
        }
        whole = {
            context: replay(one, Point(CACHING, ""), 1 << 40) for context, one in traces.items()
        }
        budgets = sorted(
            {
                size
                for one in whole.values()
                for peak in (one.peak_reserved, one.peak_live)
                for size in (peak, peak - SEGMENT)
            }
        )
        asked = Asked(
            f"{what}.py", ("context=0",), device="a100", as_torch="2.11", limits=Limits(1 << 62)
        )
        axis = Axis.parse(f"context={','.join(map(str, CONTEXTS))}")
        (form,) = axis.forms(asked)
        questions = {
            given.arguments: OnEach(given, tuple(budgets))
            for given in (form.give(asked, context) for context in CONTEXTS)
        }
        with Tries(1) as tries:
            found = dict(tries.outcomes(questions))
        say(f"{what}: MiB that PyTorch may take, and the longest context that fits")
        say(f"{'MiB':>10}  {'recordings':>10}  {'--largest':>9}")
        for budget in budgets:
            recorded = _longest(
                [context for context in CONTEXTS if _completes(traces[context], budget)]
            )
            search = Search(replace(asked, budget=budget), [axis], lambda values, tried: None)
            search.run(Known(found))
            ours = search.found[0].value
            differs = "" if ours == recorded else f"  differs: {search.answer}"
            say(f"{budget / MIB:10.2f}  {recorded or '-':>10}  {ours or '-':>9}{differs}")


def _completes(trace: bfc.Trace, budget: int) -> bool:
    return replay(trace, Point(CACHING, ""), budget).completes


def _longest(fitting: list[int]) -> int | None:
    """The longest of those below all that do not fit."""
    found = None
    for context in CONTEXTS:
        if context not in fitting:
            break
        found = context
    return found


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """One of `bench.programs`, for some steps: figures where it ran, and where it cannot have."""

    name: str
    real_files: bool = True

    def answer(self) -> dict[str, Any]:
        """Runs it once."""

        def program() -> None:
            import torch

            from bench.programs import PROGRAMS

            torch.manual_seed(0)
            step = PROGRAMS[self.name](torch)
            for _ in range(STEPS):
                step()

        reserved, ratio = MEASURED[self.name]
        limits = Limits(steps=1 << 62)
        ran = follow(program, str(ROOT), limits=limits, device="h200", real_files=True)
        there = verdict_of(ran, self.name, reserved * MIB)
        live = ran.prediction.peak_allocated / ratio
        less = verdict_of(ran, self.name, int(TOO_LITTLE * live))
        settings = settings_under_a_limit(ran.prediction.settings)
        layouts = places_that_fit(ran.prediction.runs(), settings, reserved * MIB)
        more = {"live": live, "with_less": less.fits, "layouts": layouts}
        return figures(ran, there, "", None, reserved * MIB) | more


def programs(names: list[str]) -> None:
    """A line for each program."""
    chosen = names or list(MEASURED)
    say("MiB that an H200 reserved in three steps, and what is predicted of these, and at most (of")
    say("more steps, and at other addresses). Whether it fits in what was reserved there: it ran")
    say(f"(if not, why), and in {TOO_LITTLE:.0%} of what was live there: it cannot")
    say(f"{'':24}{'reserved':>9}{'predicted':>10}{'at most':>9}{'live':>9}  in that, in less")
    right = 0
    with Tries(1) as tries:
        for name, tried in tries.outcomes({name: Program(name) for name in chosen}):
            reserved, _ = MEASURED[name]
            found = tried.figures
            if tried.error or not found:
                say(f"{name:24}{reserved:9}  {tried.error or 'it failed'}")
                continue
            right += (tried.fits, found["with_less"]) == (True, False)
            layouts = found["layouts"]
            why = f"{found['reason']}: it fits at {sum(layouts)} of {len(layouts)}"
            there = "yes" if tried.fits else f"no ({why})"
            sizes = (found["peak_reserved"], tried.needs, found["live"])
            columns = "".join(f"{size / MIB:{10 - (at > 0)}.0f}" for at, size in enumerate(sizes))
            less = "yes" if found["with_less"] else "no"
            say(f"{name:24}{reserved:9}{columns}  {there}, {less}")
    say(f"as on the H200: {right} of {len(chosen)}")


# -- what a search costs --------------------------------------------------------------------------

COMMAND = ["-m", "bfc", "predict", "--json", "--no-advice", "--device", "24GiB"]
EXAMPLE = str(ROOT / "examples" / "predicting" / "train_lm.py")
#: Of eight tries: where both arguments stand, no others show how the script takes them.
SEARCH = ["--largest", "batch=1..512", "--largest", "longest=2048,3072"]
STANDING = ["--batch=1", "--longest=2048"]


def _timed(*words: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds of the processor and in all that a command takes, and what it prints."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, wall, json.loads(done.stdout)


def cost(rounds: int) -> None:
    """A search next to a prediction of the largest batch that it found."""
    processor, walls, tries = [], [], 0
    for _ in range(rounds):
        spent, wall, found = _timed(*SEARCH, EXAMPLE, *STANDING)
        rows = found["frontier"]
        tries = sum(len(row["tries"]) for row in rows)
        largest = rows[-1]
        options = f"--batch={largest['value']}", f"--longest={largest['other']}"
        one, one_wall, _ = _timed(EXAMPLE, *options)
        processor.append(spent / one)
        walls.append(wall / one_wall)
        say(f"{tries} tries: {spent:.1f} s of the processor, {wall:.1f} s in all")
        say(f"a prediction: {one:.1f} s of the processor, {one_wall:.1f} s in all")
    for what, ratios in (("of the processor", processor), ("in all", walls)):
        say(
            f"a search of {tries} tries / a prediction, seconds {what}: {min(ratios):.2f} / "
            f"{median(ratios):.2f} / {max(ratios):.2f} (min, median, max of {rounds})"
        )


def operators(rounds: int) -> None:
    """What an operator takes of the processor: a prediction of many steps next to one of few."""
    found = []
    for _ in range(rounds):
        few, many = (_timed(EXAMPLE, "--steps", str(steps)) for steps in (2, 22))
        found.append(1e3 * (many[0] - few[0]) / (many[2]["operators"] - few[2]["operators"]))
    say(
        f"an operator, ms of the processor: {min(found):.3f} / {median(found):.3f} / "
        f"{max(found):.3f} (min, median, max of {rounds})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.largest", description=__doc__)
    parser.add_argument("part", choices=("recordings", "programs", "cost", "operators"))
    parser.add_argument("names", nargs="*", help=f"programs of {', '.join(MEASURED)}")
    parser.add_argument("--rounds", type=int, default=5, help="of cost and operators (5)")
    options = parser.parse_args()
    say(machine())
    if options.part == "recordings":
        with tempfile.TemporaryDirectory() as folder:
            recordings(folder)
    elif options.part == "programs":
        programs(options.names)
    elif options.part == "operators":
        operators(options.rounds)
    else:
        cost(options.rounds)


if __name__ == "__main__":
    main()
