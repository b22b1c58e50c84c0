from collections.abc import Callable
from typing import Any

class Machine:
    """The stack, the marks and the memo of a pickle that is being read.

    The limits are those of `plain_pickle.py`. `refusal` makes the error text for an operation that is refused, and
    `shown` makes the text for a value.
    """

    def __init__(
        self,
        data: bytes,
        most_containers: int,
        most_values: int,
        most_waiting: int,
        turn_length: int,
        refusal: Callable[[bytes, int, list[Any]], str],
        shown: Callable[[object], str],
    ) -> None: ...
    @property
    def at(self) -> int: ...
    @property
    def stack(self) -> list[Any]: ...
    def run(self) -> Any:
        """Returns the value. Raises TraceError, which says what is wrong and at which byte."""
