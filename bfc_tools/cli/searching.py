"""The questions of `bfc predict` that take several predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bfc.units import format_bytes
from bfc_tools.cli import models
from bfc_tools.cli.endings import ended_in_order
from bfc_tools.cli.streams import tell
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.axes import Axis
from bfc_tools.predicting.cheapest import Cheapest
from bfc_tools.predicting.clusters import DaskTries, RayTries
from bfc_tools.predicting.ranks import Ranks
from bfc_tools.predicting.search import Search
from bfc_tools.predicting.serves import Serves
from bfc_tools.predicting.tries import Runs, Tried, Tries
from bfc_tools.predicting.whatif import WhatIf
from bfc_tools.predicting.world import World
from bfc_tools.study.workers import usable_cores

#: The options that ask one of them.
QUESTIONS = ("largest", "cheapest", "what_if", "nproc")
#: What is asked of a model that serves, unless another question is.
SERVES = "task serve"
#: Where they may be answered, beside this machine.
CLUSTERS: dict[str, Callable[..., AbstractContextManager[Runs]]] = {
    "dask": DaskTries,
    "ray": RayTries,
}
#: Those that belong to a single prediction.
SINGLE = ("save", "by", "markdown")


def add_questions(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The options that ask for several predictions."""
    add = parser.add_argument
    add(
        "--largest",
        action="append",
        metavar="NAME=A..B",
        default=default,
        help="the largest value of an argument with which it fits",
    )
    add(
        "--cheapest",
        action="store_true",
        default=default or False,
        help="the smallest of all GPUs that are known on which it fits",
    )
    add(
        "--what-if",
        action="store_true",
        default=default or False,
        help="what holds the memory, and what each change of the program would save",
    )
    add(
        "--with",
        metavar="CHANGES",
        default=default,
        help="make changes of the program, such as checkpoint,bf16",
    )
    add(
        "--nproc",
        type=int,
        metavar="N",
        default=default,
        help="predict all of so many processes (on each node)",
    )
    add("--nnodes", type=int, metavar="N", default=default, help="the number of nodes (default: 1)")
    add(
        "--jobs",
        type=int,
        metavar="N",
        default=default,
        help="so many predictions at a time (default: one for each core)",
    )
    for name, cluster in (
        ("dask", "Dask cluster: its scheduler"),
        ("ray", "Ray cluster: its head"),
    ):
        add(
            f"--{name}",
            metavar="ADDRESS",
            default=default,
            help=f"make several predictions on a {cluster}, not on this machine",
        )


def asked_for(arguments: argparse.Namespace) -> list[str]:
    """Which questions the options ask. Raises ValueError if they do not go together."""
    asked = [name for name in QUESTIONS if getattr(arguments, name) not in (None, False)]
    found = [name.replace("_", "-") for name in asked]
    if arguments.serves is not None and not (found or any(getattr(arguments, a) for a in SINGLE)):
        found = [SERVES]
    if len(found) > 1:
        named = " and ".join(f"--{name}" for name in found)
        raise ValueError(f"{named} are two questions: ask one after the other")
    clusters = [name for name in CLUSTERS if getattr(arguments, name) is not None]
    if clusters and not found:
        raise ValueError(
            f"--{clusters[0]} is for several predictions, and this is one: it goes with "
            "--largest, --cheapest, --what-if and --nproc"
        )
    if len(clusters) > 1:
        raise ValueError("--dask and --ray are two clusters: name one")
    for name in SINGLE if found else ():
        if getattr(arguments, name):
            raise ValueError(
                f"--{name} is about one prediction, and --{found[0]} makes several: leave it out, "
                "and predict the one that you want to look at"
            )
    if "cheapest" in found and arguments.device is not None:
        raise ValueError("--cheapest goes through all GPUs: leave --device out")
    for name in ("jobs", "nproc", "nnodes"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is 1 or more, not {getattr(arguments, name)}")
    if arguments.nnodes is not None and arguments.nproc is None:
        raise ValueError("--nnodes says on how many nodes; --nproc, how many processes each has")
    return found


def search(arguments: argparse.Namespace, asked: Asked) -> bool:
    """Answers a question, and prints what was found, also after Ctrl-C. Returns whether anything
    fits. Raises RuntimeError if that is not known of anything."""
    found: Search | Cheapest | WhatIf | Ranks | Serves
    if arguments.nproc is not None:
        world = World(arguments.nproc, arguments.nnodes or 1)
        found = Ranks(asked, world, lambda rank, tried: _tell_of_rank(rank, world, tried))
    elif arguments.what_if:
        found = WhatIf(asked, _tell)
    elif arguments.cheapest:
        found = Cheapest(asked, lambda name, tried: _tell({"--device": name}, tried))
    elif not arguments.largest:
        found = Serves(asked, arguments.serves, _tell)
    else:
        found = Search(asked, [Axis.parse(text) for text in arguments.largest], _tell)
    if arguments.named is not None:
        models.import_transformers()
    try:
        with ended_in_order(), _runs(arguments, asked) as tries:
            found.run(tries)
    finally:
        if found.is_known:
            print(json.dumps(found.to_dict(), indent=1) if arguments.json else str(found))
            sys.stdout.flush()
    if found.fits is None or not found.is_known:
        raise RuntimeError(found.failure)
    return found.fits


def _runs(arguments: argparse.Namespace, asked: Asked) -> AbstractContextManager[Runs]:
    """What runs the tries: this machine, or the cluster that is named."""
    for name, tries in CLUSTERS.items():
        address = getattr(arguments, name)
        if address is not None:
            return tries(address, asked, arguments.jobs)
    return Tries(arguments.jobs or usable_cores())


def _tell_of_rank(rank: int, world: World, tried: Tried) -> None:
    """A line on standard error for each rank, and what its program printed if it failed."""
    if tried.error and not tried.is_mistake:
        for line in tried.output.splitlines():
            tell(f"[rank {rank}] {line}")
    _tell({f"rank {rank} of": world.size}, tried)


def _tell(values: Any, tried: Tried) -> None:
    """A line on standard error for each try, and where bfc failed in it."""
    for line in tried.output.splitlines() if tried.is_mistake else ():
        tell(line)
    named = ", ".join(f"{name} {value}" for name, value in values.items())
    answers = {True: "it fits", False: "it does not fit", None: tried.error or "it failed"}
    held = f", {format_bytes(tried.needs)} reserved" if tried.needs else ""
    tell(f"bfc: {named}: {answers[tried.fits]}{held}")
