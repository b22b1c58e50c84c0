"""What is copied on the way, or computed beside the result, because a kernel wants it in order.

From PyTorch's ATen/native/cuda/SoftMax.cu (softmax_backward_cuda_out multiplies first),
UpSampleNearest2d.cu, UpSampleBilinear2d.cu, DilatedMaxPool2d.cu, AveragePool2d.cu and
ReflectionPad.cu (contiguous), TensorTransformations.cu and ATen/native/TensorTransformations.h
(roll), ATen/native/cuda/Copy.cu (copy_requires_temporaries), ATen/native/cuda/IndexKernel.cpp
(masked_scatter__cuda), DistanceKernel.cu (a difference for each pair), and
ATen/native/ReduceOps.cpp, SoftMax.cpp, TensorCompare.cpp, AffineGridGenerator.cpp, Linear.cpp and
cuda/Sorting.cpp for what is composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import Call, Release, Result, Workspace, on_cuda
from bfc_tools.predicting.rules.operators import (
    before,
    between,
    composition,
    file,
    kernel,
    mark,
    order,
    rule,
)
from bfc_tools.predicting.rules.reductions import kernel_of, reduce
from bfc_tools.predicting.rules.tensors import (
    Made,
    argument,
    channels_last,
    contiguous_copy,
    is_contiguous,
    nbytes,
    numel,
    on_host,
    operator,
)

SOFT_MAX = file("ATen/native/cuda/SoftMax.cu", read="2.6.0")
IM2_COL = file("ATen/native/cuda/Im2Col.cu", read="2.6.0")
COL2_IM = file("ATen/native/cuda/Col2Im.cu", read="2.6.0")

INDEX = 8

mark(
    "composed",
    *("aten::logsumexp", "aten::_safe_softmax", "aten::isinf", "aten::dist", "aten::rot90"),
    *("aten::masked_scatter_backward", "aten::ldexp", "aten::_euclidean_dist"),
    *("aten::affine_grid_generator", "aten::_trilinear"),
    *("aten::_is_all_true", "aten::_is_any_true"),
    source=(
        *(
            file(f"ATen/native/{name}.cpp", read="2.6.0")
            for name in ("ReduceOps", "SoftMax", "TensorCompare")
        ),
        *(
            file(f"ATen/native/{name}.cpp", read="2.6.0")
            for name in ("AffineGridGenerator", "Linear")
        ),
        file("ATen/native/native_functions.yaml", read="2.15.0"),
    ),
)
mark(
    "whole",
    *("aten::silu_backward", "aten::mish_backward", "aten::_fused_rms_norm"),
    source=file("ATen/native/native_functions.yaml", read="2.15.0"),
)
# the only operator that brings a tensor with values to the device
mark(
    "takes_values",
    "aten::_to_copy.default",
    source=file("ATen/native/TensorConversions.cpp", read="2.6.0"),
)
# the mask first
order({"aten::native_dropout": (1, 0)}, source=file("ATen/native/cuda/Dropout.cu", read="2.6.0"))


@rule("aten::pow.Scalar", source=file("ATen/native/Pow.cpp", read="2.6.0"))
def power_of_a_number(call: Call) -> Iterator[Workspace | Release]:
    """The number is a tensor on the device, unless it is 1 (ATen/native/Pow.cpp)."""
    base = call.args[0]
    if base != 1:
        size = {complex: 16, bool: 1}.get(type(base), 8)
        yield from cub.for_a_moment(size, "number on the device")


@rule("aten::_softmax", "aten::_log_softmax", source=SOFT_MAX)
def softmax(call: Call) -> Iterator[Workspace | Release]:
    """A copy of what is not in order."""
    yield from contiguous_copy(call.args[0], "input in order")


@rule(
    "aten::_softmax_backward_data",
    source=file("ATen/native/cuda/SoftMax.cu", "softmax_backward_cuda_out", read="2.6.0"),
)
def softmax_backward(call: Call) -> Iterator[Workspace | Release]:
    """The product of gradient and output, as large as the result."""
    output = call.args[1]
    yield Workspace(nbytes(output), what="gradient times output")
    yield from contiguous_copy(output, "output in order")


@rule("aten::_log_softmax_backward_data", source=SOFT_MAX)
def log_softmax_backward(call: Call) -> Iterator[Workspace | Release]:
    """Copies of what is not in order: the gradient of a sum is one number, spread out."""
    yield from contiguous_copy(call.args[0], "gradient in order")
    yield from contiguous_copy(call.args[1], "output in order")


@kernel("aten::mish_backward", source=file("ATen/native/cuda/Activation.cpp", read="2.6.0"))
def mish_backward(call: Call) -> Any:
    """A gradient like the input: PyTorch says nothing of it for fake tensors."""
    return torch.empty_like(call.args[1])


@rule(
    *("aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d"),
    *("aten::upsample_nearest2d_backward", "aten::_upsample_nearest_exact2d_backward"),
    *("aten::upsample_bilinear2d_backward", "aten::max_pool2d_with_indices_backward"),
    "aten::avg_pool2d_backward",
    source=(
        file("ATen/native/cuda/UpSampleNearest2d.cu", read="2.6.0"),
        file("ATen/native/cuda/UpSampleBilinear2d.cu", read="2.6.0"),
        file("ATen/native/cuda/DilatedMaxPool2d.cu", read="2.6.0"),
        file("ATen/native/cuda/AveragePool2d.cu", read="2.6.0"),
    ),
)
def pixels(call: Call) -> Iterator[Workspace | Release]:
    """Kernels read images, or gradients, row by row or channel by channel: the gradient of what was
    concatenated with other channels is copied."""
    if not channels_last(call.args[0]):
        yield from contiguous_copy(call.args[0], "pixels in order")


@rule(
    *(f"aten::reflection_pad{dims}d{end}" for dims in (1, 2, 3) for end in ("", "_backward")),
    source=file("ATen/native/cuda/ReflectionPad.cu", read="2.6.0"),
)
def reflected(call: Call) -> Iterator[Workspace | Release]:
    """The kernels read row by row, also what lies channel by channel."""
    yield from contiguous_copy(call.args[0], "pixels in order")


@rule(
    "aten::adaptive_max_pool2d",
    "aten::adaptive_max_pool2d_backward",
    source=file("ATen/native/cuda/AdaptiveMaxPooling2d.cu", read="2.6.0"),
)
def adaptive_pool(call: Call) -> Iterator[Workspace | Release]:
    """The kernel works row by row (AdaptiveMaxPooling2d.cu): all that lies otherwise is copied."""
    if operator(call) == "adaptive_max_pool2d":
        whole = (*call.result, call.args[0])
    else:
        whole = (call.args[0], argument(call, "indices"), call.result)
    for tensor in whole:
        yield from contiguous_copy(tensor, "pixels in order")


@kernel("aten::im2col", "aten::col2im", source=(IM2_COL, COL2_IM))
def columns(call: Call) -> Any:
    """The result is made as large as what is given, and then resized: it keeps memory that is
    larger (Im2Col.cu, Col2Im.cu)."""
    given, result = call.args[0], call.func(*call.args, **call.kwargs)
    if not on_cuda(given) or numel(result) > numel(given):
        return result
    return given.new_empty(given.shape).as_strided(result.shape, result.stride())


@between("aten::im2col", "aten::col2im", source=(IM2_COL, COL2_IM))
def before_columns(call: Call) -> Iterator[Workspace | Release | Result]:
    """What is made first, where the result is larger."""
    if numel(call.result) > numel(call.args[0]):
        yield Workspace(nbytes(call.args[0]), what="result before it is resized")


@before(
    "aten::roll",
    source=(
        file("ATen/native/cuda/TensorTransformations.cu", read="2.6.0"),
        file("ATen/native/TensorTransformations.h", read="2.15.0"),
    ),
)
def roll(call: Call) -> Iterator[Workspace | Release]:
    """One dimension after the other, each into memory of its own."""
    tensor = call.args[0]
    copies = contiguous_copy(tensor, "input in order")
    yield from copies
    for _ in list(argument(call, "dims") or ())[1:]:
        yield Workspace(nbytes(tensor), what="rolled along one dimension")
        yield from map(Release, copies)
        copies = []


@rule(
    "aten::masked_scatter_",
    "aten::masked_scatter",
    source=file("ATen/native/cuda/IndexKernel.cpp", "masked_scatter__cuda", read="2.6.0"),
)
def masked_scatter(call: Call) -> Iterator[Workspace | Release]:
    """The place of each element in the source: a sum over the mask, spread out to the elements."""
    count = numel(call.args[0])
    if count:
        yield Workspace(count * INDEX, what="places in the source")
        if numel(call.args[1]) < count or not is_contiguous(call.args[1]):
            yield Workspace(count, what="mask in order")
        yield from cub.for_a_moment(cub.scan(count, INDEX, call.release.cccl), "scan")


@rule(
    "aten::_to_copy",
    "aten::copy_",
    source=file("ATen/native/cuda/Copy.cu", "copy_requires_temporaries", read="2.6.0"),
)
def between_host_and_device(call: Call) -> Iterator[Workspace | Release]:
    """Between host and device only bytes in a row are copied: the device converts first."""
    target, source = call.args[0], call.args[0]
    if operator(call) == "copy_":
        source = call.args[1]
    else:
        target = call.result
    if on_host(target) == on_host(source) or _alike(target, source):
        return
    if on_host(target):
        if target.dtype != source.dtype or not is_contiguous(source):
            size = numel(target) * int(target.element_size())
            yield Workspace(size, what="copy for the host")
    else:
        yield from contiguous_copy(target, "copy from the host")


def _alike(target: Any, source: Any) -> bool:
    """Whether both have the same type and the same dense layout."""
    if target.dtype != source.dtype or tuple(target.shape) != tuple(source.shape):
        return False
    strides = tuple(target.stride())
    dense = is_contiguous(target) or sorted(strides, reverse=True) == _dense(target)
    return strides == tuple(source.stride()) and dense


def _dense(tensor: Any) -> list[int]:
    """The strides, the largest first, of a tensor without gaps in the order of its strides."""
    order = sorted(range(len(tensor.shape)), key=lambda dim: -int(tensor.stride()[dim]))
    found: list[int] = []
    step = 1
    for dim in reversed(order):
        found.insert(0, step)
        step *= int(tensor.shape[dim])
    return found


# -- computed beside the result -----------------------------------------------------------------


@rule(
    "aten::_cdist_backward",
    "aten::_pdist_backward",
    source=file("ATen/native/cuda/DistanceKernel.cu", read="2.6.0"),
)
def differences(call: Call) -> Iterator[Workspace | Release]:
    """What each pair of rows adds to the gradient, which is then summed up."""
    result, distances = call.result, call.args[-1]
    if not numel(result) or not numel(distances) or argument(call, "p") == 0:
        return
    *batch, rows, columns = map(int, result.shape)
    others = rows - 1 if operator(call) == "_pdist_backward" else int(distances.shape[-1])
    pairs = Made(result, (*batch, others, rows, columns))
    yield Workspace(nbytes(pairs), what="gradient of each pair")
    kernel = kernel_of("sum", pairs, False)
    yield from reduce(call, pairs, [len(batch)], kernel, int(result.element_size()))


@rule("aten::unfold_backward", source=file("ATen/native/UnfoldBackward.h", read="2.15.0"))
def places_of_windows(call: Call) -> Iterator[Workspace | Release]:
    """The numbers of the dimension that was unfolded (ATen/native/UnfoldBackward.h)."""
    sizes = argument(call, "input_sizes")
    size = int(sizes[int(argument(call, "dim"))]) if sizes else 1
    yield from cub.for_a_moment(size * INDEX, "numbers of a dimension")


@composition(
    "aten::count_nonzero",
    source=file("ATen/native/TensorAdvancedIndexing.cpp", "count_nonzero_cuda", read="2.6.0"),
)
def count_nonzero(tensor: Any, dim: Any = None) -> Any:
    """A mask, which is summed up (ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
    mask = tensor if tensor.dtype == torch.bool else tensor != 0
    return mask.sum([] if dim is None else dim)


@composition("aten::median", source=file("ATen/native/cuda/Sorting.cpp", read="2.6.0"))
def median(tensor: Any, *dim: Any, **named: Any) -> Any:
    """Of all elements: they are sorted. Along one dimension the kernel takes nothing."""
    if dim or named:
        return _along_one_dimension(tensor, *dim, **named)
    ordered = tensor.flatten().sort()[0]
    middle = ordered[(ordered.numel() - 1) // 2]
    return torch.where(ordered[-1].isnan(), ordered[-1], middle)


def _along_one_dimension(tensor: Any, dim: int, keepdim: bool = False) -> Any:
    shape = [int(size) for size in tensor.shape]
    if shape and keepdim:
        shape[dim] = 1
    elif shape:
        del shape[dim]
    return tensor.new_empty(shape), tensor.new_empty(shape, dtype=torch.int64)
