import numpy as np
from numpy.typing import NDArray

SEARCH_ORDERS: int

def place_in_order(
    first: NDArray[np.int32],
    begin: NDArray[np.int32],
    end: NDArray[np.int32],
    size: NDArray[np.uint32],
    order: NDArray[np.int32],
    offset: NDArray[np.int64],
    sections: int,
    wall: int | None = None,
) -> int: ...
def search(
    begin: NDArray[np.int32],
    end: NDArray[np.int32],
    size: NDArray[np.int32],
    life: NDArray[np.int32],
    sections: int,
    capacity: int,
    order: int,
    steps: int,
    offset: NDArray[np.int64],
) -> bool | None: ...
def find_overlap(
    block: NDArray[np.uint32],
    is_birth: NDArray[np.uint8],
    offset: NDArray[np.uint64],
    size: NDArray[np.uint64],
) -> tuple[int, int] | None: ...
def match(
    slots: NDArray[np.uint64],
    requests: NDArray[np.uint64],
    matched: NDArray[np.int64],
    smaller: bool,
) -> None: ...
def as_torch_rounds(
    sizes: NDArray[np.uint64], rounded: NDArray[np.uint64], division_bits: NDArray[np.uint8]
) -> None: ...
