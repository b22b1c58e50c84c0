"""The command in forks of a process in which nothing has run but imports: one that has made a
prediction cannot fork others that make one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_forks = get_context("forkserver")
#: All that a prediction imports, and what FakeTensorMode does: two seconds of a process each.
_forks.set_forkserver_preload(
    ["torch._dynamo", "bfc_tools.cli.predict", "bfc_tools.predicting.tries"]
)


def command(*words: str) -> tuple[int, str, str]:
    """The exit code of `bfc` with these words, and what it prints: on standard output, and on
    standard error."""
    found: tuple[int, str, str] = called(_main, words)
    return found


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns there."""
    ours, theirs = _forks.Pipe(duplex=False)
    process = _forks.Process(target=_call, args=(theirs, os.getcwd(), function, arguments))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _call(answers: Connection, folder: str, function: Any, arguments: Any) -> None:
    os.chdir(folder)
    answers.send(function(*arguments))


def _main(words: list[str]) -> tuple[int, str, str]:
    from bfc_tools.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    sys.stdout.flush()
    return code, out.getvalue(), err.getvalue()
