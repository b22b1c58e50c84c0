from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bfc.allocators._allocator import Allocator

def find_fault(
    op: NDArray[np.uint8],
    id: NDArray[np.uint32],
    number: NDArray[np.uint32],
    size: NDArray[np.uint64],
    numbers: int,
) -> tuple[int, str] | None:
    """The first event that makes no sense, as (event, what is wrong), or None."""

class Run:
    """One replay: what is live in it, and its figures."""

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
    ) -> bool:
        """Runs every event; `progress(events done)` is called now and then. What is live at the end stays live; after
        an error nothing does.

        The first `rebuilt` events bring back what was live before: the figures begin behind them. With `give_up`, a
        refusal among them ends the replay: the answer is False then, and nothing is live.
        """

    def keep_timeline(self, samples: int, rebuilt: int = 0) -> None:
        """Makes `play` keep figures over time, in about so many rows: from the last of the `rebuilt` events on."""

    def timeline_rows(self) -> bytes:
        """The rows that `keep_timeline` asked for, as bytes: seven 64-bit numbers each."""
