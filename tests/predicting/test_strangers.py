"""What programs of others do that predictions once could not, or told wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import bfc

MIB = 1 << 20


def sizes(run: Any) -> list[int]:
    """The allocations in their order."""
    trace = run.trace
    return [int(size) for op, size in zip(trace.op, trace.size, strict=True) if op == 0]


def test_a_module_may_move_itself_with_arguments_of_its_own() -> None:
    """torchmetrics does; Lightning failed with them."""

    class Metric(nn.Module):
        def _apply(self, fn: Callable[..., Any], exclude: Any = ()) -> nn.Module:
            assert "total" not in exclude
            return super()._apply(fn)

    with bfc.predict("a100") as run:
        nn.Sequential(Metric(), nn.Linear(8, 8)).cuda()
    assert sizes(run) == [256, 32]


def test_a_parameter_may_be_copied_by_its_class() -> None:
    """accelerate's `init_empty_weights` does so."""
    with bfc.predict("a100"):
        layer = nn.Linear(8, 8)
        given = {**vars(layer.weight), "requires_grad": False}
        made = type(layer.weight)(layer.weight.to("meta"), **given)
        assert isinstance(made, nn.Parameter)
        assert made.is_meta
        assert not made.requires_grad
