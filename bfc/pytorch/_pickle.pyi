from collections.abc import Callable
from typing import Any

from bfc.pytorch._recording import Packer

class Machine:
    def __init__(
        self,
        data: bytes,
        most_containers: int,
        most_values: int,
        most_waiting: int,
        turn_length: int,
        refusal: Callable[[bytes, int, list[Any]], str],
        shown: Callable[[object], str],
        packer: Packer | None = None,
    ) -> None: ...
    @property
    def at(self) -> int: ...
    @property
    def stack(self) -> list[Any]: ...
    def run(self) -> Any: ...
