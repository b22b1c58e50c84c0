"""The owner of an allocation in a recording, found from its entry and its frames."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from bfc.libraries import NDArray, np
from bfc.pytorch._recording import Stacks

#: The most owners that a trace can have, and the longest name.
MOST_OWNERS = 1 << 16
LONGEST_NAME = 256

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3.", "/torch/")
_NOTEBOOKS = ("<ipython-input", "<stdin>")


def is_the_users(filename: str) -> bool:
    """Whether a frame's file is the user's own Python code: neither installed nor Python's own.

    >>> is_the_users("/home/me/train.py"), is_the_users("/usr/lib/python3.11/runpy.py")
    (True, False)
    """
    path = filename.replace("\\", "/")
    if path.startswith(_NOTEBOOKS):
        return True
    return path.endswith(".py") and not any(part in path.lower() for part in _LIBRARIES)


def _matches(filename: str, pattern: str) -> bool:
    path = filename.replace("\\", "/")
    return pattern in path or fnmatchcase(path, pattern)


class Owners:
    """The names of owners, numbered in order of appearance; number 0 is "", for no owner."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def number_of(self, name: Any) -> int:
        """The number of a name; 0 if it is not a string, or if there are too many names."""
        if type(name) is not str or not name:
            return 0
        name = name[:LONGEST_NAME]
        if name not in self.numbers and len(self.numbers) >= MOST_OWNERS:
            return 0
        return self.numbers.setdefault(name, len(self.numbers))

    def of_stacks(
        self, stacks: Stacks, used: set[int], rules: Mapping[str, str]
    ) -> NDArray[np.uint16]:
        """The owner of each stack that is used: that of the first rule that matches a frame's file,
        else the outermost frame in the user's own code."""
        patterns = list(rules)
        matched = np.full(len(stacks.rows), -1, np.int64)
        users = np.full(len(stacks.rows), -1, np.int64)
        for number, (filename, _, _) in enumerate(stacks.rows):
            found = (at for at, pattern in enumerate(patterns) if _matches(filename, pattern))
            matched[number] = next(found, -1)
            users[number] = number if is_the_users(filename) else -1
        by_rule = np.empty(len(stacks), np.int64)
        by_frame = np.empty(len(stacks), np.int64)
        stacks.first_of(matched, False, by_rule)
        stacks.first_of(users, True, by_frame)
        owners = np.zeros(len(stacks), np.uint16)
        for stack in sorted(used):
            if by_rule[stack] >= 0:
                owners[stack] = self.number_of(rules[patterns[by_rule[stack]]])
            elif by_frame[stack] >= 0:
                filename, line, name = stacks.rows[by_frame[stack]]
                short = filename.replace("\\", "/").rsplit("/", 1)[-1]
                owners[stack] = self.number_of(f"{short}:{line} in {name}")
        return owners
