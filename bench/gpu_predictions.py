"""Predictions beside a GPU: `python -m bench.gpu_predictions`. Each of `bench.programs` runs on
the GPU for three steps with its memory recorded, and is predicted, in a process each.

`--keep FOLDER` leaves both recordings there, NAME.gpu.pickle and NAME.predicted.pickle.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.programs import PROGRAMS
from bench.report import machine, say

STEPS = 3
MIB = 1 << 20


def run_one(name: str, snapshot: str) -> None:
    """In a process of its own: on the GPU, or predicted."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    torch.manual_seed(0)
    step = PROGRAMS[name](torch)
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.memory._dump_snapshot(snapshot)
    Path(f"{snapshot}.json").write_text(json.dumps(peaks))


def events(snapshot: Path) -> list[tuple[str, int]]:
    """What was asked for and freed, in order."""
    found = pickle.loads(snapshot.read_bytes())["device_traces"][0]
    return [(e["action"], e["size"]) for e in found if e["action"] in ("alloc", "free_requested")]


def run_apart(name: str, folder: Path, *, predicted: bool, device: str) -> str:
    """Returns what went wrong."""
    snapshot = folder / f"{name}.{'predicted' if predicted else 'gpu'}.pickle"
    command = [sys.executable, "-W", "ignore"]
    if predicted:
        command += [
            "-m",
            "bfc",
            "predict",
            "--device",
            device,
            "--steps",
            "0",
            "--no-advice",
            "--real-files",
        ]
    command += ["-m", "bench.gpu_predictions"]
    if predicted:
        command += ["--"]
    done = subprocess.run(
        [*command, "--one", name, str(snapshot)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    Path(f"{snapshot}.log").write_text(done.stdout + done.stderr)
    written = Path(f"{snapshot}.json").exists()
    return "" if written else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def compare(name: str, folder: Path) -> dict[str, Any]:
    sides = [folder / f"{name}.{side}.pickle" for side in ("gpu", "predicted")]
    (live, reserved), (live_too, reserved_too) = (
        json.loads(Path(f"{side}.json").read_text()) for side in sides
    )
    real, guess = map(events, sides)
    same = next((i for i, (a, b) in enumerate(zip(real, guess, strict=False)) if a != b), None)
    if same is None and len(real) != len(guess):
        same = min(len(real), len(guess))
    return {
        "live": live_too / live,
        "reserved": reserved_too / reserved,
        "live_bytes": live,
        "reserved_bytes": reserved,
        "events": len(real),
        "differ": same,
        "there": [side[same : same + 3] for side in (real, guess)] if same is not None else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_predictions", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings")
    parser.add_argument("--device", default="h100", help="the GPU that is predicted (h100)")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SNAPSHOT"), help=argparse.SUPPRESS)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}")
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
        return
    names = options.programs or list(PROGRAMS)
    say(machine())
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def both(name: str) -> list[str]:
            return [
                run_apart(name, folder, predicted=predicted, device=options.device)
                for predicted in (False, True)
            ]

        heads = f"{'live':>9}{'reserved':>10}{'MiB':>10}{'events':>9} alike, until"
        say(f"{'predicted / measured':24}{heads}")
        for name, failed in zip(names, pool.map(both, names), strict=True):
            if any(failed):
                say(f"{name:24}on the GPU: {failed[0] or 'ran'}; predicted: {failed[1] or 'ran'}")
                continue
            found = compare(name, folder)
            differ = "all" if found["differ"] is None else f"{found['differ']} {found['there']}"
            ratios = f"{name:24}{found['live']:9.5f}{found['reserved']:10.5f}"
            say(f"{ratios}{found['reserved_bytes'] / MIB:10.1f}{found['events']:9} {differ}")


if __name__ == "__main__":
    main()
