"""A model by name, in place of the program that a prediction runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bfc_tools.models.names import PREFIX, located, need_transformers

#: By task, the module that does it.
TASKS = {"train": "bfc_tools.models.train"}
#: Variables of the environment under which transformers asks no network.
OFFLINE = (
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
)


@dataclass(frozen=True)
class Named:
    """The program that stands for a model and a task."""

    title: str  # as the user has called it
    module: str
    words: tuple[str, ...]  # its arguments
    environment: tuple[tuple[str, str], ...] = OFFLINE


def is_model(word: str) -> bool:
    """Whether a word of the command line names a model, and no program."""
    return word.startswith(PREFIX)


def read(words: Sequence[str]) -> Named:
    """The program for words such as `hf:org/model --task train --batch 8`.

    Raises ValueError or OSError if the model or the task is not known, ImportError without
    transformers.
    """
    title, *rest = words
    task, left = "train", []
    given = iter(rest)
    for word in given:
        name, equals, value = word.partition("=")
        if name == "--task":
            task = value if equals else next(given, "")
        else:
            left.append(word)
    if task not in TASKS:
        raise ValueError(f"--task is {' or '.join(TASKS)}, not {task or 'nothing'}")
    need_transformers()
    return Named(title, TASKS[task], (located(title.removeprefix(PREFIX)), *left))
