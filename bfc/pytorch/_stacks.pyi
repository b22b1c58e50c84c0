from typing import Any

import numpy as np
from numpy.typing import NDArray

class Stacks:
    """A tree of stacks: each is a frame and the stack that called it, so that what many share stands there once.

    Number 0 is the empty stack. No object is made for a frame of a stack: a list is walked along once, and a frame,
    which a file has as a dict, becomes a row at its first use.
    """

    def __init__(self, content: Any) -> None: ...
    def __len__(self) -> int: ...
    @property
    def rows(self) -> list[tuple[str, int, str]]: ...
    def number_of(self, frames: Any) -> int:
        """The stack that a list of frames stands for, the innermost first; 0 if it is not a list."""

    def fill(self, out: NDArray[np.uint32]) -> None:
        """Writes the parent and the frame of each stack."""

    def first_of(self, ranks: NDArray[np.int64], outermost: bool, out: NDArray[np.int64]) -> None:
        """Writes for each stack one of the ranks of its frames: the outermost frame's that has one, or the smallest.
        `ranks` has that of each frame, or -1; -1 is written where none has one.
        """
