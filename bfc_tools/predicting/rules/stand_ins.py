"""What stands in for a function of PyTorch while a prediction runs, and counts as that function.

Subclasses of tensors keep tables of the functions that they have versions of, and PyTorch asks them
with its own function. A table may be older than the prediction, or filled while it runs: as a key
the one function finds the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class StandIn:
    """A function that is called in place of another, and equal to it.

    Parameters
    ----------
    of : callable
        The function of PyTorch.
    function : callable
        What is called.
    """

    def __init__(self, of: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, of)
        self._of, self._function = of, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Whether the other is the function of PyTorch, or stands in for it."""
        return bool(self._of == (other._of if isinstance(other, StandIn) else other))

    def __hash__(self) -> int:
        """As that of the function of PyTorch."""
        return hash(self._of)
