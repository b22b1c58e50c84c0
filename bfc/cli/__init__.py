"""The command `bfc`, which is `python -m bfc` too: one file a subcommand, with
`add_to(subparsers)` and `run(arguments)`. In order:

    policies.py            what names an allocator on the command line
    runs.py                recorded runs that a command is given
    tables.py              tables for people, and JSON and CSV for scripts
    advise.py, devices.py, diff.py, replay.py
    anonymise.py, report.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bfc import __version__
from bfc.cli import advise, anonymise, devices, diff, replay, report

#: Exit codes: a script can tell "the run did not fit" from "the command was wrong".
OK, DOES_NOT_FIT, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 all well, 1 an allocation was refused or a
    peak has grown, 2 a wrong call or file, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="bfc", description="A GPU memory allocator that you can use, see into and trust."
    )
    parser.add_argument("--version", action="version", version=f"bfc {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    replay.add_to(subparsers)
    advise.add_to(subparsers)
    report.add_to(subparsers)
    diff.add_to(subparsers)
    anonymise.add_to(subparsers)
    devices.add_to(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        fits: bool = parsed.run(parsed)
    except BrokenPipeError:
        # The reader (head, a pager) has gone. Give the interpreter nothing to complain about when
        # it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        print(f"bfc: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("bfc: interrupted", file=sys.stderr)
        return 130
    return OK if fits else DOES_NOT_FIT
