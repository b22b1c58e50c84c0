from typing import Any

import numpy as np
from numpy.typing import NDArray

class Stacks:
    """A tree of stacks. Each is a frame and the stack that called it, so that stacks share their common part.

    Number 0 is the empty stack. No object is made for each frame of a stack: a list is walked once, and a frame,
    which is a dict in the file, becomes a row at its first use.
    """

    def __init__(self, content: Any) -> None: ...
    def __len__(self) -> int: ...
    @property
    def rows(self) -> list[tuple[str, int, str]]: ...
    def number_of(self, frames: Any) -> int:
        """The number of the stack for a list of frames, innermost first; 0 if it is not a list."""

    def fill(self, out: NDArray[np.uint32]) -> None:
        """Writes the parent and the frame of each stack."""

    def first_of(self, ranks: NDArray[np.int64], outermost: bool, out: NDArray[np.int64]) -> None:
        """Writes one rank for each stack: that of the outermost frame that has one (`outermost`), or the smallest rank
        of its frames. `ranks` has the rank of each frame, or -1 for none. -1 is written if no frame has a rank.
        """
