"""Whether `Trace.iterations` finds the steps of trainings that `bfc.predict` runs.

    python -m bench.iterations [PROGRAM ...]

Each of `bench.programs` makes five steps without a GPU, as `bench.gpu_predictions` has them, and is
scored by its stacks, and with nothing but its events: a step is found if an iteration begins within
2 % of a step's events. Some programs update their weights several times in what they call a step,
so that more are found than steps. It needs PyTorch, and for many programs torchvision, timm or
transformers: those whose packages are missing are left out.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import bfc
from bench.programs import PROGRAMS
from bench.report import machine, say

STEPS = 5
NEAR = 0.02


def run_of(name: str, torch: Any) -> tuple[bfc.Trace, list[int]]:
    """The events of a program, and those at which its steps begin."""
    begins = []
    with bfc.predict("h100") as run:
        step = PROGRAMS[name](torch)
        for _ in range(STEPS):
            begins.append(len(run.trace))
            step()
    return run.trace, begins


def score(trace: bfc.Trace, begins: list[int]) -> tuple[int, int, str]:
    """How many steps were found, how many iterations begin elsewhere, and why there are none."""
    found = trace.iterations()
    steps, starts = np.array(begins), np.array([one.begin for one in found if one.kind == "train"])
    if not len(starts):
        return 0, 0, found.reason
    within = NEAR * float(np.median(np.diff(steps)))
    apart = abs(steps[:, None] - starts[None, :])
    hits = int((apart.min(axis=1) <= within).sum())
    return hits, int((apart.min(axis=0) > within).sum()), ""


def main() -> None:
    import torch

    say(machine())
    heads = f"{'by stacks':>12}{'others':>8}{'by structure':>15}{'others':>8}"
    say(f"{'program':26}{'events':>8}{heads}")
    tried, whole, hits, steps = 0, [0, 0], [0, 0], 0
    for name in sys.argv[1:] or PROGRAMS:
        try:
            trace, begins = run_of(name, torch)
        except ImportError as error:
            say(f"{name:26}left out: {error}")
            continue
        both = [score(one, begins) for one in (trace, trace._bare(trace.meta))]
        cells = [f"{found:>7} of {len(begins)}{others:8}" for found, others, _ in both]
        say(f"{name:26}{len(trace):8} {'   '.join(cells)} {both[0][2]}")
        tried, steps = tried + 1, steps + len(begins)
        for at, (found, others, _) in enumerate(both):
            whole[at] += found == len(begins) and not others
            hits[at] += found
    for at, way in enumerate(("stacks", "structure")):
        say(f"by {way}: {whole[at]} of {tried} programs, and {hits[at]} of {steps} steps")


if __name__ == "__main__":
    main()
