"""`bfc demo`: the main commands on a recording that is made on the spot."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from bfc_tools.cli import advise, report
from bfc_tools.cli.miniature import record

#: The training needs more than this under PyTorch's default settings, and less under others.
DEVICE = "9GiB"

HELP = "record a small training, and show what to do with it"
EPILOG = """\
It needs no GPU, and no PyTorch. The recording is of the memory of a small transformer that is
trained on a simulated GPU: a memory snapshot as PyTorch writes it.

exit code: 0 all well, 2 a wrong call or file.
"""

NEXT = """\
Open {page} in a browser. Next, on this recording:

  bfc replay {recording} --device {device} --policy caching --policy bfc:virtual_memory
  bfc report {recording} --policy caching:expandable_segments:True -o {page}

or on a run of yours, recorded in PyTorch:

  torch.cuda.memory._record_memory_history()
  ...  # a few steps
  torch.cuda.memory._dump_snapshot("snapshot.pickle")

  bfc advise snapshot.pickle --device 34GiB
  bfc report snapshot.pickle"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("bfc-demo"),
        metavar="FOLDER",
        help="where to write the recording and the report (default: bfc-demo)",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Records the training, and runs the commands that it prints. Returns True."""
    folder: Path = arguments.folder
    recording, page = folder / "training.pickle", folder / "training.html"
    folder.mkdir(parents=True, exist_ok=True)
    record(recording)
    print(f"A small transformer was trained for 12 steps, and its memory recorded: {recording}")
    _show(advise, recording, "--device", DEVICE)
    _show(report, recording, "-o", page)
    names = {"recording": shlex.quote(str(recording)), "page": shlex.quote(str(page))}
    print(NEXT.format(device=DEVICE, **names))
    return True


def _show(command: Any, *words: str | Path) -> None:
    """Runs another command as if it had been typed."""
    texts = [str(word) for word in words]
    name = command.__name__.rpartition(".")[2]
    print(f"\n$ bfc {name} {shlex.join(texts)}", flush=True)
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    command.run(parser.parse_args(texts))
    print()
