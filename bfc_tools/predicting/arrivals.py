"""Modules that are changed once they are imported, which a program does later, or not at all."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any


class Arrivals(importlib.abc.MetaPathFinder):
    """Calls `change` with the modules of these names: at once, or as soon as they are imported."""

    def __init__(self, names: Iterable[str], change: Callable[[Any], object]) -> None:
        self._names, self._change = frozenset(names), change
        self._looking = False

    def __enter__(self) -> Arrivals:
        for name in self._names & set(sys.modules):
            self._change(sys.modules[name])
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As the others find it, if it is one of these; its loader calls the function."""
        if name not in self._names or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._change(module)

        with contextlib.suppress(AttributeError):
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
