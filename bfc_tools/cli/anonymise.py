"""`bfc anonymise`: a recording without names and times, to give to others."""

from __future__ import annotations

import argparse
from pathlib import Path

from bfc.pytorch.stripped import strip
from bfc_tools.cli.runs import FILE, add_snapshot_device, read_trace
from bfc_tools.study.file_formats import PICKLES, has_devices

HELP = "strip names and times from a recording, to share it"
EPILOG = """\
OUT has the events (allocations, frees, releases of what is cached: sizes and streams), the numbers
that PyTorch recorded about segments, and the allocator's settings. It has no stack frames, no names
of owners, no times, and no other text of IN. It replays to the same addresses as IN.

If OUT ends in .pickle, and IN is a memory snapshot of PyTorch, OUT is one too, of all its devices,
and PyTorch's memory viewer opens it.

examples:
  bfc anonymise snapshot.pickle shared.npz
  bfc anonymise snapshot.pickle shared.pickle
  bfc anonymise run.npz shared.npz
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="IN", type=Path, help=FILE)
    add("target", metavar="OUT", type=Path, help="the file to write: .npz, or .pickle")
    add_snapshot_device(add)


def run(arguments: argparse.Namespace) -> bool:
    """Writes OUT, and says what is in it."""
    source: Path = arguments.source
    target: Path = arguments.target
    is_snapshot, device = has_devices(source), arguments.snapshot_device
    becomes_snapshot = target.suffix.lower() in PICKLES
    if device is not None and (not is_snapshot or becomes_snapshot):
        raise ValueError(
            f"--snapshot-device {device}: it is an option for a memory snapshot of PyTorch "
            f"({', '.join(PICKLES)}) that becomes a trace (.npz)"
        )
    if becomes_snapshot and is_snapshot:
        count = strip(source, target)
    elif target.suffix.lower() == ".npz":
        trace = read_trace(source, device, frames=False).anonymised()
        trace.save(target)
        count = len(trace)
    else:
        raise ValueError(
            f"{target}: OUT ends in .npz, or like IN, if that is a memory snapshot of PyTorch "
            f"({', '.join(PICKLES)})"
        )
    print(f"{target}: {count} events, without frames, names and times")
    return True
