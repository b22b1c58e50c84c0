"""Normalisation: the gradients of weights, and cuDNN's batch norm.

From PyTorch's ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda and its backward,
LaunchGammaBetaBackwardCUDAKernel), group_norm_kernel.cu
(GroupNormKernelImplInternal, GroupNormBackwardKernelImplInternal), Normalization.cu and
Normalization.cuh, and ATen/native/cudnn/BatchNorm.cpp (the reserve, which a device sizes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call, Release, Result, Workspace
from bfc_tools.predicting.rules.operators import before, between, file, kernel, rule
from bfc_tools.predicting.rules.reductions import kernel_of, reduce
from bfc_tools.predicting.rules.tensors import (
    Made,
    argument,
    contiguous_copy,
    div_up,
    numel,
    operator,
    type_name,
)

NORMALIZATION = file("ATen/native/cuda/Normalization.cu", read="2.6.0")
NORMALIZATION_FILE = file("ATen/native/cuda/Normalization.cuh", read="2.15.0")

#: With more rows than that and few columns, the gradients of weights are summed in blocks.
MANY_ROWS = 64 * 1024
COLUMNS = 32
ROWS = 32
MOST_BLOCKS = 64 * 1024 // 2


@before(
    *("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    *("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"),
    source=file("ATen/native/cuda/layer_norm_kernel.cu", "layer_norm_cuda", read="2.6.0"),
)
def rows_in_order(call: Call) -> Iterator[Workspace | Release]:
    """The kernels read row by row: images whose channels were moved to the end are copied."""
    yield from contiguous_copy(argument(call, "input"), "input in order")


@rule(
    "aten::native_layer_norm_backward",
    "aten::_fused_rms_norm_backward",
    source=file(
        "ATen/native/cuda/layer_norm_kernel.cu",
        "LaunchGammaBetaBackwardCUDAKernel",
        read="2.15.0",
    ),
    seen="the tiles in the names of the kernels in the library of 2.15.0: 32 columns, 32 rows",
)
def layer_norm_backward(call: Call) -> Iterator[Workspace | Release]:
    """Partial gradients of the weight and the bias, where there are many short rows."""
    yield from contiguous_copy(call.args[0], "gradient in order")
    tensor = argument(call, "input")
    shape = argument(call, "normalized_shape")
    columns = math.prod(shape)
    rows = numel(tensor) // max(columns, 1)
    # both of int division: N / 32 < SMs / 2
    if not (rows > MANY_ROWS and columns // COLUMNS < call.gpu.sms // 2):
        return
    across = div_up(columns, COLUMNS)
    blocks = min(MOST_BLOCKS // across, div_up(rows, ROWS))
    results = [one for one in call.result[1:] if one is not None]
    for result in results:
        size = blocks * columns * int(result.element_size())
        yield Workspace(size, what="partial gradients")
    for result in results:
        partial = Made(result, (blocks, columns))
        kernel = kernel_of("sum", partial, False)
        yield from reduce(call, partial, [0], kernel, int(result.element_size()))


@rule(
    "aten::native_group_norm",
    "aten::native_group_norm_backward",
    source=file(
        "ATen/native/cuda/group_norm_kernel.cu",
        "GroupNormKernelImplInternal",
        "GroupNormBackwardKernelImplInternal",
        read="2.6.0",
    ),
)
def group_norm(call: Call) -> Iterator[Workspace | Release]:
    """A factor and a summand for each channel of each image, if there is a weight or a bias; sums
    in the backward pass."""
    tensor = argument(call, "input")
    count, channels = int(argument(call, "N")), int(argument(call, "C"))
    wide = 8 if type_name(tensor) == "float64" else 4
    each = count * channels * wide
    backward = operator(call).endswith("_backward")
    inner = int(argument(call, "HxW"))
    groups = int(argument(call, "group"))
    if not backward:
        scaled = argument(call, "weight") is not None or argument(call, "bias") is not None
        if inner > 1 and scaled:
            yield Workspace(each, what="factors")
            yield Workspace(each, what="summands")
        return
    sums = _sums_of_groups(count * groups * wide)
    if inner == 1:
        yield from sums
        return
    yield Workspace(each, what="sums of gradients")
    yield Workspace(each, what="sums of products")
    yield from sums
    if argument(call, "weight") is not None:
        yield Workspace(each, what="factors")
    yield from map(Release, reversed(sums))


def _sums_of_groups(size: int) -> list[Workspace]:
    names = ("factors of groups", "summands of groups")
    return [Workspace(size, what=name) for name in names]


# -- batch norm -------------------------------------------------------------------------------

#: A block works on so many channels at once, and a thread on so many rows.
TILE, ELEMENTS, THREADS, MOST_ALONG, LEAST_ALONG = 32, 16, 512, 128, 8


@kernel(
    "aten::native_batch_norm",
    source=file("ATen/native/cuda/Normalization.cu", "batch_norm_cuda", read="2.6.0"),
)
def normalised(call: Call) -> Any:
    """Without training cuDNN keeps no statistics; PyTorch's own kernels do (batch_norm_cuda)."""
    tensor = call.args[0]
    found = call.func(*call.args, **call.kwargs)
    if argument(call, "training"):
        return found
    if uses_cudnn(call):
        return found[0], tensor.new_empty(0), tensor.new_empty(0)
    return found[0], _of_channels(tensor, tensor), _of_channels(tensor, tensor)


@rule(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    source=(NORMALIZATION, NORMALIZATION_FILE),
)
def batch_norm(call: Call) -> Iterator[Workspace | Release]:
    """PyTorch's own kernels share a channel between blocks where channels lie side by side."""
    training = argument(call, "training", operator(call) == "_batch_norm_with_update")
    if training and _by_channel(call.args[0]) and not uses_cudnn(call):
        yield from _shared_channels(call.args[0], 4)


@between(
    "aten::native_batch_norm_backward",
    "aten::batch_norm_backward",
    source=(NORMALIZATION, NORMALIZATION_FILE),
)
def batch_norm_backward(call: Call) -> Iterator[Workspace | Release | Result]:
    """The same for the sums of gradients, which have arrays of their own, and come before the
    gradient of the input."""
    tensor = argument(call, "input")
    if _by_channel(tensor):
        for name in ("mean of gradients", "mean of products"):
            yield Workspace(int(tensor.shape[1]) * 4, what=name)
        yield Result(1)
        yield Result(2)
        yield from _shared_channels(tensor, 2)


# -- batch norm over several processes ---------------------------------------------------------


def _of_channels(tensor: Any, like: Any) -> Any:
    """A number for each channel, in the precision that sums are kept in."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return tensor.new_empty(tensor.shape[1:2], dtype=dtype)


@kernel("aten::batch_norm_stats", source=NORMALIZATION)
def statistics(call: Call) -> Any:
    """Mean and deviation of each channel in this process."""
    tensor = call.args[0]
    return _of_channels(tensor, tensor), _of_channels(tensor, tensor)


@kernel(
    "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_gather_stats",
    source=NORMALIZATION,
)
def statistics_of_all(call: Call) -> Any:
    """The same of all processes."""
    tensor, mean = call.args[0], call.args[1]
    return _of_channels(tensor, mean), _of_channels(tensor, mean)


@kernel("aten::batch_norm_elemt", "aten::batch_norm_backward_elemt", source=NORMALIZATION)
def each_element(call: Call) -> Any:
    """What is normalised, or its gradient: in the backward pass the gradient comes first."""
    return torch.empty_like(call.args[0])


@kernel("aten::batch_norm_backward_reduce", source=NORMALIZATION)
def sums_of_gradients(call: Call) -> Any:
    """Two sums of each channel, and the gradients of weight and bias."""
    tensor, mean = call.args[1], call.args[2]
    asked = (argument(call, name) for name in ("weight_g", "bias_g"))
    weight = argument(call, "weight")
    like = tensor if weight is None else weight
    gradients = [like.new_empty(tensor.shape[1:2]) if one else None for one in asked]
    return mean.new_empty(mean.shape), mean.new_empty(mean.shape), *gradients


def uses_cudnn(call: Call) -> bool:
    """Whether cuDNN normalises: 32 bits, or 16 with weights of 32, and at least 3 dimensions."""
    tensor, weight, bias, mean, variance = call.args[:5]
    if weight is None or bias is None or (mean is None) != (variance is None):
        return False
    name = type_name(tensor)
    if "bfloat16" in (name, type_name(weight)):
        return False
    return len(tensor.shape) >= 3 and (name != "float16" or type_name(weight) == "float32")


def _by_channel(tensor: Any) -> bool:
    return len(tensor.shape) >= 2 and bool(tensor.stride()[1] == 1) and numel(tensor) > 0


def _shared_channels(tensor: Any, values: int) -> Iterator[Workspace | Release]:
    """Partial sums and semaphores, if several blocks work on a channel."""
    channels = int(tensor.shape[1])
    rows = numel(tensor) // channels
    width = min(power_of_2(channels), TILE)
    height = min(power_of_2(div_up(rows, ELEMENTS)), THREADS // width)
    if width * height != THREADS:
        width = min(power_of_2(channels), THREADS // height)
    along = min(div_up(rows, height * ELEMENTS), MOST_ALONG)
    if along >= LEAST_ALONG:
        held = [
            Workspace(values * channels * along * 4, what="partial sums of blocks"),
            Workspace(div_up(channels, width) * 4, what="semaphores"),
        ]
        yield from held
        yield from map(Release, reversed(held))


def power_of_2(number: int) -> int:
    """The highest power of 2 that is not above a number."""
    return 1 << (max(number, 1).bit_length() - 1)
