"""`torch.cuda.FloatTensor` and its like, by which older programs make tensors on the device.

From torch/__init__.py (the names of the types, `set_default_tensor_type`) and
torch/csrc/tensor/python_tensor.cpp (what they are called with).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from numbers import Integral
from operator import index
from typing import Any

import torch

#: The types by their names.
DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _Type(type):
    """The type of such a type: a tensor is an instance if it lies on the device, and has its
    elements."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.dtype != cls.dtype:
            return False
        return str(value.device.type) == "cuda"

    def __call__(cls, *given: Any, **options: Any) -> Any:
        if given and all(isinstance(one, Integral) for one in given):  # NumPy's, too
            return torch.empty([*map(index, given)], dtype=cls.dtype, device="cuda")
        if len(given) == 1 and isinstance(given[0], torch.Size):
            return torch.empty(given[0], dtype=cls.dtype, device="cuda")
        if not given:
            return torch.empty(0, dtype=cls.dtype, device="cuda")
        return torch.as_tensor(given[0], dtype=cls.dtype, device="cuda")


TYPES: dict[str, Any] = {
    name: _Type(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
    for name, dtype in DTYPES.items()
}


def _of(given: object) -> Any:
    """The type that a class or a name such as "torch.cuda.FloatTensor" stands for, or None."""
    if isinstance(given, str) and given.startswith("torch.cuda."):
        return TYPES.get(given.removeprefix("torch.cuda."))
    return given if isinstance(given, _Type) else None


def _converted(build: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, which also takes the types of the device, and names them."""

    @functools.wraps(build)
    def call(self: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        kind = _of(dtype)
        if kind is not None:
            return self.to(device="cuda", dtype=kind.dtype)
        if dtype is None and str(self.device.type) == "cuda":
            names = [name for name, one in DTYPES.items() if one == self.dtype]
            return f"torch.cuda.{names[0]}" if names else str(self.dtype)
        return build(self, dtype, *args, **options)

    return call


#: The type that the program has made the default, if it is one of the device.
default: list[Any] = [None]


def _made(build: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.Tensor(...)`, which makes a tensor of the default type, unlike its subclasses, which
    become those of what is made."""

    def new(cls: Any, *given: Any, **options: Any) -> Any:
        if cls is torch.Tensor and default[0] is not None and not options:
            return default[0](*given)
        made = build(torch.Tensor, *given, **options)
        return made if cls is torch.Tensor else made.as_subclass(cls)

    return new


def _default(build: Callable[[Any], None]) -> Callable[[Any], None]:
    """`torch.set_default_tensor_type`: where tensors are made from now on, and of what."""
    default[0] = None

    def call(given: Any) -> None:
        kind = default[0] = _of(given)
        if kind is None:
            torch.set_default_device(None)
            build(given)
        else:
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device("cuda")

    return call


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, what stands there) of all that is replaced."""
    for name, kind in TYPES.items():
        yield torch.cuda, name, kind
    yield torch.Tensor, "type", _converted(torch.Tensor.type)
    yield torch.Tensor, "__new__", staticmethod(_made(torch.Tensor.__new__))
    yield torch, "set_default_tensor_type", _default(torch.set_default_tensor_type)
