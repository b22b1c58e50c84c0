"""The program that a command runs."""

from __future__ import annotations

import argparse


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds a script with its arguments, `command`, or -m and a module with its own, `module`."""
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.PARSER,  # its arguments too, which may begin with an option
        metavar="MODULE",
        help="run a module, as python -m",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the program, with its arguments",
    )
