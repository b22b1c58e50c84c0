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


# -- workspaces ---------------------------------------------------------------------------------

#: What cuDNN adds to the three tensors: 16 bytes, or 147.
SOME_MORE = 16
#: The partial gradients of weights in 32 bits: from 1 to 40 MiB, mostly 2 to 12.
PARTIAL = 4 << 20
#: With so few channels cuDNN mostly takes other algorithms, which convert nothing.
FEW_CHANNELS = 4


def workspace_bytes(
    tensor: Any, weight: Any, result: Any, groups: int, strides: Any, tensor_cores: bool
) -> int:
    """An estimate of cuDNN's workspace: on tensor cores it computes in its own layout, and images,
    weights and result are converted, unless their channels lie side by side.

    Measured with cuDNN 9.19 on an H200, the workspace of the forward pass is so large, but for some
    bytes, of most convolutions that are wider than a pixel; else it is anything between
    nothing and twice as much, and that of the gradients is up to some MiB larger.
    """
    sizes = [int(size) for size in weight.shape[2:]]
    if groups > 1 or not tensor_cores or by_channels(tensor, weight):
        return 0
    if all(size == 1 for size in sizes) and all(int(step) == 1 for step in strides):
        return 0
    whole = sizes == [int(step) for step in strides]
    if int(weight.shape[1]) <= FEW_CHANNELS and (whole or max(sizes) < 5):
        return 0
    return sum(map(nbytes, (tensor, weight, result))) + SOME_MORE


def _tensor_cores(call: Call, tensor: Any) -> bool:
    """Whether the GPU has them for these numbers, and the program lets cuDNN use them."""
    name = type_name(tensor)
    if name != "float32":
        return name in ("float16", "bfloat16") and call.gpu.cc >= (7, 0)
    import torch

    return call.gpu.cc >= (8, 0) and bool(torch.backends.cudnn.allow_tf32)


def _workspace(call: Call, images: Any, weight: Any, result: Any) -> int:
    if argument(call, "transposed"):
        images, result = result, images
    cores = _tensor_cores(call, images)
    strides, groups = argument(call, "stride"), int(argument(call, "groups", 1))
    return workspace_bytes(images, weight, result, groups, strides, cores)


@rule("aten::convolution", "aten::_convolution")
def workspace(call: Call) -> Iterator[Workspace | Release]:
    """cuDNN's workspace."""
    yield Workspace(
        _workspace(call, call.args[0], call.args[1], call.result), what="cuDNN's workspace"
    )


@rule("aten::convolution_backward")
def workspace_of_gradients(call: Call) -> Iterator[Workspace | Release]:
    """One for the gradient of the images, and one for that of the weights."""
    gradient, tensor, weight = call.args[:3]
    mask = argument(call, "output_mask") or (True, True, True)
    size = _workspace(call, tensor, weight, gradient)
    if mask[0] and size:
        yield from cub.for_a_moment(size, "cuDNN's workspace")
    if mask[1] and size:
        more = PARTIAL if type_name(weight) == "float32" else 0
        yield from cub.for_a_moment(size + more, "cuDNN's workspace")


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
