from typing import Any

import numpy as np

def array_address(array: np.ndarray[Any, Any]) -> int:
    """Where the first item of a NumPy array lies. Raises TypeError.

    NumPy's own attributes for it take about 1 us, and crash where the host has no memory.
    """
