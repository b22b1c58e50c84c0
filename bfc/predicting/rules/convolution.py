"""Convolutions, as cuDNN does them: the layout of the result, and copies of what has another one.

From PyTorch's ATen/native/ConvUtils.h (cudnn_conv_use_channels_last), ATen/native/Convolution.cpp
(the gradient of the bias is a sum) and ATen/native/cudnn/ConvShared.cpp (what is made contiguous).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.predicting.rules.interface import Call, Release, Workspace, around, before, on_cuda, rule
from bfc.predicting.rules.reductions import kernel_of, reduce
from bfc.predicting.rules.tensors import argument, is_contiguous, nbytes, type_name

#: A dimension of size 1 has any stride.
ANY = 1


def channels_last(tensor: Any) -> bool:
    """Whether the channels of a pixel lie side by side, and those of an image pixel by pixel."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) not in (4, 5):
        return False
    expected = 1
    for index in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[index] == ANY:
            continue
        if strides[index] != expected:
            return False
        expected *= shape[index]
    # what is contiguous in both layouts counts as contiguous
    return not is_contiguous(tensor)


def by_channels(tensor: Any, weight: Any) -> bool:
    """Whether cuDNN is called for images whose channels lie side by side."""
    if "float64" in (type_name(tensor), type_name(weight)):
        return False
    return channels_last(tensor) or channels_last(weight)


@around
@contextmanager
def layouts(recorder: Any) -> Iterator[None]:
    """A fake convolution on the device has the layout that cuDNN gives it."""
    import torch

    build = torch._C._conv_determine_backend_memory_format

    def determine(tensor: Any, weight: Any, backend: Any) -> Any:
        if not on_cuda(tensor):
            return build(tensor, weight, backend)
        if not by_channels(tensor, weight):
            return torch.contiguous_format
        return torch.channels_last_3d if len(tensor.shape) == 5 else torch.channels_last

    with patch.object(torch._C, "_conv_determine_backend_memory_format", determine):
        yield


def _copies(names: dict[str, Any], last: bool) -> Iterator[Workspace | Release]:
    for name, tensor in names.items():
        if tensor is None or (is_contiguous(tensor) and not last):
            continue
        if last and (channels_last(tensor) or _both(tensor)):
            continue
        yield Workspace(nbytes(tensor), what=f"{name} in another layout")


def _both(tensor: Any) -> bool:
    """Whether the two layouts are the same: one channel, or one pixel."""
    shape = tensor.shape
    pixels = 1
    for size in shape[2:]:
        pixels *= size
    return is_contiguous(tensor) and (shape[1] == 1 or pixels == 1)


@before("aten::convolution", "aten::_convolution")
def convolution(call: Call) -> Iterator[Workspace | Release]:
    """Copies in the layout of the kernel."""
    tensor, weight = call.args[0], call.args[1]
    yield from _copies({"input": tensor, "weight": weight}, by_channels(tensor, weight))


@before("aten::convolution_backward")
def convolution_backward(call: Call) -> Iterator[Workspace | Release]:
    """The same for the backward pass."""
    gradient, tensor, weight = call.args[:3]
    names = {"gradient": gradient, "input": tensor, "weight": weight}
    yield from _copies(names, by_channels(tensor, weight))


@rule("aten::convolution_backward")
def bias(call: Call) -> Iterator[Workspace | Release]:
    """The gradient of the bias is a sum over all images and pixels."""
    mask = argument(call, "output_mask")
    if mask is None or not mask[2]:
        return
    gradient = call.args[0]
    dims = [dim for dim in range(len(gradient.shape)) if dim != 1]
    kernel = kernel_of("sum", gradient, False)
    yield from reduce(call, gradient, dims, kernel, int(gradient.element_size()))
