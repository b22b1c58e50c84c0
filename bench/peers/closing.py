"""How a compiled original ends with the program that drives it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class Closing:
    """Is closed at the end of its `with` block, or else when nothing refers to it any more.

    `close` may be called twice, and by an object whose `__init__` has failed.
    """

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()
