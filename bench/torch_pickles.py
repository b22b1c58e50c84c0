"""How fast a memory snapshot of PyTorch is read, and in how much memory.

    python -m bench.torch_pickles [--megabytes 40]

writes a snapshot as a training step's history would be, in PyTorch's own form: an entry for each
allocation and for both halves of each free, some 670 frames in all, in Python and in C++, and a
list of 17 to 69 of them for every allocation and every free, made anew each time. Recorded files
that we have seen are like that: about 39 frames a list, 165 bytes an entry. A second snapshot has
an empty list in place of each, as a history recorded with `context=None` has.

Then a process of its own reads it. What it reports is the time of `Trace.from_torch`, and the most
memory that the process had. Last, `bfc advise` is run on it with two processes of its own, and what
all three have at once is the sum of their shares (PSS), looked at every 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bfc

MIB = 1 << 20
SEGMENT = 20 * MIB
#: What a file has for each entry, roughly, with stacks and without.
BYTES_AN_ENTRY = {True: 165, False: 74}
#: More than the made run takes, so that `bfc advise` answers soon.
DEVICE = "64GiB"
FOLDER = Path(__file__).parents[1]

Frame = dict[str, Any]


def _some_frames(dice: random.Random) -> tuple[list[Frame], list[Frame]]:
    """Frames of libraries in C++, and of the program and its libraries in Python."""
    below = [
        {
            "name": f"at::_ops::{dice.choice(['mul', 'add', 'empty', 'copy'])}_{number}::call("
            "c10::DispatchKeySet, at::Tensor const&, c10::ArrayRef<c10::SymInt>)",
            "filename": "??" if number % 2 else f"RegisterCUDA_{number}.cpp",
            "line": 0,
        }
        for number in range(420)
    ]
    places = [
        *(f"/home/user/project/model/layer_{number}.py" for number in range(12)),
        *(f"/opt/venv/lib/python3.11/site-packages/torch/nn/{number}.py" for number in range(12)),
    ]
    above = [
        {"name": f"function_{number}", "filename": dice.choice(places), "line": 3 * number}
        for number in range(250)
    ]
    return below, above


def _stacks(dice: random.Random) -> Iterator[list[Frame]]:
    """A new list each time, of frames that many share."""
    below, above = _some_frames(dice)
    kinds = []
    for _ in range(1500):
        depth = dice.choice([17, 18, 19, 30, 31, 32, 59, 69])
        first = dice.randrange(len(below) - 60)
        kinds.append(below[first : first + depth - 7] + dice.sample(above[:200], 6) + above[-1:])
    while True:
        yield list(dice.choice(kinds))


def snapshot(entries: int, has_stacks: bool = True, seed: int = 0) -> dict[str, Any]:
    """A snapshot with a history of so many entries, or a few more."""
    dice = random.Random(seed)
    none: list[Frame] = []  # PyTorch writes one list for all, too
    stacks = _stacks(dice) if has_stacks else itertools.repeat(none)
    base, count = 1 << 45, 400
    history: list[dict[str, Any]] = []
    held: dict[int, tuple[int, list[Frame]]] = {}
    clock = 1_700_000_000_000_000

    def note(action: str, address: int, size: int, frames: list[Frame]) -> None:
        nonlocal clock
        clock += dice.randrange(1, 90)
        history.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": clock,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames,
            }
        )

    for number in range(count):
        note("segment_alloc", base + number * SEGMENT, SEGMENT, next(stacks))
    while len(history) < entries:
        number = dice.randrange(count)
        address = base + number * SEGMENT
        if number in held:
            frames = next(stacks)
            size, _ = held.pop(number)
            note("free_requested", address, size, frames)
            note("free_completed", address, size, frames)
        else:
            frames = next(stacks)
            held[number] = (dice.randrange(MIB + 1, SEGMENT + 1), frames)
            note("alloc", address, held[number][0], frames)
    segments = [_segment(base + number * SEGMENT, held.get(number)) for number in range(count)]
    return {
        "segments": segments,
        "device_traces": [history],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }


def _segment(address: int, live: tuple[int, list[Frame]] | None) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    used = 0
    if live is not None:
        size, frames = live
        used = -(-size // 512) * 512
        used = SEGMENT if SEGMENT - used <= MIB else used
        state = {"size": used, "requested_size": size, "state": "active_allocated"}
        blocks.append({"address": address, **state, "frames": frames})
    if used < SEGMENT:
        state = {"size": SEGMENT - used, "requested_size": 0, "state": "inactive"}
        blocks.append({"address": address + used, **state, "frames": []})
    return {
        "device": 0,
        "address": address,
        "total_size": SEGMENT,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def write(path: Path, megabytes: float, has_stacks: bool = True) -> int:
    """Writes a snapshot of about that size. Returns its bytes."""
    entries = int(megabytes * 1e6 / BYTES_AN_ENTRY[has_stacks])
    with path.open("wb") as file:
        pickle.dump(snapshot(entries, has_stacks), file, protocol=4)
    return path.stat().st_size


def read(path: Path, frames: bool) -> tuple[int, float, int]:
    """The events of the trace, the seconds, and the process's most memory, in bytes."""
    begun = time.perf_counter()
    trace = bfc.Trace.from_torch(path, frames=frames)
    seconds = time.perf_counter() - begun
    # Not from getrusage: what a process had before its exec counts there.
    status = Path("/proc/self/status").read_text().split()
    return len(trace), seconds, int(status[status.index("VmHWM:") + 1]) * 1024


def read_apart(path: Path, frames: bool) -> tuple[int, float, int]:
    """The same in a process of its own, which has held nothing else."""
    command = [sys.executable, "-m", "bench.torch_pickles", "--read", str(path)]
    command += [] if frames else ["--without-frames"]
    said = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout
    events, seconds, peak = said.split()
    return int(events), float(seconds), int(peak)


def advise_apart(path: Path) -> tuple[float, int]:
    """The seconds of `bfc advise` with two processes, and the most memory of it and them."""
    command = [sys.executable, "-m", "bfc", "advise", str(path), "--device", DEVICE, "--jobs", "2"]
    begun, most = time.perf_counter(), 0
    with subprocess.Popen(
        command, cwd=FOLDER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            most = max(most, sum(map(_share, _family(process.pid))))
            time.sleep(0.01)
    if process.returncode not in (0, 1):
        raise SystemExit(f"bfc advise has ended with {process.returncode}")
    return time.perf_counter() - begun, most


def _family(pid: int) -> list[int]:
    """A process and those that it has started."""
    found = [pid]
    for parent in found:  # grows meanwhile
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += map(int, children.split())
    return found


def _share(pid: int) -> int:
    """A process's own memory and its share of what it has in common with others, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Prints what reading took."""
    parser = argparse.ArgumentParser(prog="python -m bench.torch_pickles")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without-frames", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.read is not None:
        print(*read(chosen.read, not chosen.without_frames))
        return
    print(f"{'':36}{'MB':>8}{'events':>10}{'seconds':>9}{'peak MB':>9}{'of its size':>13}")
    for kind, has_stacks in (("stacks", True), ("no stacks", False)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "memory.pickle")
            size = write(path, chosen.megabytes, has_stacks)
            for name, frames in (("from_torch", True), ("from_torch, frames=False", False)):
                events, seconds, peak = read_apart(path, frames)
                _say(f"{kind}: {name}", size, events, seconds, peak)
            seconds, peak = advise_apart(path)
            _say(f"{kind}: bfc advise, 2 processes", size, events, seconds, peak)


def _say(name: str, size: int, events: int, seconds: float, peak: int) -> None:
    print(
        f"{name:36}{size / 1e6:8.1f}{events:10}{seconds:9.2f}{peak / 1e6:9.1f}{peak / size:13.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
