"""Other libraries, imported when they are needed, and results as tables of pandas.

No extra of the package brings pandas or matplotlib: who wants a DataFrame or a figure has them, and
nothing else needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bfc.errors import DeviceUnavailableError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from pandas import DataFrame
else:

    class _Lazy:
        """Becomes a module when something of it is first used: `import bfc` does not wait."""

        def __init__(self, name):
            self.__name__ = name

        def __getattr__(self, name):
            if name == "__wrapped__":  # which doctest asks everything for
                raise AttributeError(name)
            module = importlib.import_module(self.__name__)
            self.__dict__ = vars(module)
            return getattr(module, name)

    np, torch = _Lazy("numpy"), _Lazy("torch")
    NDArray = object  # of annotations, which are not evaluated

__all__ = ["NDArray", "client", "frame_of", "frame_of_rows", "np", "torch"]


def client(module: str, install: str) -> Any:
    """A library's module. Raises DeviceUnavailableError where it is missing or does not load."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeviceUnavailableError(
            f"{module} cannot be imported ({error})\n  try: pip install {install}"
        ) from error


def frame_of(columns: Mapping[str, Any]) -> DataFrame:
    """Columns of one length, as a DataFrame. Raises DeviceUnavailableError without pandas."""
    frame: DataFrame = client("pandas", "pandas").DataFrame(dict(columns))
    return frame


def frame_of_rows(kind: type[Any], rows: Iterable[Any]) -> DataFrame:
    """Rows of one dataclass, with a column for each of its fields, also where there are no rows.
    Raises DeviceUnavailableError without pandas."""
    listed = list(rows)
    names = [field.name for field in fields(kind)]
    return frame_of({name: [getattr(row, name) for row in listed] for name in names})
