"""Programs of PyTorch whose memory `bench.gpu_predictions` predicts and measures: each trains or
infers with random weights, and downloads nothing. Each function is given torch, and gives what it
calls once a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from bench.programs import (
    audio,
    decisions,
    dense,
    generative,
    graphs_and_tables,
    language,
    representations,
    science,
    sequences,
    vision,
)
from bench.programs._shared import Step

SUBJECTS = (
    language,
    sequences,
    audio,
    vision,
    dense,
    generative,
    representations,
    graphs_and_tables,
    decisions,
    science,
)
PROGRAMS: dict[str, Callable[[Any], Step]] = {
    name: program
    for subject in SUBJECTS
    for name, program in vars(subject).items()
    if inspect.isfunction(program)
    and program.__module__ == subject.__name__
    and not name.startswith("_")
}
