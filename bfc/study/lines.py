"""Which line of a program an allocation counts for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bfc.pytorch.owners import is_the_users
from bfc.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Lines:
    """The line that each stack counts for."""

    def __init__(self, trace: Trace) -> None:
        self._frames, self._stacks = trace.frames, trace.stacks

    def of(self, stacks: NDArray[Any]) -> NDArray[np.int64]:
        """The number of a frame for each stack; -1 for the empty one."""
        import numpy as np

        found, inverse = np.unique(stacks, return_inverse=True)
        chosen = found.astype(np.int64)
        open_ = chosen > 0
        for wanted in (is_the_users, _is_python, _is_backward, _is_operator):
            if not open_.any():
                break
            ends = self._innermost(self._frames_that(wanted))[found]
            took = open_ & (ends > 0)
            chosen[took] = ends[took]
            open_ &= ~took
        return np.where(chosen > 0, self._stacks[chosen, 1].astype(np.int64), -1)[inverse]

    def _innermost(self, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """For each stack the one with a wanted frame on top that it leads to, or 0."""
        import numpy as np

        parents = self._stacks[:, 0].astype(np.int64)
        leads_to = np.where(wanted[self._stacks[:, 1]], np.arange(len(parents)), parents)
        leads_to[0] = 0
        while True:  # twice as far in each round
            further = leads_to[leads_to]
            if np.array_equal(further, leads_to):
                return leads_to
            leads_to = further

    def _frames_that(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Of each frame, whether its file or, if it is C++, its function is wanted."""
        import numpy as np

        if not len(self._frames):
            return np.zeros(1, bool)
        column = self._frames.rows[:, 2 if wanted in (_is_backward, _is_operator) else 0]
        texts, inverse = np.unique(column, return_inverse=True)
        answers = [wanted(self._frames.text(number)) for number in texts.tolist()]
        return np.array(answers, bool)[inverse]

    def text(self, number: int) -> str:
        if number < 0:
            return ""
        frame = self._frames[number]
        return f"{frame.filename}:{frame.line} in {frame.name}" if frame.line else frame.name


def _is_python(filename: str) -> bool:
    return filename.endswith(".py")


def _is_backward(function: str) -> bool:
    """Whether it is C++ that says whose gradient is computed."""
    return function.startswith("torch::autograd::generated::")


def _is_operator(function: str) -> bool:
    """Whether it is C++ that says which operator runs."""
    return function.startswith("at::_ops::")
