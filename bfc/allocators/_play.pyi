from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bfc.allocators._allocator import Allocator

def find_fault(
    op: NDArray[np.uint8],
    id: NDArray[np.uint32],
    number: NDArray[np.uint32],
    size: NDArray[np.uint64],
    numbers: int,
) -> tuple[int, str] | None: ...

class Run:
    def __init__(
        self,
        allocator: Allocator,
        op: NDArray[np.uint8],
        number: NDArray[np.uint32],
        size: NDArray[np.uint64],
        stream: NDArray[np.uint16],
        handles: NDArray[np.uint32],
        addresses: NDArray[np.uint64],
        owner: NDArray[np.uint16] | None = None,
        owners: Sequence[str] = (),
    ) -> None: ...
    @property
    def failed(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def peak_bytes_live(self) -> int: ...
    @property
    def peak_bytes_in_use(self) -> int: ...
    @property
    def peak_bytes_reserved(self) -> int: ...
    def play(
        self, progress: Callable[[int], None] | None = None, rebuilt: int = 0, give_up: bool = False
    ) -> bool: ...
    def set_ends(self, end: NDArray[np.uint8]) -> None: ...
    def set_pools(
        self,
        pool: NDArray[np.uint16],
        ids: NDArray[np.uint64],
        actions: Iterable[tuple[int, int, int, int]],
    ) -> None: ...
    def set_marks(self, marks: Iterable[tuple[int, str]]) -> None: ...
    def keep_timeline(self, samples: int, rebuilt: int = 0) -> None: ...
    def timeline_rows(self) -> bytes: ...
