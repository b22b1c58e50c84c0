"""Exceptions and signals at any line of a source."""

from __future__ import annotations

import functools
import itertools
import linecache
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import bfc.suballocators

SOURCES = Path(bfc.suballocators.__file__).parent


class Struck(BaseException):
    pass


@functools.cache
def is_in_a_source(file: str) -> bool:
    return Path(file).parent == SOURCES


@functools.cache
def starts_with_block(file: str, line: int) -> bool:
    """Python comes by the line of a `with` once more when the block is left. An exception there
    would keep it from letting go of the lock, which no signal can do."""
    return linecache.getline(file, line).lstrip().startswith("with ")


def strike_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises at the n-th line that runs in a source."""
    left = [line]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_in_a_source(file):
            return None
        if event == "line" and not starts_with_block(file, frame.f_lineno):
            left[0] -= 1
            if left[0] == 0:
                raise Struck
        return trace

    return trace


def struck(line: int, call: Callable[..., Any], *arguments: int) -> bool:
    """Whether the call came so far as to be struck."""
    before = sys.gettrace()
    sys.settrace(strike_at(line))
    try:
        call(*arguments)
    except Struck:
        return True
    finally:
        sys.settrace(before)
    return False


def signal_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that sends a Ctrl-C at the n-th line that runs in a source."""
    left = [line]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_in_a_source(frame.f_code.co_filename):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace


def run_steps(
    steps: Iterable[Callable[[], object]],
    traced: Callable[[], object],
    trace: Callable[..., Any],
    check: Callable[[], None],
) -> bool:
    """Runs the steps, `traced` with a trace function, and checks after each. Whether any raised."""
    raised = False
    for step in steps:
        before = sys.gettrace()
        sys.settrace(trace if step is traced else before)
        try:
            step()
        except BaseException:
            sys.settrace(before)
            raised = True
        finally:
            sys.settrace(before)
        check()
    return raised


def at_each_line(attempt: Callable[[int], bool]) -> None:
    """Calls `attempt(n)`, which strikes at the n-th line, until it is False: no line is left."""
    for line in itertools.count(1):
        try:
            struck_there = attempt(line)
        except BaseException as error:
            error.add_note(f"at line {line}")
            raise
        if not struck_there:
            break
    assert line > 50
