"""`bfc advise RUN --device SIZE`: which settings let a recorded run fit."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from bfc_tools.cli.runs import (
    FILE,
    OR_LOGS,
    add_snapshot_device,
    add_torch,
    logs_of,
    option_named,
)
from bfc_tools.cli.sizes import device_bytes
from bfc_tools.cli.streams import escaped, tell
from bfc_tools.cli.tables import add_formats, bar, show
from bfc_tools.study.advise import advise
from bfc_tools.study.cluster import connected
from bfc_tools.study.file_formats import read
from bfc_tools.study.logs.held import replays_of
from bfc_tools.study.logs.side_by_side import Logs

HELP = "find the settings under which a recorded run fits on a device"
EPILOG = """\
Of a run that ran out of memory, a sentence says how: how much was refused, by which line of the
program, what was free and where, whether that is fragmentation or capacity, and what to try.

The first line, or the one behind that sentence, names the version of PyTorch and answers: the run
fits as it is, or one line makes it fit and what that costs, or nothing does and how much is
missing. The next says whether a replay
under the recorded settings reserves what the recorded run did, to the byte: that is how far the
rest can be trusted.

columns: settings, as in PYTORCH_CUDA_ALLOC_CONF; fits, whether every request is served on the
device; refused, how many are not; reserved, the most that is taken from the device; calls, how many
calls of the driver take memory or give it back, which cost time (with expandable_segments:True and
virtual_memory, each piece that is mapped counts); smallest device, the smallest that the run was
seen to fit on, or - where that was not searched. All but the last are of one replay on the device.

Settings of PyTorch are tried one key at a time, then in pairs, and are replayed as strictly as the
PyTorch that the first line names: it refuses what is refused here. garbage_collection_threshold
needs a limit, and is tried with per_process_memory_fraction:0.99. Below stand the policies that
PyTorch does not have.

The table has at most five rows that differ in kind: the settings in force (the recorded ones, or
the defaults), expandable segments, the best of PyTorch's others (or those that the answer names
for their fewer calls), stitching, the defaults,
TensorFlow's policy. Where the run repeats, caching+plan stands below them: what bfc reserves with a
plan of the run (`bfc plan`), which was made without the iteration that it serves. --all shows every
row that was tried.

A line is proposed only where the run does not fit as it is, and stands below the answer, to be
copied. PyTorch's settings come before others, and plain ones first: expandable segments, then one
setting alone, then several, unless one needs a device that is 3 % smaller. Of equally plain ones
within 1 % of the smallest device, it is the one with the fewest calls. If other settings of
PyTorch's need half as many calls or fewer, the answer names them.

Of the log of a program that ran out of memory, or of a folder of ranks' logs, the first line says
why, and what to change; a line below says what to record where the text does not suffice. Where the
log lists the chunks, replays of what was live follow, on the memory that the log names. No --device
is needed.

What is done, and the first answer after a second or two, goes to standard error.

exit code: 0 something fits, 1 nothing does, 2 a wrong call or file, 130 interrupted.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_", metavar="RUN", type=Path, help=FILE + OR_LOGS)
    add(
        "--device",
        metavar="SIZE",
        help="what the allocator may take, such as 34GiB: without the CUDA context, NCCL, cuBLAS",
    )
    add_torch(add)
    add_formats(parser)
    add("--all", action="store_true", help="show every row that was tried, not five that differ")
    add("--thorough", action="store_true", help="replay the full grid of settings, too")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many processes to start (default: one for each core); 1 starts none",
    )
    where.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="replay on a Dask cluster instead: its scheduler, such as tcp://10.0.0.1:8786",
    )
    add_snapshot_device(add)


def run(arguments: argparse.Namespace) -> bool:
    """Prints the advice. Returns True if something fits."""
    device = None  # what is wrong with it is said before the file is read
    if arguments.device is not None:
        device = device_bytes(arguments.device, f"--device {arguments.device}")
    logs = logs_of([arguments.run_])
    if logs is not None:
        return _of_logs(logs, device, arguments)
    if device is None:
        raise ValueError("--device SIZE is missing: what the allocator may take, such as 34GiB")
    with option_named(arguments.run_):
        trace = read(arguments.run_, arguments.snapshot_device, frames=True)
    with contextlib.ExitStack() as cleanup:
        executor = None
        if arguments.dask is not None:
            executor = cleanup.enter_context(connected(arguments.dask))
        progress = cleanup.enter_context(_Progress(arguments.run_.name, len(trace)))
        advice = advise(
            trace,
            device,
            executor,
            torch=arguments.torch,
            thorough=arguments.thorough,
            jobs=arguments.jobs,
            progress=progress,
        )
    show(
        arguments,
        text=lambda: advice.text(every_row=arguments.all),
        as_json=advice.to_json,
        rows=lambda: map(asdict, advice.rows),
    )
    return advice.fits


def _of_logs(logs: Logs, device: int | None, arguments: argparse.Namespace) -> bool:
    """Prints what logs say. Returns True."""
    show(
        arguments,
        text=lambda: "\n".join([str(logs), *replays_of(logs, device)]),
        as_json=logs.to_json,
        rows=logs.rows,
    )
    return True


class _Progress:
    """A bar on a terminal; elsewhere, or without tqdm, a line for each stage."""

    def __init__(self, name: str, events: int) -> None:
        self._text = ""
        self._title = escaped(f"bfc advise: replaying {name}, {events} events")

    def __enter__(self) -> _Progress:
        self._bar = bar(desc=self._title, unit=" replays")
        if self._bar is None:
            tell(self._title)
        return self

    def __call__(self, text: str, done: int) -> None:
        if self._bar is None:
            if text != self._text:
                tell(f"bfc advise: {text}")
            self._text = text
        else:
            self._bar.set_description(f"bfc advise: {text}", refresh=False)
            self._bar.update(done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
