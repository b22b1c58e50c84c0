"""Calls of operators for the rules of `bfc.predict`, without PyTorch: tensors are shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from bfc_tools.predicting import devices
from bfc_tools.predicting.releases import release_of
from bfc_tools.predicting.rules import interface
from bfc_tools.predicting.rules.operators import OPERATORS

SIZES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8}


@dataclass
class Shape:
    """A tensor of a rule."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    place: str = "cuda"
    requires_grad: bool = False

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.place)

    def stride(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        found: list[int] = []
        step = 1
        for size in reversed(self.shape):
            found.insert(0, step)
            step *= size
        return tuple(found)

    def element_size(self) -> int:
        return SIZES.get(self.dtype, 4)

    def dim(self) -> int:
        return len(self.shape)

    def unsqueeze(self, dim: int) -> Shape:
        assert dim == 0
        strides = (self.numel(), *self.stride())
        return Shape((1, *self.shape), self.dtype, strides, self.place, self.requires_grad)

    def detach(self) -> Shape:
        return replace(self, requires_grad=False)

    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


def call(
    signature: str,
    *args: Any,
    result: Any = None,
    gpu: str = "a100",
    torch: tuple[int, int] = (2, 13),
    thread: int = 0,
    stream: int = 0,
    **kwargs: Any,
) -> interface.Call:
    """A call of an operator by its signature: "mm(self, mat2)", "sum(self, dim=None)"."""
    match = re.fullmatch(r"([\w:]+)\((.*)\)", signature)
    assert match is not None
    arguments = []
    for one in filter(None, match[2].split(", ")):
        name, _, default = one.partition("=")
        value = {"": None, "None": None, "False": False, "True": True}.get(default, default)
        arguments.append(SimpleNamespace(name=name, default_value=value))
    name = match[1] if "::" in match[1] else f"aten::{match[1]}"
    schema = SimpleNamespace(name=name, arguments=arguments, overload_name="")
    return interface.Call(
        func=SimpleNamespace(_schema=schema),
        args=args,
        kwargs=kwargs,
        result=result,
        gpu=devices.find(gpu),
        release=release_of(torch),
        thread=thread,
        stream=stream,
        assume=lambda what, value: None,
    )


def sizes(answers: Iterable[Any]) -> list[int]:
    """The allocations of a rule in order: what is allocated, and as a negative number what is
    released before the operator returns."""
    return [
        -one.workspace.nbytes if isinstance(one, interface.Release) else one.nbytes
        for one in answers
    ]


def of(call: interface.Call) -> list[int]:
    """What the rules say of a call: the allocations before and after its results, between them 0.

    Everything that is not kept can be released only once, after it was allocated.
    """
    name = call.func._schema.name
    parts: list[list[Any]] = [
        [one for rule in rules for one in rule(call)]
        for rules in (OPERATORS[name].before, OPERATORS[name].after)
    ]
    allocated: list[Any] = []
    for one in [*parts[0], *parts[1]]:
        if isinstance(one, interface.Release):
            allocated.remove(one.workspace)
        else:
            allocated.append(one)
    return [*sizes(parts[0]), 0, *sizes(parts[1])]


def shapes(sizes: Sequence[Sequence[int]], dtype: str = "float32") -> list[Shape]:
    """Tensors of these shapes."""
    return [Shape(tuple(size), dtype) for size in sizes]
