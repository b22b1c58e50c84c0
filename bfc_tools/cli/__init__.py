"""The command `bfc`, which is `python -m bfc` too: one file a subcommand, with
`HELP`, `EPILOG`, `add_options(parser)` and `run(arguments)`. In order:

    streams.py             what is printed, and where
    endings.py             exit codes, and signals that end a command
    sizes.py               numbers, and sizes of devices
    policies.py            what names an allocator on the command line
    program.py             the program that a command runs
    launchers.py           launchers of several processes
    models.py              models by name, in place of a program
    searching.py           questions that take several predictions
    runs.py                recorded runs that a command is given
    tables.py              tables for people, and JSON and CSV for scripts
    served.py              what pools of PyTorch's say at the end
    serving.py             PyTorch's allocator in the hands of bfc
    advise.py, devices.py, diff.py, predict.py, replay.py, run.py
    anonymise.py, completion.py, museum.py, plan.py, report.py
    miniature.py           a training to record
    demo.py                all of it, on that training
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import bfc
from bfc import __version__
from bfc.interpreter._process import built_with
from bfc_tools.cli.endings import Ended, Exit, ended_in_order
from bfc_tools.cli.streams import escaped, standard_output, tell
from bfc_tools.mistakes import in_words

#: In the order of the help. Each is a module of that name, which only who asks for it waits for.
COMMANDS = (
    "demo",
    "run",
    "predict",
    "advise",
    "report",
    "replay",
    "diff",
    "plan",
    "anonymise",
    "museum",
    "devices",
    "completion",
)

#: What to do about a mistake in bfc.
TO_DO = "Try again with --traceback, and report what that shows"

#: Folders whose code warns as bfc.
OURS = tuple(os.path.dirname(file) + os.sep for file in (bfc.__file__, os.path.dirname(__file__)))

EPILOG = """\
`bfc COMMAND --help` says what a command takes and prints.

exit code: 0 all well, 1 an allocation was refused or a peak has grown, 2 a wrong call or file, 3
over a budget, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 all well, 1 an allocation was refused or a
    peak has grown, 2 a wrong call or file, 3 over a budget, 130 interrupted. Without a command it
    lists them."""
    warnings.formatwarning = _in_a_line
    with contextlib.redirect_stdout(standard_output()):
        parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
        if "run" not in parsed:
            parsed.parser.print_help()
            return Exit.OK
        parsed.ends_process = arguments is None  # so the caller is the command itself
        code = _code_of(parsed)
    if parsed.subcommand == "predict":
        from bfc_tools.predicting import outside

        if outside.link is not None:  # the process outside a prediction ends with the same
            outside.link.answered(code)
    _discard_what_cannot_be_printed()
    return code


def _code_of(parsed: argparse.Namespace) -> int:
    """Runs a command, and tells what ends it."""
    # A program that is predicted has signals of its own.
    signals = contextlib.nullcontext() if parsed.subcommand == "predict" else ended_in_order()
    try:
        with signals:
            answer: bool | Exit = parsed.run(parsed)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, a pager) has gone
        return Exit.OK
    except KeyboardInterrupt:
        tell("bfc: interrupted")
        return Exit.INTERRUPTED
    except Ended as end:
        tell(f"bfc: {end}")
        return end.code
    except Exception as error:
        if "traceback" in parsed:
            tell(traceback.format_exc())
        tell(f"bfc: {in_words(error, TO_DO)}")
        return Exit.WRONG
    if isinstance(answer, Exit):
        return answer
    return Exit.OK if answer else Exit.DOES_NOT_FIT


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """As `parse_args`, which does not say what was meant."""
    name = next((word for word in words if not word.startswith("-")), "")  # no option has a value
    is_of_one = name in COMMANDS and name != "completion"  # which completes all of them
    parser, known = commands([name] if is_of_one else COMMANDS)
    if name and name not in known:
        meant = _meant([name], known) or f". There are {', '.join(known)}"
        parser.error(f"there is no command {name!r}{meant}")
    parsed, left = parser.parse_known_args(words, argparse.Namespace(parser=parser))
    if left:
        asked = known.get(name, parser)
        meant = _meant([word.partition("=")[0] for word in left], asked._option_string_actions)
        asked.error(f"unrecognized arguments: {' '.join(left)}{meant}")
    return parsed


def _meant(words: Iterable[str], known: Iterable[str]) -> str:
    """The name that the first of the words with one near it may stand for."""
    for word in words:
        for name in difflib.get_close_matches(word, known, 1):
            return f". Did you mean {name!r}?"
    return ""


class _Parser(argparse.ArgumentParser):
    """Prints no control characters of what it was given."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(escaped(message), file)


class _Version(argparse.Action):
    """Shows what a report of a fault should name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import platform
        from importlib import metadata

        python = f"{platform.python_implementation()} {platform.python_version()}"
        beside = f"NumPy {metadata.version('numpy')}, {platform.system()} {platform.machine()}"
        print(f"bfc {__version__}\n{python}, {beside}; compiled by {built_with}")
        parser.exit()


def commands(
    names: Iterable[str] = COMMANDS,
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """What reads the command line, and what reads the rest of it, for each of these commands."""
    parser = _Parser(
        prog="bfc",
        description="A GPU memory allocator that you can use, see into and trust.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version, and what it was built with"
    )
    added = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in names:
        command = importlib.import_module(f"{__name__}.{name}")
        one = added.add_parser(name, help=command.HELP, epilog=command.EPILOG)
        command.add_options(one)
        one.set_defaults(run=command.run, subcommand=name)
    for one in (parser, *added.choices.values()):
        one.formatter_class = argparse.RawDescriptionHelpFormatter  # their epilogs have tables
        one.add_argument(  # to all, so that it can stand before and after the command
            "--traceback",
            action="store_true",
            default=argparse.SUPPRESS,
            help="if something goes wrong, show where in the program",
        )
    return parser, added.choices


def _in_a_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning of bfc's own without the line of bfc that gave it. A script that is predicted has
    its warnings as ever."""
    if filename.startswith(OURS):
        return escaped(f"bfc: {message}\n")
    return _format_warning(message, category, filename, lineno, line)


_format_warning = warnings.formatwarning


def _discard_what_cannot_be_printed() -> None:
    """Gives the interpreter nothing to complain about when it flushes."""
    if sys.stdout is None:  # it was closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
