"""Where the command `bfc` begins: Ctrl-C ends it in one line while it is still importing, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `bfc`, and returns its exit code. The arguments are the process's own, if
    there are none here."""
    try:
        from bfc_tools.cli import main as run

        return run(arguments)
    except KeyboardInterrupt:
        print("bfc: interrupted", file=sys.stderr)
        return 130
