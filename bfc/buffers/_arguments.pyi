from typing import Any

import numpy as np

def array_address(array: np.ndarray[Any, Any]) -> int:
    """The address of the first item of a NumPy array. Raises TypeError.

    NumPy's own attributes for it take about 1 us, and crash if the host has no memory.
    """
