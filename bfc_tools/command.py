"""Where the command `bfc` begins: Ctrl-C ends it in one line while it is still importing, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command `bfc`, and returns its exit code."""
    try:
        from bfc_tools.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("bfc: interrupted", file=sys.stderr)
        return 130
