"""Where in the program something is allocated: the module, the calls, and the phase of a step.

In the backward pass the calls are those that began it, and the module and line are those of the
operator whose gradient is computed. PyTorch numbers the operators of the forward pass that autograd
records, and each node of the backward pass knows the number of its own.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from bfc.libraries import torch
from bfc.pytorch.owners import is_the_users
from bfc_tools.predicting.kinds import ACTIVATIONS, BACKWARD_PASS, OPTIMIZER_STEP, OTHER

#: The phases of a step.
PHASES = ("", "forward", "backward", "optimizer")
NONE, FORWARD, BACKWARD, OPTIMIZER = range(4)
#: The most owners that a trace can have.
MOST_OWNERS = (1 << 16) - 1
#: Like `id`, but without its audit event, which would call the prediction's hook for each frame.
_identity = object.__hash__
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Files whose frames are machinery of the fake tensors, and would not be there on a GPU.
_RUNS = (
    *("/runpy.py", "/bin/bfc", "/bfc/__main__.py"),
    *("/bfc_tools/command.py", "/bfc_tools/cli/__init__.py", "/bfc_tools/cli/predict.py"),
    "/bfc_tools/cli/searching.py",
)
_MACHINERY = ("/torch/_subclasses/", "/torch/utils/_python_dispatch.py", "/torch/_ops.py")


def is_machinery(filename: str) -> bool:
    """Whether a frame's file is ours, or is what runs a script or fake tensors."""
    return (
        filename.startswith((_OURS, "<frozen "))
        or filename.endswith(_RUNS)
        or any(part in filename for part in _MACHINERY)
    )


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own files that a frame stands in, as "train.py:61" with its
    folders; or an empty text."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_the_users(name) and not is_machinery(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def layer(name: str) -> str:
    """A module's name, without the numbers of layers.

    >>> layer("layers.3.attn"), layer("conv1")
    ('layers.*.attn', 'conv1')
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class Places:
    """Where the program is now. It holds nothing of the program but names and code."""

    def __init__(self) -> None:
        self.owners: dict[str, int] = {"": 0}
        #: The first is of no stack: (0, 0) is the empty one.
        self.frames: dict[tuple[str, int, str], int] = {("", 0, ""): 0}
        self.stacks: dict[tuple[int, int], int] = {(0, 0): 0}
        self.phase = NONE
        self.modules: dict[int, list[int]] = {}
        self.names: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: By thread and number of an operator of the forward pass: its owner and its stack. Each
        #: thread counts for itself, and checkpoints compute again in that of the backward pass.
        self.forward: dict[tuple[int, int], tuple[int, int]] = {}
        self.backward_stack, self.backward_of = 0, 0
        self.reads_streams = False
        self.get_stream: Callable[[], int] = int
        self._shown: dict[int, bool] = {}
        self._codes: list[CodeType] = []
        self._calls: dict[tuple[int, int, int], int] = {}

    # -- what the memory asks -------------------------------------------------------------------

    def stream(self) -> int:
        """The stream of this thread."""
        return self.get_stream() if self.reads_streams else 0

    def kind(self) -> int:
        """What an allocation is for that nothing more is known of."""
        return _KIND_OF_PHASE[self.phase]

    def now(self, operator: str) -> tuple[int, int, int, int]:
        """(owner, stack, phase, stack of the forward pass) of what happens now."""
        modules = self.modules.get(threading.get_ident())
        if modules:
            stack = self.stack()
            return modules[-1], self._operator(stack, operator), self.phase, stack
        node = torch._C._current_autograd_node()
        if node is None:
            stack = self.stack()
            return 0, self._operator(stack, operator), self.phase, stack
        owner, line = self.forward.get((self.backward_of, node._sequence_nr()), (0, 0))
        number = self.frames.setdefault(
            ("??", 0, f"torch::autograd::generated::{node.name()}::apply"), len(self.frames)
        )
        stack = self._child(self.backward_stack, number)
        return owner, self._operator(stack, operator), self.phase, line

    def remember(self, number: int) -> None:
        """Notes where the operator of the forward pass with this number is."""
        thread = threading.get_ident()
        modules = self.modules.get(thread)
        self.forward[thread, number] = (modules[-1] if modules else 0, self.stack())

    # -- stacks ---------------------------------------------------------------------------------

    def stack(self) -> int:
        """The number of the calls in Python that led here, without our own."""
        chain = []
        frame: FrameType | None = sys._getframe(2)
        shown = self._shown
        while frame is not None:
            code = frame.f_code
            key = _identity(code)
            show = shown.get(key)
            if show is None:
                show = self._look_at(code)
            if show:
                chain.append((key, frame.f_lasti, frame))
            frame = frame.f_back
        number, known = 0, self._calls
        for key, at, frame in reversed(chain):
            place = (number, key, at)
            found = known.get(place)
            if found is None:
                found = known[place] = self._frame(number, frame)
            number = found
        return number

    def _look_at(self, code: CodeType) -> bool:
        """Whether the frames of a code are shown; it is kept, so that its id stays its own."""
        self._codes.append(code)
        show = self._shown[_identity(code)] = not is_machinery(code.co_filename)
        return show

    def _frame(self, parent: int, frame: FrameType) -> int:
        code = frame.f_code
        place = (code.co_filename, frame.f_lineno or 0, code.co_qualname)
        return self._child(parent, self.frames.setdefault(place, len(self.frames)))

    def _child(self, parent: int, frame: int) -> int:
        return self.stacks.setdefault((parent, frame), len(self.stacks))

    def _operator(self, stack: int, operator: str) -> int:
        place = ("??", 0, f"at::_ops::{operator.removeprefix('aten::')}::call")
        return self._child(stack, self.frames.setdefault(place, len(self.frames)))

    # -- modules --------------------------------------------------------------------------------

    def enter(self, module: Any) -> None:
        """A module's forward pass begins."""
        self.modules.setdefault(threading.get_ident(), []).append(self.names.get(module, 0))

    def leave(self) -> None:
        stack = self.modules.get(threading.get_ident())
        if stack:
            stack.pop()

    def owner(self, name: str) -> int:
        """The number of an owner's name; 0 once there are too many."""
        if name not in self.owners and len(self.owners) >= MOST_OWNERS:
            return 0
        return self.owners.setdefault(name, len(self.owners))


_KIND_OF_PHASE = (OTHER, ACTIVATIONS, BACKWARD_PASS, OPTIMIZER_STEP)
