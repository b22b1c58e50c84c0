"""What stands in for a function of PyTorch while a prediction runs, and counts as that function.

Subclasses of tensors keep tables of the functions that they have versions of, and PyTorch asks them
with its own function. A table may be older than the prediction, or filled while it runs: as a key
the one function finds the other.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch

#: Packages whose modules hold none of a program's names.
_NOT_LOOKED_AT = {"torch", "numpy", "sympy", "bfc", "bfc_tools", *sys.stdlib_module_names}


class StandIn:
    """A function that is called in place of another, and equal to it.

    Parameters
    ----------
    of : callable
        The function of PyTorch.
    function : callable
        What is called.
    """

    def __init__(self, of: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, of)
        self._of, self._function = of, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Asks subclasses of tensors first, as PyTorch's functions do, and calls the function."""
        given = (*args, *kwargs.values())
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(self, given, *args, **kwargs)
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """What is a method of PyTorch's tensors stays one."""
        binds = instance is not None and hasattr(self._of, "__get__")
        return types.MethodType(self, instance) if binds else self

    def __eq__(self, other: object) -> bool:
        """Whether the other is the function of PyTorch, or stands in for it."""
        return bool(self._of == (other._of if isinstance(other, StandIn) else other))

    def __hash__(self) -> int:
        """As that of the function of PyTorch."""
        return hash(self._of)


@contextmanager
def standing_in(
    name: str, *holders: Any, of: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Lets functions stand in for those of one name in modules and classes of PyTorch.

    Parameters
    ----------
    name : str
        Of the function in each holder.
    *holders : module or type
        Where callers look it up.
    of : callable
        Is given a function of PyTorch, and returns what is called in its place.
    """
    import torch.jit._builtins as builtins

    table = builtins._get_builtin_table()  # so that torch.jit takes it for its own operator
    made: dict[Any, StandIn] = {}
    with ExitStack() as stack:
        for holder in holders:
            build = getattr(holder, name)
            stand_in = made.setdefault(build, StandIn(build, of(build)))
            stack.enter_context(patch.object(holder, name, stand_in))
            if id(build) in table:
                stack.enter_context(patch.dict(table, {id(stand_in): table[id(build)]}))
        for module, alias, stand_in in _imported(made):
            stack.enter_context(patch.object(module, alias, stand_in))
        yield


def _imported(made: dict[Any, StandIn]) -> Iterator[tuple[types.ModuleType, str, StandIn]]:
    """Where modules of the program have imported one of these functions, before the prediction
    began: the module, its name there, and what is to stand there."""
    by_id = {id(build): stand_in for build, stand_in in made.items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _NOT_LOOKED_AT or type(module) is not types.ModuleType:
            continue
        for alias, value in list(vars(module).items()):
            if id(value) in by_id:
                yield module, alias, by_id[id(value)]
