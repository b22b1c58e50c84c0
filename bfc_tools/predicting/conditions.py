"""What a condition is that a prediction does not know: what lets the program go on.

Of an `assert`, and of an `if` that raises, it is what does not fail. A `while` whose condition has
to be true is passed once: a solver's loop, say, that goes on until its error is small. All other
conditions are False.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

#: Of the lines that run, those that ask on behalf of others.
_BETWEEN = re.compile(r"/(torch|triton)/|/(typing_extensions|contextlib|functools)\.py").search
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

Position = tuple[int | None, int | None, int | None, int | None]
Statement = ast.Assert | ast.If | ast.While


def asking(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the program, from a frame on."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, "<frozen ")) and not _BETWEEN(name):
            return frame
        frame = frame.f_back
    return None


#: What is told of a loop that is passed once.
ONE_PASS = "a loop that a value ends"


class Conditions:
    """Answers the conditions of a program. `note` is told of loops that are passed once."""

    def __init__(self, note: Callable[[str, object], object]) -> None:
        self.note = note
        #: The loops that are in their only pass: their frames and lines.
        self._entered: set[tuple[int, CodeType, int]] = set()
        #: Of each question: the place of the last element, and how often that lay behind another.
        self._read: dict[tuple[str, str], tuple[int, int]] = {}

    def answer(self) -> bool:
        """What the condition is that the program asks for now."""
        frame = asking(sys._getframe(1))
        if frame is None:
            return False
        passes, line = _wanted(frame.f_code, frame.f_lasti)
        if not line or not passes:
            return passes
        loop = (id(frame), frame.f_code, line)
        self._entered ^= {loop}
        if loop not in self._entered:
            return False
        self.note(ONE_PASS, "passed once")
        return True

    def read_on(self, question: tuple[str, str], element: int) -> int:
        """Notes the place of an element that is asked for: how often it lay behind the last."""
        last, times = self._read.get(question, (0, 0))
        times += element > last
        self._read[question] = element, times
        return times


@functools.cache
def _wanted(code: CodeType, instruction: int) -> tuple[bool, int]:
    """What a condition has to be, and the line of the loop that it is of. Python asks at two places
    for one condition: before a loop, and at its end."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    if position is None or None in position:
        return False, 0
    for statement in _statements(code.co_filename):
        found = _below(statement.test, position, _position(statement) == position)
        if found is not None:
            line = statement.lineno if isinstance(statement, ast.While) else 0
            return found == (not isinstance(statement, ast.If)), line
    return False, 0


def _below(test: ast.expr, position: Position, whole: bool) -> bool | None:
    """Whether a test is true if the expression at a position is, or false; None if it is not that
    of the test. Of `a and b` Python tells the place of all of it."""
    whole = whole or _position(test) == position
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = _below(test.operand, position, whole)
        return None if found is None else not found
    if isinstance(test, ast.BoolOp):
        each = {_below(one, position, whole) for one in test.values} - {None}
        return each.pop() if len(each) == 1 else None
    return True if whole else None


def _position(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


@functools.cache
def _statements(file: str) -> tuple[Statement, ...]:
    """The statements of a file whose conditions are looked at."""
    try:
        return tuple(_conditions(ast.parse(Path(file).read_bytes())))
    except (OSError, ValueError, SyntaxError):
        return ()


def _conditions(tree: ast.AST) -> Iterator[Statement]:
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.Assert | ast.While) or raises:
            yield node  # type: ignore[misc]
