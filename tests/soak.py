"""Random histories of both policies beside their slow models, on every core, for as long as it is
told: `SOAK_SECONDS=3600 make soak`. Prints the seed that it begins with, how far it came, and the
line that repeats what went wrong.

`python tests/soak.py --bfc SEED` and `--caching PROFILE SEED` repeat one history.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "helpers"), str(Path(__file__).parents[1])]

from caching_subject import Ours  # noqa: E402
from strategies import play  # noqa: E402
from torch_histories import BROKEN, EXPANDABLE, PROFILES, first_difference, make_history  # noqa: E402

from bfc.testing.torch_model import TorchModel  # noqa: E402

BFC_STEPS, CHECK_EVERY = 2000, 100
CACHING = [*PROFILES, *EXPANDABLE, *BROKEN]


def soak_bfc(seed: int) -> int:
    """How many operations it was."""
    play(random.Random(seed), BFC_STEPS, CHECK_EVERY)
    return BFC_STEPS


def soak_caching(profile: str, seed: int) -> int:
    history = make_history(profile, seed)
    model = TorchModel if profile in PROFILES else partial(TorchModel, rolls_back=True)
    difference = first_difference(history, model, Ours)
    assert difference is None, difference
    return len(history.operations)


def history_of(number: int) -> tuple[Callable[[], int], str]:
    """A history by its number, and how to repeat it alone: the two policies take turns."""
    if number % 2:
        return lambda: soak_bfc(number), f"--bfc {number}"
    profile = CACHING[number // 2 % len(CACHING)]
    return lambda: soak_caching(profile, number), f"--caching {profile} {number}"


def work(first: int, step: int, until: float, results: multiprocessing.Queue[object]) -> None:
    """Every step-th history from the first on."""
    done = {0: 0, 1: 0}
    number = first
    while time.monotonic() < until:
        run, again = history_of(number)
        try:
            done[number % 2] += run()
        except BaseException:
            results.put(f"{traceback.format_exc()}\nagain: python tests/soak.py {again}")
            return
        number += step
    results.put(done)


def soak(seconds: float, first: int) -> int:
    workers = os.cpu_count() or 1
    print(f"histories from {first} on, {seconds:g} s on {workers} cores", flush=True)
    results: multiprocessing.Queue[object] = multiprocessing.Queue()
    until = time.monotonic() + seconds
    odd = workers | 1  # so that each worker takes both policies by turns
    for number in range(workers):
        arguments = (first + number, odd, until, results)
        multiprocessing.Process(target=work, args=arguments).start()
    answers = [results.get() for _ in range(workers)]
    faults = [answer for answer in answers if isinstance(answer, str)]
    print(*faults, sep="\n")
    done = [answer for answer in answers if isinstance(answer, dict)]
    for parity, policy in ((1, "BFC"), (0, "caching")):
        print(f"{policy}: {sum(one[parity] for one in done):,} operations agree with the model")
    return len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bfc", type=int, metavar="SEED")
    parser.add_argument("--caching", nargs=2, metavar=("PROFILE", "SEED"))
    arguments = parser.parse_args()
    if arguments.bfc is not None:
        soak_bfc(arguments.bfc)
    elif arguments.caching is not None:
        soak_caching(arguments.caching[0], int(arguments.caching[1]))
    else:
        seconds = float(os.environ.get("SOAK_SECONDS", "3600"))
        first = int(os.environ.get("BFC_SEED") or secrets.randbits(32))
        raise SystemExit(soak(seconds, first) > 0)


if __name__ == "__main__":
    main()
