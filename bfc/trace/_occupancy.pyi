import numpy as np
from numpy.typing import NDArray

def fill_cells(
    op: NDArray[np.uint8],
    number: NDArray[np.uint32],
    size: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    places: NDArray[np.uint64],
    ends: NDArray[np.uint64],
    cells: NDArray[np.float32],
) -> tuple[list[tuple[int, int]], int]: ...
