"""Sorting, choosing and sampling.

From PyTorch's ATen/native/cuda/Sort.cpp and SortStable.cu (which sort is taken), TensorTopK.cu,
ScanKernels.cpp and ScanUtils.cuh, ATen/native/Distributions.cpp (multinomial).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bfc.predicting.rules import cub
from bfc.predicting.rules.interface import Call, Release, Workspace, before, rule
from bfc.predicting.rules.tensors import argument, is_contiguous, nbytes, numel, operator

INDEX = 8
#: Up to so many elements are sorted in place, within a block.
IN_A_BLOCK = 4096
LARGE = 1_000_000
FEW = 128


def _dimension(call: Call, tensor: Any) -> int:
    given = argument(call, "dim", -1)
    return int(-1 if given is None else given) % max(len(tensor.shape), 1)


@rule("aten::sort", "aten::argsort", "aten::msort")
def sort(call: Call) -> Iterator[Workspace | Release]:
    """CUB's radix sort for rows of more than 4096 elements."""
    tensor = call.args[0]
    if not tensor.shape or not numel(tensor):
        return
    dim = _dimension(call, tensor)
    count = int(tensor.shape[dim])
    if count <= IN_A_BLOCK:
        return
    if tensor.stride()[dim] != 1:
        for size in (nbytes(tensor), nbytes(tensor), numel(tensor) * INDEX):
            yield Workspace(size, what="rows side by side")
    yield from _stable(tensor, count, call.gpu.cc)


def _stable(tensor: Any, count: int, cc: tuple[int, int]) -> Iterator[Workspace | Release]:
    key, total = int(tensor.element_size()), numel(tensor)
    rows = total // count
    if rows == 1 or count >= LARGE:
        yield Workspace(count * INDEX, what="a range")
        for _ in range(rows):
            size = cub.radix_sort(count, key, INDEX, key * 8, cc)
            yield from cub.for_a_moment(size, "radix sort")
    elif rows < FEW:
        yield Workspace(total * INDEX, what="indices and rows")
        yield Workspace(total * INDEX, what="sorted indices and rows")
        keys = Workspace(total * key, what="sorted keys")
        yield keys
        yield from cub.for_a_moment(cub.radix_sort(total, key, INDEX, key * 8, cc), "radix sort")
        yield Release(keys)
        bits = max(1, (rows - 1).bit_length())
        yield from cub.for_a_moment(cub.radix_sort(total, INDEX, 0, bits, cc), "radix sort")
    else:
        yield Workspace(total * INDEX, what="ranges")
        size = cub.aliased(total * key, total * INDEX)
        yield from cub.for_a_moment(size, "segmented sort")


@before("aten::topk", "aten::kthvalue", "aten::mode")
def topk(call: Call) -> Iterator[Workspace | Release]:
    """A copy of what is not contiguous."""
    tensor = call.args[0]
    if not is_contiguous(tensor):
        yield Workspace(nbytes(tensor), what="copy in order")


@rule("aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::cumsum_", "aten::cumprod_")
def scan(call: Call) -> Iterator[Workspace | Release]:
    """A copy in the type of the result, and CUB's scan where all is one row."""
    tensor, result = call.args[0], call.result
    if tensor.dtype != result.dtype:
        yield Workspace(numel(tensor) * int(result.element_size()), what="copy of another type")
    elif not is_contiguous(tensor):
        yield Workspace(nbytes(tensor), what="copy in order")
    whole = tensor.shape and numel(tensor) == tensor.shape[_dimension(call, tensor)]
    if whole and numel(tensor) and operator(call) != "logcumsumexp":
        size = cub.scan(numel(tensor), int(result.element_size()))
        yield from cub.for_a_moment(size, "scan")


@before("aten::multinomial")
def multinomial(call: Call) -> Iterator[Workspace | Release]:
    """Whether the probabilities are right is read from the device; then a race of waiting times."""
    tensor = call.args[0]
    size = int(tensor.element_size())
    for each in (size, size, 1, 1, 1):
        yield from cub.for_a_moment(each, "check of probabilities")
    alone = int(argument(call, "num_samples")) == 1
    if alone or not argument(call, "replacement", False):
        yield Workspace(nbytes(tensor), what="waiting times")
    else:
        yield Workspace(nbytes(tensor), what="normalised probabilities")
        yield Workspace(nbytes(tensor), what="sums of probabilities")


@before("aten::nonzero", "aten::masked_select")
def chosen(call: Call) -> Iterator[Workspace | Release]:
    """How many are chosen is counted first, and then their places are written."""
    count = numel(call.args[0])
    yield from cub.for_a_moment(4, "number of chosen")
    yield from cub.for_a_moment(cub.scan(count, 4), "places")
