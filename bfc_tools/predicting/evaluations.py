"""Evaluations whose passes are alike: a few are run, and the others are left out.

Programs evaluate before the first step and between steps, often in hundreds of passes that all take
the same memory. What is left out must change nothing of what follows: so a loop is ended only if
its own text keeps no results but numbers, and makes no step.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bfc.libraries import torch
from bfc.pytorch.owners import is_the_users
from bfc_tools.predicting.memory import Memory
from bfc_tools.predicting.places import is_machinery

#: So many passes of a loop must be alike, one behind the other, before the others are left out.
ALIKE = 10
#: What a loop must not call: what keeps a result for later, or trains.
KEEPS = frozenset(
    (
        *("append", "extend", "add", "insert", "update", "put", "save", "dump"),
        *("write", "writelines", "writerow", "backward", "step"),
    )
)
#: What makes a number of a tensor: that may be kept.
NUMBERS = frozenset(("item", "float", "int"))


class Loop(NamedTuple):
    """A loop of a program: its first and last line, that of the statement behind it in the same
    block (0: there is none), that of its function (0: of none), and whether it may be ended."""

    line: int
    end: int
    behind: int
    function: int
    may_end: bool


@dataclass
class _Passes:
    """What the passes of a loop took: the last one, and how many before it took the same."""

    events: int = -1  # in the memory's history, behind the last pass
    took: Any = None
    alike: int = 0


class Evaluations:
    """Ends loops whose passes are alike. `is_followed` answers whether a forward pass is one that
    counts: of a module that no other module calls."""

    def __init__(self, memory: Memory, is_followed: Callable[[], bool]) -> None:
        self.memory, self.is_followed = memory, is_followed
        self.told: set[tuple[str, int]] = set()
        self._of: tuple[object, ...] = ()
        self._passes = _Passes()
        #: What a DataLoader has delivered last, and what delivered it.
        self._loader: Any = None
        self._delivered = self._seen = self._asked = 0

    def after_forward(self, module: Any, *_: object) -> None:
        """A module has made a forward pass."""
        main = threading.current_thread() is threading.main_thread()
        if torch.is_grad_enabled() or not main or not self.is_followed():
            return
        goes_over_items, self._asked = self._delivered != self._asked, self._delivered
        if module.training and not goes_over_items:  # such as a game that is played
            return
        frame = _users(sys._getframe(1))
        if frame is None:
            return
        loop = loop_around(frame.f_code, frame.f_lineno)
        if loop is None:
            return
        self._compare((id(frame), frame.f_code, loop))
        if self._passes.alike == ALIKE - 1 and self._end(frame, loop):
            self._tell(frame, loop)
            self._of = ()  # the same frame may begin it again

    def _end(self, frame: FrameType, loop: Loop) -> bool:
        """Ends a loop, if that can be done: returns whether."""
        if loop.behind:
            free = sys.gettrace() is None  # of debuggers, and of what measures coverage
            if free:
                _jump(frame, loop)
            return free
        if self._loader is None or self._delivered != self._seen + 1:
            return False
        self._loader._sampler_iter = iter(())
        return True

    def delivers(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`__next__` of the iterators of DataLoaders, followed."""

        @functools.wraps(function)
        def followed(iterator: Any) -> Any:
            found = function(iterator)
            if threading.current_thread() is threading.main_thread():
                self._loader, self._delivered = iterator, self._delivered + 1
            return found

        return followed

    def _compare(self, of: tuple[object, ...]) -> None:
        """Notes what the memory did since the last pass of the loop."""
        if of != self._of:
            self._of, self._passes = of, _Passes()
        passes, history = self._passes, self.memory.history
        begin, passes.events = passes.events, len(history)
        if begin >= 0:
            sizes, live = history.size[begin:].tobytes(), self.memory.peaks.live
            took = history.op[begin:].tobytes(), sizes, live
            passes.alike = passes.alike + 1 if took == passes.took else 0
            passes.took = took
        if passes.alike < ALIKE - 1:
            self._seen = self._delivered

    def _tell(self, frame: FrameType, loop: Loop) -> None:
        place = frame.f_code.co_filename, loop.line
        if place not in self.told:
            self.told.add(place)
            print(
                f"bfc: {place[0]}:{place[1]}: {ALIKE} passes of this loop, which evaluates, took "
                "the same memory: the others are left out. --steps 0, which runs the program to "
                "its end, runs them all",
                file=sys.stderr,
                flush=True,
            )


@contextlib.contextmanager
def shortened(memory: Memory, is_followed: Callable[[], bool]) -> Iterator[None]:
    """Leaves out, meanwhile, passes of evaluations that are alike."""
    evaluations = Evaluations(memory, is_followed)
    hook = torch.nn.modules.module.register_module_forward_hook(evaluations.after_forward)
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    before = iterators.__next__
    iterators.__next__ = evaluations.delivers(before)
    try:
        yield
    finally:
        iterators.__next__ = before
        hook.remove()


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_the_users(name) and not is_machinery(name):
            return frame
        frame = frame.f_back
    return None


def _jump(frame: FrameType, loop: Loop) -> None:
    """Lets a loop end when it begins its next pass: the frame goes on behind it, as a debugger's
    jump does. At the line of the loop itself no block inside of it is open."""

    def local(at: FrameType, event: str, argument: object) -> Any:
        if event == "line" and at.f_lineno == loop.line:
            at.f_lineno = loop.behind  # type: ignore[misc]  # a trace function may set it
            at.f_trace = None
            sys.settrace(None)
        elif event == "return":
            sys.settrace(None)
        return local

    frame.f_trace = local
    sys.settrace(lambda at, event, argument: None)


def loop_around(code: CodeType, line: int) -> Loop | None:
    """The innermost loop around a line of a code that may be ended before its end."""
    loops = loops_of(code.co_filename)
    inside = [one for one in loops if one.function == code.co_firstlineno or is_module(code, one)]
    around = [one for one in inside if one.line < line <= one.end]
    innermost = max(around, default=None)
    return innermost if innermost is not None and innermost.may_end else None


def is_module(code: CodeType, loop: Loop) -> bool:
    """Whether a code is that of a whole file, and the loop in no function."""
    return code.co_name == "<module>" and not loop.function


def loops_of(file: str) -> tuple[Loop, ...]:
    """The loops of a file, as it is now."""
    try:
        state = os.stat(file)
        return _loops(os.path.abspath(file), state.st_mtime_ns, state.st_size)
    except (OSError, ValueError, SyntaxError):
        return ()


@functools.cache
def _loops(file: str, time: int, size: int) -> tuple[Loop, ...]:
    return tuple(_below(ast.parse(Path(file).read_text()), 0))


def _below(node: ast.AST, function: int) -> Iterator[Loop]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        block = block if isinstance(block, list) else []  # a lambda's is an expression
        for one, behind in zip(block, [*block[1:], None], strict=False):
            if isinstance(one, ast.For):
                line = 0 if behind is None else behind.lineno
                ends = not one.orelse and may_end(one) and (line > 0 or _goes_over_items(one))
                yield Loop(one.lineno, one.end_lineno or 0, line, function, ends)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, function)


def may_end(loop: ast.For) -> bool:
    """Whether a loop's text keeps nothing for later but numbers, and trains nothing."""
    nodes = [one for statement in loop.body for one in ast.walk(statement)]
    if any(isinstance(one, ast.Yield | ast.YieldFrom | ast.Await | ast.Return) for one in nodes):
        return False
    return not any(isinstance(one, ast.Call) and _keeps(one) for one in nodes)


def _goes_over_items(loop: ast.For) -> bool:
    """Whether what a DataLoader delivers can be what a loop goes over, not what it asks for."""
    calls = [one for one in ast.walk(loop) if isinstance(one, ast.Call)]
    return not any(_name(one) in ("range", "next") for one in calls)


def _keeps(call: ast.Call) -> bool:
    return _name(call) in KEEPS and not all(
        isinstance(one, ast.Call) and _name(one) in NUMBERS for one in call.args or [call]
    )


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")
