"""`bfc anonymise`: a recording without names and times, to give to others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bfc.cli.replay import PICKLES, read_trace

EPILOG = """\
OUT has the events (allocations, frees, releases of what is cached: sizes and streams), the numbers
that PyTorch recorded about segments, and the allocator's settings. It has no stack frames, no names
of owners, no times, and no other text of IN. It replays to the same addresses as IN.

examples:
  bfc anonymise snapshot.pickle shared.npz
  bfc anonymise run.npz shared.npz
"""


def add_to(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "anonymise",
        help="strip frames, names and times from a recording, so that it can be shared",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        metavar="IN",
        type=Path,
        help=f"an .npz trace, a memory snapshot of PyTorch ({', '.join(PICKLES)}) or a log of RMM "
        "(.csv)",
    )
    add("target", metavar="OUT", type=Path, help="the .npz file to write")
    add(
        "--snapshot-device",
        type=int,
        metavar="N",
        help="the device whose history to take, if a snapshot has those of several",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Writes OUT, and says what is in it."""
    target: Path = arguments.target
    if target.suffix.lower() != ".npz":
        raise ValueError(f"{target}: OUT is a trace, whose name ends in .npz")
    if arguments.snapshot_device is not None and arguments.source.suffix.lower() not in PICKLES:
        raise ValueError(
            f"--snapshot-device {arguments.snapshot_device}: it is an option for memory snapshots "
            f"of PyTorch ({', '.join(PICKLES)}), and IN is none"
        )
    trace = read_trace(arguments.source, arguments.snapshot_device, frames=False).anonymised()
    trace.save(target)
    print(f"{target}: {len(trace)} events, without frames, names and times")
    return True
