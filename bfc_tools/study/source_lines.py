"""Which line of a program an allocation counts for."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from bfc.libraries import NDArray, np
from bfc.pytorch.owners import is_the_users
from bfc.trace import Trace

#: The most files of one name for which a partner is looked for.
MOST_NAMESAKES = 30


def users_files(trace: Trace) -> set[str]:
    """The files of the user's own code that a trace names."""
    numbers = np.unique(trace.frames.rows[:, 0]).tolist()
    return {name for number in numbers if is_the_users(name := trace.frames.text(number))}


def common_names(a: set[str], b: set[str]) -> dict[str, str]:
    """Names for files that stand in different folders in two runs, such as two checkouts: what
    their paths end in, as ".../model/layers.py", for both files of a pair. A pair are two files
    that each are in one run only, and have more of their end in common than either has with any
    other file.

    >>> common_names({"/home/me/run/train.py"}, {"/tmp/run/train.py"})["/tmp/run/train.py"]
    '.../run/train.py'
    """
    groups: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((a - b, b - a)):
        for name in sorted(names):
            groups[os.path.basename(name)][side].append(name)
    labels: dict[str, str] = {}
    for left, right in groups.values():
        if max(len(left), len(right)) > MOST_NAMESAKES:
            continue
        shared = [[_shared(one, other) for other in right] for one in left]
        columns = list(zip(*shared, strict=True))
        for one, row in zip(left, shared, strict=True):
            best = max(row, default=0)
            at = row.index(best) if best else -1
            if (
                best
                and row.count(best) == columns[at].count(best) == 1
                and best == max(columns[at])
            ):
                label = "/".join(["...", *one.split("/")[-best:]])
                labels[one] = labels[right[at]] = label
    return labels


def _shared(one: str, other: str) -> int:
    """How many parts at the end of two paths are equal."""
    pairs = list(zip(reversed(one.split("/")), reversed(other.split("/")), strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


class Lines:
    """The line that each stack counts for."""

    def __init__(self, trace: Trace, labels: Mapping[str, str] | None = None) -> None:
        self._frames, self._stacks = trace.frames, trace.stacks
        self._labels = labels or {}

    def of(self, stacks: NDArray[Any]) -> NDArray[np.int64]:
        """The number of a frame for each stack; -1 for the empty one."""
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
        """For each stack, itself or else the nearest of its callers whose own frame is wanted; 0 if
        there is none."""
        parents = self._stacks[:, 0].astype(np.int64)
        leads_to = np.where(wanted[self._stacks[:, 1]], np.arange(len(parents)), parents)
        leads_to[0] = 0
        while True:  # twice as far in each round
            further = leads_to[leads_to]
            if np.array_equal(further, leads_to):
                return leads_to
            leads_to = further

    def _frames_that(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """For each frame, whether its file or, if it is C++, its function is wanted."""
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
        filename = self._labels.get(frame.filename, frame.filename)
        return f"{filename}:{frame.line} in {frame.name}" if frame.line else frame.name


def short(text: str) -> str:
    """A line without the folders of its file; a function of C++ has none.

    >>> short("/home/me/train in parts/train.py:61 in step")
    'train.py:61 in step'
    """
    place, space, name = text.rpartition(" in ")
    return place.rsplit("/", 1)[-1] + space + name


def _is_python(filename: str) -> bool:
    return filename.endswith(".py")


def _is_backward(function: str) -> bool:
    """Whether it is a C++ function whose name tells which operator's gradient is computed."""
    return function.startswith("torch::autograd::generated::")


def _is_operator(function: str) -> bool:
    """Whether it is a C++ function whose name tells which operator runs."""
    return function.startswith("at::_ops::")
