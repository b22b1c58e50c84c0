"""What a program reads of a tensor that has no values. Each answer is noted as an assumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bfc.predicting.rules.interface import Call, answer


@answer("aten::_local_scalar_dense")
def item(call: Call, run: Callable[[], Any]) -> Any:
    """`.item()`, `float(t)`, `bool(t)`: the value where it is known, else 1, 1.0 or False."""
    import torch

    try:
        return run()
    except Exception:
        dtype = call.args[0].dtype
        value: object = False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        call.assume(".item()", value)
        return value


@answer("aten::equal")
def equal(call: Call, run: Callable[[], Any]) -> bool:
    call.assume("torch.equal", True)
    return True


@answer("aten::_pin_memory", "aten::pin_memory")
def pin_memory(call: Call, run: Callable[[], Any]) -> Any:
    return call.args[0]


@answer("aten::is_pinned")
def is_pinned(call: Call, run: Callable[[], Any]) -> bool:
    return False
