"""A model by name, in place of the program that a prediction runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from bfc_tools.cli.sizes import device_bytes
from bfc_tools.models.building import KINDS, configured, weights_of
from bfc_tools.models.names import PREFIX, located, longest, need_transformers
from bfc_tools.models.options import engine_options, serve_options
from bfc_tools.models.serving import Server
from bfc_tools.predicting import devices
from bfc_tools.predicting.serves import LONGEST, Load

#: By task, the module that does it.
TASKS = {"train": "bfc_tools.models.train", "serve": "bfc_tools.models.serve"}
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
    task: str
    longest: int | None = None  # the most tokens that it has positions for, if that is known
    engine: bool = False  # whether a server's own arithmetic is asked for
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
    task, left, engine = "train", [], False
    given = iter(rest)
    for word in given:
        name, equals, value = word.partition("=")
        if name == "--task":
            task = value if equals else next(given, "")
        else:
            engine = engine or name == "--engine"
            left.append(word)
    if task not in TASKS:
        raise ValueError(f"--task is {' or '.join(TASKS)}, not {task or 'nothing'}")
    need_transformers()
    place = located(title.removeprefix(PREFIX))
    if engine and task != "serve":
        raise ValueError("--engine names a server: it goes with --task serve")
    return Named(title, TASKS[task], (place, *left), task, longest(place), engine)


def import_transformers() -> None:
    """Imports what all tries of a search need."""
    os.environ.update(OFFLINE)  # which is read when it is imported
    transformers = importlib.import_module("transformers")
    for name in ("AutoConfig", *KINDS, "StaticCache"):
        getattr(transformers, name)


def load_of(named: Named | None, words: Sequence[str]) -> Load | None:
    """What a model is to serve, by the arguments of its program; None for any other program."""
    if named is None or named.task != "serve" or named.engine:
        return None
    parsed, _ = serve_options().parse_known_args(list(words))
    return Load(parsed.context, parsed.concurrency, named.longest or LONGEST)


def server_of(named: Named, words: Sequence[str], device: str) -> Server:
    """What a server has room for, by its own arithmetic.

    Raises ValueError or RuntimeError if the configuration lacks what is needed, or with what else
    is wrong.
    """
    asked = engine_options().parse_args(list(words))
    for name in ("context", "concurrency", "tensor_parallel_size", "max_num_batched_tokens"):
        if getattr(asked, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more, not {getattr(asked, name)}")
    for name in ("gpu_memory_utilization", "mem_fraction_static"):
        if not 0 < getattr(asked, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} is between 0 and 1")
    os.environ.update(OFFLINE)
    try:
        config = configured(asked).to_dict()
        if asked.weights is None:
            weights = weights_of(asked) // asked.tensor_parallel_size
        else:
            weights = device_bytes(asked.weights, "--weights")
    except SystemExit as end:
        raise RuntimeError(f"{named.title}: {end.code}") from None
    return Server(config, asked, devices.find(device).memory, weights)
