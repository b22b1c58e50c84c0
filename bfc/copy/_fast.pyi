from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

def address_of(array: np.ndarray[Any, Any]) -> int: ...
def copy(
    dst: T,
    src: Any,
    *,
    non_blocking: bool = False,
    stream: Any = None,
    conj: bool = False,
    neg: bool = False,
) -> T: ...
