"""Convolutions without cuDNN: what a kernel sees becomes a column, and the weight is multiplied by
the columns of each image.

From PyTorch's ATen/native/Convolution.cpp (use_cudnn) and, in ATen/native/cuda,
NaiveDilatedConvolution.cu, ConvolutionMM2d.cu and NaiveConvolutionTranspose2d.cu and -3d.cu. What
PyTorch's issues 166643 (2.9.1) and 132300 print of such volumes is what is counted here, to the
digits that are printed there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bfc_tools.predicting.rules.gemm import cublas
from bfc_tools.predicting.rules.interface import Call, Release, Result, Workspace
from bfc_tools.predicting.rules.tensors import (
    argument,
    is_contiguous,
    nbytes,
    suggests_channels_last,
    type_name,
)


def without_cudnn(call: Call, images: Any, weight: Any) -> bool:
    """Whether cuDNN is switched off, or PyTorch does not trust it: cuDNN 9.10 is wrong for volumes
    in 16 bits, unless a kernel sees one pixel."""
    if not call.cudnn:
        return True
    if call.release.trusts_cudnn_with_volumes or type_name(images) not in ("float16", "bfloat16"):
        return False
    if suggests_channels_last(images) or suggests_channels_last(weight):
        return False
    return len(weight.shape) == 5 and {*map(int, weight.shape[2:])} != {1}


def _columns(call: Call, images: Any, weight: Any, result: Any) -> Workspace:
    """Of one image, and of one group. Planes of which a kernel sees one pixel after the other are
    columns already."""
    pixels = (images if argument(call, "transposed") else result).shape[2:]
    numbers = math.prod(map(int, weight.shape[1:])) * math.prod(map(int, pixels))
    steps = {*map(int, argument(call, "stride"))}
    gaps = {*map(int, argument(call, "padding"))}
    if len(pixels) == 2 and {*map(int, weight.shape[2:])} | steps == {1} and gaps == {0}:
        numbers = 0
    return Workspace(numbers * int(images.element_size()), what="columns")


def _of_a_group(call: Call, *tensors: Any) -> Iterator[Workspace]:
    """Copies of the channels of one group (subtensor in Convolution.cpp)."""
    groups = int(argument(call, "groups", 1))
    for one in tensors if groups > 1 else ():
        if int(one.shape[0]) > 1:
            yield Workspace(nbytes(one) // groups, what="a group")


def _in_order(what: str, tensor: Any) -> list[Workspace]:
    return [] if is_contiguous(tensor) else [Workspace(nbytes(tensor), what=f"{what} in order")]


def result(call: Call) -> Iterator[Workspace | Release]:
    """The columns of one image after another. Groups have results of their own, to be joined."""
    images, weight = call.args[:2]
    yield from _in_order("weight", weight)
    if int(argument(call, "groups", 1)) > 1:
        yield Workspace(nbytes(call.result), what="results of groups")
    yield from _of_a_group(call, images)
    yield _columns(call, images, weight, call.result)
    yield cublas(call)


def gradients(call: Call, mask: tuple[bool, ...]) -> Iterator[Workspace | Release | Result]:
    """Those of the images and of the weight are made with the same columns. Groups have gradients
    of their own, to be joined. The order is that of NaiveDilatedConvolution.cu; planes without
    gaps have the columns before the gradient of the weight."""
    gradient, images, weight = call.args[:3]
    named = zip(("gradient", "input", "weight"), call.args[:3], strict=True)
    held = [made for name, one in named for made in _in_order(name, one)]
    results = [place for place in (0, 1) if mask[place]]
    working = [*_of_a_group(call, gradient, images), _columns(call, images, weight, gradient)]
    grouped = int(argument(call, "groups", 1)) > 1
    if grouped:
        held += [Workspace(nbytes(call.args[1 + place]), what="of groups") for place in results]
    yield from held
    if not grouped:
        yield from map(Result, results)
    yield from working
    yield cublas(call)
    yield from map(Release, reversed(working))
    if grouped:
        yield from map(Result, results)
    yield from map(Release, reversed(held))
