"""Random histories against models and invariants, on every core, for as long as it is told.

`SOAK_SECONDS=3600 make soak` plays all fuzzers by turns, and `SOAK="places marks" make soak` those
that it names. It prints the line that repeats what went wrong, and at the end how many operations
this machine has done in all. The account is `soak.json` in the folder of `bfc.compiling.cache`.

`python tests/soak.py --again FUZZER SEED` repeats one history, and `--account` prints the account.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "helpers"), str(Path(__file__).parents[1])]

import soak_native  # noqa: E402
from caching_subject import CommonPeer, Ours  # noqa: E402
from file_runs import files  # noqa: E402
from nightly_answers import ALIGNMENTS  # noqa: E402
from soak_account import Done, added, table  # noqa: E402
from soak_captures import captures  # noqa: E402
from soak_dask import dask  # noqa: E402
from soak_mixed import mixed  # noqa: E402
from soak_pinned import pinned  # noqa: E402
from soak_plans import plans, replans  # noqa: E402
from soak_turns import turns  # noqa: E402
from strategies import play  # noqa: E402
from tensorflow_pairs import play_on_both  # noqa: E402
from torch_histories import (  # noqa: E402
    BROKEN,
    EXPANDABLE,
    NEWER,
    PROFILES,
    first_difference,
    make_history,
)

from bench.peers.tensorflow import NIGHTLY, default_cache, shim_of  # noqa: E402
from bfc.pytorch.rules import VERSIONS  # noqa: E402
from bfc_slow_models.torch_model import TorchModel  # noqa: E402

BFC_STEPS, CHECK_EVERY = 2000, 100
CACHING = [*PROFILES, *EXPANDABLE, *BROKEN]
BESIDE = {"2.11": [*PROFILES, *EXPANDABLE], "2.15": [*PROFILES, *EXPANDABLE, *NEWER]}


def soak_bfc(seed: int) -> int:
    """How many operations it was."""
    play(random.Random(seed), BFC_STEPS, CHECK_EVERY)
    return BFC_STEPS


def soak_caching(seed: int) -> int:
    version = VERSIONS[seed % len(VERSIONS)]
    profile = CACHING[seed // len(VERSIONS) % len(CACHING)]
    history = make_history(profile, seed, torch=version)
    model = TorchModel if profile in PROFILES else partial(TorchModel, rolls_back=True)
    difference = first_difference(history, model, Ours)
    assert difference is None, difference
    return len(history.operations)


def soak_original(version: str, seed: int) -> int:
    """Beside the compiled PyTorch of a version."""
    profile = BESIDE[version][seed % len(BESIDE[version])]
    history = make_history(profile, seed, torch=version)
    difference = first_difference(history, CommonPeer, Ours)
    assert difference is None, difference
    return len(history.operations)


def soak_two_ends(seed: int) -> int:
    """Requests from both ends, beside the compiled nightly build of TensorFlow."""
    alignments = ALIGNMENTS if seed % 2 else (64,)
    with contextlib.redirect_stdout(io.StringIO()):
        return play_on_both(seed, NIGHTLY, alignments, partitioned=True)


#: Each plays the history of a seed, and returns how many operations of it were verified; and how.
FUZZERS: dict[str, tuple[Callable[[int], int], str]] = {
    "bfc": (soak_bfc, "every answer and chunk, beside TensorFlow's policy in Python"),
    "caching": (soak_caching, "every answer and statistic, beside PyTorch's policy in Python"),
    "places": (soak_native.places, "every address, refusal and statistic, beside a model in C++"),
    "marks": (soak_native.marks, "no two blocks share a byte, on all policies; books at intervals"),
    "hostile": (soak_native.hostile, "the same on sources that fail and streams that are held"),
    "threads": (soak_native.threads, "the same with native threads on one allocator"),
    "forks": (soak_native.forks, "the same while children are forked, and in them"),
    "plans": (
        plans,
        "the same where most requests get the places of a plan; the same addresses again",
    ),
    "captures": (
        captures,
        "the same, and what a graph was given goes to nobody else until it is gone",
    ),
    "replans": (replans, "the same where a program changes, and gets new plans"),
    "pinned": (pinned, "the same on pinned memory, with two of Python's threads"),
    "turns": (turns, "contents, with four of Python's threads on pools of their own and shared"),
    "namespace": (partial(files, "namespace"), "files apart: a script changes none, sees a folder"),
    "landlock": (partial(files, "landlock"), "the same by Python's functions, under Landlock"),
    "block": (partial(files, "block"), "the same in a block of a program"),
    "attack": (partial(files, "attack"), "under Landlock, C and other programs change no file"),
    "mixed": (mixed, "threads, scrapes, forks, Dask and pools of each device, in one process"),
}
for number in VERSIONS:
    if list(default_cache().glob(f"torch_shim-{number}-*")):  # `make peers` builds them
        FUZZERS[f"torch-{number}"] = (
            partial(soak_original, number),
            f"every answer, statistic and call of the driver, beside PyTorch {number}",
        )
if shim_of(NIGHTLY).exists():  # `make peers-nightly` builds it
    FUZZERS["two-ends"] = (
        soak_two_ends,
        "every address, refusal, call and chunk, beside TensorFlow's nightly build",
    )
if find_spec("distributed"):  # `make test-dask` installs it
    FUZZERS["dask"] = dask, "no two blocks of a task share a byte; all is free at the end"


# -- the workers -----------------------------------------------------------------------------------


def work(names: Sequence[str], first: int, step: int, until: float, report: Connection) -> None:
    """Every step-th history from the first on. Each is reported before it begins and at its end, so
    that one that crashes is known."""
    number = first
    while time.monotonic() < until:
        name = names[number % len(names)]
        report.send((name, number, None))
        before, fault = time.monotonic(), ""
        try:
            operations = FUZZERS[name][0](number)
        except BaseException:
            operations, fault = 0, traceback.format_exc()
        report.send((name, number, (operations, time.monotonic() - before, fault)))
        number += step


class Worker:
    def __init__(self, *arguments: Any) -> None:
        self.reports, report = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.Process(target=work, args=(*arguments, report))
        self.process.start()
        report.close()
        self.history = ("", 0)
        self.is_playing = False


def soak(names: Sequence[str], seconds: float, first: int) -> int:
    """How many histories went wrong."""
    count = int(os.environ.get("SOAK_WORKERS") or os.cpu_count() or 1)
    print(
        f"{', '.join(names)}: histories from {first} on, {seconds:g} s on {count} cores", flush=True
    )
    step = next(
        n for n in range(count, count + len(names)) if (n - 1) % len(names) == 0
    )  # takes turns
    until = time.monotonic() + seconds
    workers = [Worker(names, first + n, step, until) for n in range(count)]
    done: Done = {}
    while workers:
        for reports in wait([worker.reports for worker in workers]):
            worker = next(worker for worker in workers if worker.reports is reports)
            if not heard(worker, done):
                worker.process.join()
                workers.remove(worker)
    print(table(done), "", "this machine in all:", table(added({})), sep="\n")
    return int(sum(faults for *_, faults in done.values()))


def heard(worker: Worker, done: Done) -> bool:
    """Takes a report, and puts it into the account. False at the worker's end."""
    try:
        name, number, end = worker.reports.recv()
    except EOFError:
        if not worker.is_playing:
            return False
        worker.process.join()
        end = (0, 0.0, f"the process ended with {worker.process.exitcode}")
        name, number = worker.history
    worker.history, worker.is_playing = (name, number), end is None
    if end is None:
        return True
    operations, seconds, fault = end
    figures = done.setdefault(name, [0, 0, 0])
    one = [operations, seconds, bool(fault)]
    figures[:] = [before + more for before, more in zip(figures, one, strict=True)]
    added({name: one})
    if fault:
        print(f"{fault}\nagain: python tests/soak.py --again {name} {number}", flush=True)
    return True


def main() -> None:
    said = "\n".join(f"  {name:10}{what}" for name, (_, what) in FUZZERS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nThe fuzzers, and what each verifies:\n{said}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fuzzers", nargs="*", choices=[[], *FUZZERS], metavar="FUZZER")
    parser.add_argument("--again", nargs=2, metavar=("FUZZER", "SEED"))
    parser.add_argument("--account", action="store_true")
    arguments = parser.parse_args()
    if arguments.account:
        print(table(added({})))
    elif arguments.again is not None:
        print(f"{FUZZERS[arguments.again[0]][0](int(arguments.again[1])):,} operations")
    else:
        seconds = float(os.environ.get("SOAK_SECONDS", "3600"))
        first = int(os.environ.get("BFC_SEED") or secrets.randbits(32))
        with contextlib.suppress(KeyboardInterrupt):
            raise SystemExit(soak(arguments.fuzzers or [*FUZZERS], seconds, first) > 0)


if __name__ == "__main__":
    main()
