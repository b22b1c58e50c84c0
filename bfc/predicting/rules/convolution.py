"""Convolutions, as cuDNN does them: the layout of the result, and copies of what has another one.

From PyTorch's ATen/native/ConvUtils.h (cudnn_conv_use_channels_last), ATen/native/Convolution.cpp
(the gradient of the bias is a sum) and ATen/native/cudnn/ConvShared.cpp (what is made contiguous).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.predicting.rules import cub
from bfc.predicting.rules.convolution_workspaces import Convolution
from bfc.predicting.rules.interface import (
    Call,
    Release,
    Result,
    Workspace,
    around,
    before,
    between,
    on_cuda,
    rule,
)
from bfc.predicting.rules.reductions import kernel_of, reduce
from bfc.predicting.rules.tensors import (
    argument,
    channels_last,
    is_contiguous,
    nbytes,
    suggests_channels_last,
    type_name,
)


def by_channels(tensor: Any, weight: Any) -> bool:
    """Whether cuDNN is called for images whose channels lie side by side."""
    if "float64" in (type_name(tensor), type_name(weight)):
        return False
    return suggests_channels_last(tensor) or suggests_channels_last(weight)


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


# -- workspaces ---------------------------------------------------------------------------------


def _tensor_cores(call: Call, tensor: Any) -> bool:
    """Whether the GPU has them for these numbers, and the program lets cuDNN use them."""
    name = type_name(tensor)
    if name != "float32":
        return name in ("float16", "bfloat16") and call.gpu.cc >= (7, 0)
    import torch

    return call.gpu.cc >= (8, 0) and bool(torch.backends.cudnn.allow_tf32)


def _convolution(call: Call, images: Any, weight: Any, result: Any) -> Convolution | None:
    """What cuDNN computes; None if it needs no workspace that is known."""
    if not _tensor_cores(call, images):
        return None
    last, strides = by_channels(images, weight), argument(call, "stride")
    dims = len(weight.shape) - 2
    steps = tuple(int(step) for step in strides) * (dims if len(strides) == 1 else 1)
    if argument(call, "transposed"):
        images, result = result, images
    groups = int(argument(call, "groups", 1))
    return Convolution(images, weight, result, groups, steps, last, call.gpu.sms)


@rule("aten::convolution", "aten::_convolution")
def workspace(call: Call) -> Iterator[Workspace | Release]:
    """cuDNN's workspace: a transposed convolution is the gradient of another."""
    found = _convolution(call, call.args[0], call.args[1], call.result)
    if found is not None:
        turned = bool(argument(call, "transposed"))
        size = found.gradient_of_images() if turned else found.forward()
        yield Workspace(size, what="cuDNN's workspace")


@between("aten::convolution_backward")
def workspaces_of_gradients(call: Call) -> Iterator[Workspace | Release | Result]:
    """The gradient of the images, and then that of the weight (cudnn_convolution_backward in
    ATen/native/cudnn/ConvShared.cpp): each with a workspace of its own."""
    gradient, images, weight = call.args[:3]
    mask = argument(call, "output_mask") or (True, True, True)
    found = _convolution(call, images, weight, gradient)
    sizes = [0, 0]
    if found is not None:
        turned = bool(argument(call, "transposed"))
        first = found.forward() if turned else found.gradient_of_images()
        sizes = [first, found.gradient_of_weight()]
    for place, size in enumerate(sizes):
        if mask[place]:
            yield Result(place)
            yield from cub.for_a_moment(size, "cuDNN's workspace")


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
