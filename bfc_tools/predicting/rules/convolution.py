"""Convolutions, as cuDNN does them: the layout of the result, and copies of what has another one.

From PyTorch's ATen/native/ConvUtils.h (cudnn_conv_use_channels_last), ATen/native/Convolution.cpp
(the gradient of the bias is a sum) and ATen/native/cudnn/ConvShared.cpp (what is made contiguous).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.cudnn import VARIABLE, Cudnn, Plan, Question
from bfc_tools.predicting.rules import columns
from bfc_tools.predicting.rules.convolution_workspaces import HOPPER, Convolution
from bfc_tools.predicting.rules.interface import (
    Call,
    Doubt,
    Release,
    Result,
    Workspace,
    on_cuda,
)
from bfc_tools.predicting.rules.operators import around, before, between, file, rule
from bfc_tools.predicting.rules.reductions import kernel_of, reduce
from bfc_tools.predicting.rules.tensors import (
    argument,
    channels_last,
    is_contiguous,
    nbytes,
    suggests_channels_last,
    type_name,
)
from bfc_tools.predicting.rules.unknowable import CONVOLUTIONS, asked_of, not_asked_of

CONVOLUTION_CONVOLUTION_BACKWARD = file(
    "ATen/native/Convolution.cpp", "convolution_backward", read="2.6.0"
)
SEEN = "cuDNN 9.19 on an H100: 36,735 passes"


def by_channels(tensor: Any, weight: Any) -> bool:
    """Whether cuDNN is called for images whose channels lie side by side."""
    if "float64" in (type_name(tensor), type_name(weight)):
        return False
    return suggests_channels_last(tensor) or suggests_channels_last(weight)


@around(source=file("ATen/native/ConvUtils.h", "cudnn_conv_suggest_memory_format", read="2.15.0"))
@contextmanager
def layouts(recorder: Any) -> Iterator[None]:
    """A fake convolution on the device has the layout that cuDNN gives it."""
    build = torch._C._conv_determine_backend_memory_format

    def determine(tensor: Any, weight: Any, backend: Any) -> Any:
        if not on_cuda(tensor):
            return build(tensor, weight, backend)
        if not (torch.backends.cudnn.enabled and by_channels(tensor, weight)):
            return torch.contiguous_format
        return torch.channels_last_3d if len(tensor.shape) == 5 else torch.channels_last

    with patch.object(torch._C, "_conv_determine_backend_memory_format", determine):
        yield


def _copy(what: str, tensor: Any, last: bool) -> list[Workspace]:
    """In the layout of the kernel, if it has another one."""
    if is_contiguous(tensor) and not last:
        return []
    if last and (channels_last(tensor) or _both(tensor)):
        return []
    return [Workspace(nbytes(tensor), what=f"{what} in another layout")]


def _both(tensor: Any) -> bool:
    """Whether the two layouts are the same: one channel, or one pixel."""
    shape = tensor.shape
    pixels = 1
    for size in shape[2:]:
        pixels *= size
    return is_contiguous(tensor) and (shape[1] == 1 or pixels == 1)


@before(
    "aten::convolution",
    "aten::_convolution",
    source=file("ATen/native/Convolution.cpp", "_convolution", read="2.6.0"),
)
def images_in_order(call: Call) -> Iterator[Workspace | Release]:
    """A copy of the images (_convolution in ATen/native/Convolution.cpp)."""
    tensor, weight = call.args[:2]
    yield from _copy("input", tensor, call.cudnn and by_channels(tensor, weight))


def _mask(call: Call) -> Sequence[bool]:
    return argument(call, "output_mask") or (True, True, True)


#: cuDNN is given images in float16 channel by channel from so many channels, and pixels in a row.
LEAST_CHANNELS, LEAST_WIDTH = 32, 7

# -- workspaces ---------------------------------------------------------------------------------


def _tensor_cores(call: Call, tensor: Any) -> bool:
    """Whether the GPU has them for these numbers, and the program lets cuDNN use them."""
    name = type_name(tensor)
    if name != "float32":
        return name in ("float16", "bfloat16") and call.gpu.cc >= (7, 0)
    return call.gpu.cc >= (8, 0) and bool(torch.backends.cudnn.allow_tf32)


@around(seen="cuDNN 9.19 on an H100, which was asked for its plans")
@contextmanager
def library(recorder: Any) -> Iterator[None]:
    """cuDNN, if it is installed, is asked for as long as a prediction runs."""
    global _cudnn
    with Cudnn() as _cudnn:
        yield
        named = os.environ.get(VARIABLE)
        for name in CONVOLUTIONS & recorder.unknown.keys():
            if _cudnn.version:
                recorder.unknown[name] = asked_of(_cudnn.version)
            elif named:
                recorder.unknown[name] = not_asked_of(f"{VARIABLE}={named}")


_cudnn: Cudnn | None = None


def _workspace(call: Call, images: Any, weight: Any, result: Any, gradient: str) -> Workspace:
    """What cuDNN works in for the result, or for a gradient: "images" or "weight". A transposed
    convolution is the gradient of another."""
    if argument(call, "transposed"):
        images, result = result, images
        gradient = {"result": "images", "images": "result", "weight": "weight"}[gradient]
    found = _of_call(call, images, weight, result)
    if by_kernels_of_pytorch(call, found):
        return Workspace(0)
    plan = _plan(call, found, gradient)
    size = _counted(call, found, gradient, plan)
    doubt = None
    why = _why_not_known(call, plan)
    if why:
        most, worst = (max(size, one) for one in found.most(gradient, _tensor_cores(call, images)))
        doubt = Doubt(0, most, f"cuDNN's workspaces of convolutions {why}", worst)
    return Workspace(size, what="cuDNN's workspace", doubt=doubt)


def _plan(call: Call, found: Convolution, gradient: str) -> Plan | None:
    """What cuDNN itself would do, if it can be asked."""
    if _cudnn is None:
        return None
    return _cudnn.plan(
        Question(
            gradient=gradient,
            images=_of_pixels(found.images.shape),
            weight=_of_pixels(found.weight.shape),
            result=_of_pixels(found.result.shape),
            last=found.last,
            type=type_name(found.images),
            padding=_of_pixels(_of_each(call, "padding", found.weight), 0),
            strides=_of_pixels(found.strides, 1),
            dilation=_of_pixels(found.dilation, 1),
            tf32=bool(torch.backends.cudnn.allow_tf32),
            deterministic=_deterministic(),
            name=call.gpu.name,
            cc=call.gpu.cc,
            sms=call.gpu.sms,
            memory=call.gpu.memory,
        )
    )


def _counted(call: Call, found: Convolution, gradient: str, plan: Plan | None) -> int:
    """The bytes that are counted."""
    cores = _tensor_cores(call, found.images)
    if plan is not None:
        if cores and found.in_cublas(gradient, plan):
            return found.by_cublas(gradient, plan)
        return found.on_device(gradient, plan) if call.gpu.cc == HOPPER else plan.workspace
    if not cores:
        return 0
    return (found.by_cublas if found.in_cublas(gradient) else found.estimate)(gradient)


def _why_not_known(call: Call, plan: Plan | None) -> str:
    """Empty where plans were compared: of cuDNN itself with an H100, where they are right for 97 of
    100 passes. Without a workspace cuDNN convolves, too, if only more slowly."""
    if torch.backends.cudnn.benchmark:
        return "are those of all algorithms that cudnn.benchmark tries"
    if plan is None:
        return "are estimates where cuDNN is not asked itself"
    return "" if call.gpu.cc == HOPPER else "have been compared on an H100 alone"


def _of_call(call: Call, images: Any, weight: Any, result: Any) -> Convolution:
    strides, dilation = (_of_each(call, name, weight) for name in ("stride", "dilation"))
    groups, last = int(argument(call, "groups", 1)), call.cudnn and by_channels(images, weight)
    return Convolution(images, weight, result, groups, strides, last, call.gpu.sms, dilation)


def by_kernels_of_pytorch(call: Call, found: Convolution) -> bool:
    """Whether each channel is convolved for itself, and not by cuDNN (is_depthwise and
    use_cudnn_depthwise in ATen/native/Convolution.cpp)."""
    if not found.alone or found.last or argument(call, "transposed"):
        return False
    shape = tuple(map(int, call.args[0].shape))
    one, stride = found.kernel[-1], found.strides[-1]
    half = type_name(found.images) == "float16" and shape[1] >= LEAST_CHANNELS
    if not (half and call.cudnn) or len(shape) == 5 or max(found.dilation) > 1:
        return True
    if (len(shape) == 3 or shape[2] == 1) and stride == 1:
        return False
    alike = {*found.kernel[-2:]} == {one} and {*found.strides[-2:]} == {stride}
    if not alike or len(shape) == 3 or one not in (1, 3, 5) or shape[3] < LEAST_WIDTH:
        return True
    return stride > 2 or (
        stride == 2 and not _with_stride_of_two(one, shape[0], shape[1], shape[3])
    )


def _with_stride_of_two(kernel: int, batch: int, channels: int, width: int) -> bool:
    """Whether cuDNN takes it (check_cudnn_depthwise_workload_with_filter in the same file)."""
    if batch == 1:
        return kernel > 1 or width <= 28
    if kernel == 1:
        return batch <= 16 and channels >= 128 and width <= LEAST_WIDTH
    return channels >= 512 or (channels >= 256 and width >= 28)


def _deterministic() -> bool:
    return bool(torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled())


def _of_each(call: Call, name: str, weight: Any) -> tuple[int, ...]:
    """An argument, for each dimension of a pixel."""
    values = argument(call, name)
    return tuple(map(int, values)) * (len(weight.shape) - 2 if len(values) == 1 else 1)


def _of_pixels(values: Any, of_rows: int | None = None) -> tuple[int, ...]:
    """As PyTorch calls cuDNN for one dimension: with another one, of one row. `of_rows` is None
    for a shape."""
    whole = tuple(map(int, values))
    if of_rows is None:
        return (*whole[:2], 1, whole[2]) if len(whole) == 3 else whole
    return (of_rows, *whole) if len(whole) == 1 else whole


@rule(
    "aten::convolution",
    "aten::_convolution",
    source=file("ATen/native/cudnn/ConvShared.cpp", "cudnn_convolution_forward", read="2.6.0"),
    seen=SEEN,
)
def workspace(call: Call) -> Iterator[Workspace | Release]:
    """cuDNN's workspace, after a copy of the weight (cudnn_convolution_forward in
    ATen/native/cudnn/ConvShared.cpp)."""
    images, weight = call.args[:2]
    found = _of_call(call, images, weight, call.result)
    if columns.without_cudnn(call, images, weight) and not by_kernels_of_pytorch(call, found):
        yield from columns.result(call)
        return
    yield from _copy("weight", weight, by_channels(images, weight))
    yield _workspace(call, images, weight, call.result, "result")


@between(
    "aten::convolution_backward",
    source=(
        file("ATen/native/cudnn/ConvShared.cpp", "cudnn_convolution_backward", read="2.6.0"),
        CONVOLUTION_CONVOLUTION_BACKWARD,
        file("ATen/native/cuda/DepthwiseConv2d.cu", read="2.6.0"),
        file("ATen/native/cuda/DepthwiseConv3d.cu", read="2.6.0"),
    ),
    seen=SEEN,
)
def gradients(call: Call) -> Iterator[Workspace | Release | Result]:
    """The gradient of the images, and then that of the weight: each with copies and a workspace of
    its own (cudnn_convolution_backward in ATen/native/cudnn/ConvShared.cpp). They share copies of
    the images, if a weight is trained (convolution_backward in ATen/native/Convolution.cpp), and of
    the gradient, if its channels do not lie as those of the images do, or in a transposed
    convolution. An H100 has the copy of the images until the gradient of the bias is summed."""
    gradient, images, weight = call.args[:3]
    if by_kernels_of_pytorch(call, _of_call(call, images, weight, gradient)):
        yield from _of_single_channels(call)
        return
    if columns.without_cudnn(call, images, weight):
        yield from columns.gradients(call, tuple(_mask(call)))
        return
    last, mask = by_channels(images, weight), _mask(call)
    yield from _copy("input", images, last) if mask[1] else []
    shared: list[Workspace] = []
    own: list[Workspace] = []
    if argument(call, "transposed"):
        shared = _copy("gradient", gradient, last)
    elif suggests_channels_last(gradient) != last:
        shared.append(Workspace(nbytes(gradient), what="gradient in another layout"))
    else:
        own = _copy("gradient", gradient, last)
    yield from shared
    passes = (("images", [*_copy("weight", weight, last), *own]), ("weight", own))
    for place, (of, copies) in enumerate(passes):
        if mask[place]:
            steps: list[Workspace | Result] = [*copies]
            steps.insert(len(copies) * place, Result(place))
            yield from steps
            one = _workspace(call, images, weight, gradient, of)
            yield from (one, Release(one))
            yield from map(Release, reversed(copies))
    yield from map(Release, reversed(shared))


def _of_single_channels(call: Call) -> Iterator[Workspace | Release | Result]:
    """Without cuDNN: for images in a plane the gradient of the weight comes first, after what is
    copied, in a volume last (ATen/native/cuda/DepthwiseConv2d.cu and DepthwiseConv3d.cu)."""
    names = ("gradient", "input", "weight")
    tensors = zip(names, call.args[:3], strict=True)
    copies = [made for name, one in tensors for made in _copy(name, one, last=False)]
    results = [Result(place) for place in (0, 1) if _mask(call)[place]]
    plane = len(call.args[1].shape) < 5
    steps: list[Workspace | Result]
    steps = [*copies, *reversed(results)] if plane else [*results, *copies]
    yield from steps
    yield from map(Release, reversed(copies))


@rule("aten::convolution_backward", source=CONVOLUTION_CONVOLUTION_BACKWARD)
def bias(call: Call) -> Iterator[Workspace | Release]:
    """The gradient of the bias is a sum over all images and pixels."""
    mask = argument(call, "output_mask")
    if mask is None or not mask[2]:
        return
    gradient = call.args[0]
    dims = [dim for dim in range(len(gradient.shape)) if dim != 1]
    kernel = kernel_of("sum", gradient, False)
    yield from reduce(call, gradient, dims, kernel, int(gradient.element_size()))
