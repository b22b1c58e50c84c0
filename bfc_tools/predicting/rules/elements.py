"""Single elements of tensors, which programs write and read in loops: a million of them for a text.

Neither writing a number nor looking at a part takes memory on a GPU. Here each costs little, and
nothing is kept of it: PyTorch keeps what an operator returns by its arguments, and here each place
would be another argument.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import around, file, kernel

#: The modes of a prediction: its own, and that of fake tensors. With others the program looks on.
MODES = 2


@around(
    source=file("torch/csrc/autograd/python_variable_indexing.cpp", read="2.15.0"),
    seen="compared with the operators, in the tests",
)
@contextlib.contextmanager
def written(recorder: Any) -> Iterator[None]:
    """`tensor[1, 2] = 3`: a view of one element and `fill_`, which take nothing."""
    from torch._subclasses.fake_tensor import FakeTensor

    set_item, forget = torch.Tensor.__setitem__, recorder.known.forget

    def write(self: Any, index: Any, value: Any) -> None:
        if _is_one_number(value, self) and _is_one_element(index, self):
            forget(self)
        else:
            set_item(self, index, value)

    with patch.object(FakeTensor, "__setitem__", write, create=True):
        yield


def _is_one_number(value: Any, tensor: Any) -> bool:
    """Whether a value is written to a tensor as it is, and no gradient follows."""
    alone = isinstance(value, (int, float))
    if not alone:
        place = getattr(value, "fake_device", None)
        alone = place == tensor.fake_device and not value.shape and not value.requires_grad
    return alone and not tensor.requires_grad and tensor.constant is None


def _is_one_element(index: Any, tensor: Any) -> bool:
    """Whether an index is that of one of several elements."""
    indices = index if type(index) is tuple else (index,)
    shape = tensor.shape
    if len(indices) != len(shape) or tensor.layout is not torch.strided or tensor.numel() < 2:
        return False
    for one, size in zip(indices, shape, strict=True):
        if isinstance(one, (bool, torch.Tensor)) or not hasattr(one, "__index__"):
            return False
        if not -size <= operator.index(one) < size:
            return False
    return bool(torch._C._len_torch_dispatch_stack() <= MODES)


def _plain(tensor: Any) -> Callable[..., Any] | None:
    """What makes views of a tensor without asking PyTorch, where it is a plain one; or None."""
    make: Callable[..., Any] | None = getattr(getattr(tensor, "fake_mode", None), "view_of", None)
    strided = make is not None and tensor.layout is torch.strided and tensor.constant is None
    if not strided or tensor.is_conj() or tensor.is_neg():
        return None
    return None if tensor.is_inference() or torch.is_inference_mode_enabled() else make


@kernel(
    "aten::select.int",
    source=file("ATen/native/TensorShape.cpp", "select", read="2.15.0"),
    seen="PyTorch on a CPU, in the tests",
)
def select(call: Call) -> Any:
    """A view of one place of a dimension."""
    tensor, dim, index = call.args
    shape, strides, make = list(tensor.shape), list(tensor.stride()), _plain(tensor)
    whole = type(index) is int and -len(shape) <= dim < len(shape)
    if make is None or not whole or not -shape[dim] <= index < shape[dim]:
        return call.func(*call.args, **call.kwargs)
    place = index % shape.pop(dim)
    return make(tensor, shape, strides, tensor.storage_offset() + place * strides.pop(dim))


@kernel(
    "aten::slice.Tensor",
    source=file("ATen/native/TensorShape.cpp", "slice", read="2.15.0"),
    seen="PyTorch on a CPU, in the tests",
)
def part(call: Call) -> Any:
    """A view of some places of a dimension, one behind the other or so many apart."""
    given = [*call.args, *(0, None, None, 1)[len(call.args) - 1 :]]
    tensor, dim, begin, end, step = given
    shape, strides, make = list(tensor.shape), list(tensor.stride()), _plain(tensor)
    numbers = {type(one) for one in (begin, end) if one is not None} <= {int}
    whole = numbers and type(step) is int and step > 0 and -len(shape) <= dim < len(shape)
    if make is None or not whole:
        return call.func(*call.args, **call.kwargs)
    places = range(shape[dim])[begin:end:step]
    offset = tensor.storage_offset() + places.start * strides[dim]
    shape[dim], strides[dim] = len(places), strides[dim] * step
    return make(tensor, shape, strides, offset)


@kernel(
    "aten::fill_",
    source=file("ATen/native/Fill.cpp", read="2.15.0"),
    seen="PyTorch on a CPU, in the tests",
)
def fill(call: Call) -> Any:
    """The tensor itself: it is filled where it lies."""
    tensor, value = call.args
    number = isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ()
    return tensor if number and _plain(tensor) else call.func(*call.args, **call.kwargs)
