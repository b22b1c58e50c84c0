from typing import Any

import numpy as np

def array_address(array: np.ndarray[Any, Any]) -> int: ...
