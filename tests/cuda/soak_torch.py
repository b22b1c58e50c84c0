"""PyTorch on pools of ours for as long as it is told, on the emulated driver.

`make soak-torch-cuda TRIES=10000` has threads tangle in processes of 400 tries each, by turns for
each kind of pool: see `tests/helpers/torch_tangle.py` for what they do, and what must not happen.
`make soak-torch-cuda PROGRAMS=1-100` compares random programs of 1,500 steps, one for each of these
seeds, with PyTorch's own allocator: see `tests/helpers/torch_programs.py`. `make soak-torch-cuda
SLEEPS=1-25` plays random programs of 4,000 steps in which tags sleep and wake while calls of the
driver fail, and compares contents: see `tests/helpers/torch_sleep_program.py`. Prints a line for
each process or program; what failed is said with the line that repeats it, and the rest goes on.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import torch_runtime  # noqa: E402
from torch_programs import differences  # noqa: E402

HELPERS = Path(__file__).parents[1] / "helpers"
TANGLE, SLEEP = HELPERS / "torch_tangle.py", HELPERS / "torch_sleep_program.py"
KINDS = ("caching", "stitch", "expandable")
EACH, STEPS, SLEEP_STEPS = 400, 1500, 4000
HANGS = 7200  # seconds: the process itself says sooner what hangs


def ran(environment: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
        env=environment,
    )


def tangle(environment: dict[str, str], tries: int, first: int) -> int:
    """How many processes failed."""
    seen: Counter[str] = Counter()
    failed = 0
    for number in range(-(-tries // EACH)):
        kind, seed = KINDS[number % len(KINDS)], first + number
        words = [str(TANGLE), kind, str(min(EACH, tries - number * EACH)), str(seed)]
        done = ran(environment, words)
        print(f"{kind}, seed {seed}: {done.stdout.strip()}", flush=True)
        for count, what in re.findall(r"(\d+) ([a-z][a-z ]*)", done.stdout):
            seen[what] += int(count)
        if done.returncode:
            failed += 1
            print(f"ended with {done.returncode}: {done.stderr[-6000:]}", flush=True)
    print(f"{failed} processes failed; in all", dict(seen), flush=True)
    return failed


def compare(folder: Path, seeds: range) -> int:
    """How many programs differed."""
    differed = 0
    with torch_runtime.runner(folder) as run:
        for seed in seeds:
            try:
                found = differences(run, seed, STEPS)
            except AssertionError as error:  # one of the two crashed
                found = str(error)
            differed += bool(found)
            print(f"seed {seed}: {found or 'equal'}", flush=True)
    print(f"{differed} of {len(seeds)} programs of {STEPS} steps differ", flush=True)
    return differed


def sleep(environment: dict[str, str], seeds: range) -> int:
    """How many programs failed."""
    seen: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        done = ran(environment, [str(SLEEP), str(seed), str(SLEEP_STEPS)])
        print(f"seed {seed}: {done.stdout.strip()}", flush=True)
        if done.returncode:
            failed += 1
            print(f"ended with {done.returncode}: {done.stderr[-6000:]}", flush=True)
        else:
            seen += Counter(ast.literal_eval(done.stdout)) + Counter(steps=SLEEP_STEPS)
    print(f"{failed} of {len(seeds)} programs failed; in the others", dict(seen), flush=True)
    return failed


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=0)
    parser.add_argument("--programs", help="a range of seeds: 1-100")
    parser.add_argument("--sleeps", help="another one: 1-25")
    parser.add_argument("--seed", type=int, default=1, help="of the first process of tries")
    given = parser.parse_args()
    folder = torch_runtime.build()
    environment = torch_runtime.environment(folder)
    failed = tangle(environment, given.tries, given.seed) if given.tries else 0
    if given.programs:
        failed += compare(folder, seeds_of(given.programs))
    if given.sleeps:
        failed += sleep(environment, seeds_of(given.sleeps))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
