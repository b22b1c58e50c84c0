"""Indexing, its gradient, and the gradient of an embedding.

From PyTorch's ATen/native/cuda/Indexing.cu (computeLinearIndex, index_put_with_sort_kernel),
ATen/native/TensorAdvancedIndexing.cpp (make_info: indices from the host), ATen/native/cuda/
Embedding.cu, EmbeddingBag.cu and EmbeddingBackwardKernel.cu (the gradient of an embedding, and how
rows that occur often are summed in segments).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

from bfc.predicting.rules import cub
from bfc.predicting.rules.interface import Call, Release, Workspace, before, order, rule
from bfc.predicting.rules.tensors import (
    argument,
    broadcast,
    contiguous_copy,
    is_contiguous,
    nbytes,
    numel,
    on_host,
    operator,
    type_name,
)

INDEX = 8
#: Up to so many indices, one kernel adds up the gradient of an embedding without sorting them.
UNSORTED_INDICES = 3072
#: The modes of an embedding bag whose gradient is, or is not, that of a sum.
SUM, MOST = 0, 2

# of a bag the size, the bag of each index, and the result; from EmbeddingBag.cu
order({"aten::_embedding_bag": (2, 1, 0), "aten::_embedding_bag_forward_only": (2, 1, 0)})


def bits(highest: int) -> int:
    """How many bits keys up to this one have, as PyTorch counts them: at least 1."""
    return max(1, highest.bit_length())


@rule("aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index_put")
def index_put(call: Call) -> Iterator[Workspace | Release]:
    """Where values add up, the indices are sorted, so that equal ones lie together."""
    given = [index for index in call.args[1] if index is not None]
    if not given:
        return
    if not argument(call, "accumulate", False):
        yield from _from_host(given)
        return
    count = math.prod(broadcast([index.shape for index in given]))
    if operator(call) == "index_put_" or argument(call, "unsafe", True) is False:
        yield from _highest_and_lowest(given)
    linear = yield from _linear_index(given, count * INDEX)
    values = _values(call, count)
    yield from values
    if not count:
        return
    names = ("sorted indices", "original indices", "a range")
    held = [Workspace(count * INDEX, what=name) for name in names]
    yield from held
    size = cub.radix_sort(count, INDEX, INDEX, bits(_highest(call)), call.gpu.cc)
    yield from cub.for_a_moment(size, "radix sort")
    yield from map(Release, [*reversed(held), *values, *linear])


def _after(call: Call) -> int:
    """The elements that one index moves: the dimensions behind the last that is indexed."""
    indexed = [dim for dim, index in enumerate(call.args[1]) if index is not None]
    return math.prod(call.args[0].shape[max(indexed) + 1 :])


def _highest(call: Call) -> int:
    """The highest index that can be sorted."""
    return (numel(call.args[0]) - 1) // max(_after(call), 1)


def _values(call: Call, count: int) -> list[Workspace]:
    """The copy of values that are fewer than the places, or not in order."""
    tensor, given, values = call.args[0], call.args[1], call.args[2]
    missing = math.prod(
        size for dim, size in enumerate(tensor.shape) if dim >= len(given) or given[dim] is None
    )
    if numel(values) == count * missing and is_contiguous(values):
        return []
    return [Workspace(count * missing * int(values.element_size()), what="values in order")]


def _highest_and_lowest(given: Sequence[Any]) -> Iterator[Workspace | Release]:
    """What is read to check that the indices are in range."""
    for index in given:
        if not on_host(index):
            yield from cub.for_a_moment(INDEX, "highest index")
            yield from cub.for_a_moment(INDEX, "lowest index")


def _linear_index(
    indices: Sequence[Any], size: int
) -> Generator[Workspace | Release, None, list[Workspace]]:
    """The position of each element: computed where the index lies, and copied to the device."""
    linear: list[Workspace] = []
    for index in indices:
        product = Workspace(size, what="linear index")
        if on_host(index):
            yield product
        else:
            wrapped = Workspace(size, what="wrapped index")
            yield wrapped
            yield product
            yield Release(wrapped)
        if not linear:
            linear = [product]
        else:
            yield Release(product)
    return linear


def _from_host(indices: Sequence[Any]) -> Iterator[Workspace | Release]:
    for index in indices:
        if index is not None and on_host(index):
            yield Workspace(numel(index) * INDEX, what="index from the host")


@rule("aten::index", "aten::_unsafe_index")
def index(call: Call) -> Iterator[Workspace | Release]:
    """Indices from the host are copied to the device."""
    yield from _from_host(call.args[1])


@before("aten::embedding")
def embedding(call: Call) -> Iterator[Workspace | Release]:
    """Indices in a row, which are copied where they do not lie so (ATen/native/Embedding.cpp)."""
    indices = call.args[1]
    sizes = [(int(n), int(step)) for n, step in zip(indices.shape, indices.stride(), strict=True)]
    kept = [one for one in sizes if one[0] != 1]
    if any(step != n * inner for (_, step), (n, inner) in pairwise(kept)):
        yield Workspace(nbytes(indices), what="indices in a row")


def _sorts(call: Call) -> bool:
    count = numel(call.args[1])
    return count > (0 if argument(call, "scale_grad_by_freq", False) else UNSORTED_INDICES)


@before("aten::embedding_dense_backward")
def sorted_rows(call: Call) -> Iterator[Workspace | Release]:
    """Gradient and indices in a row; many are sorted before their rows are summed."""
    yield from contiguous_copy(call.args[0], "gradient in a row")
    yield from contiguous_copy(call.args[1], "indices in a row")
    if not _sorts(call):
        return
    indices = call.args[1]
    count, size = numel(indices), int(indices.element_size())
    yield from sorted_indices(call, count, size, size * 8)


def sorted_indices(
    call: Call, count: int, size: int, highest: int
) -> Iterator[Workspace | Release]:
    """Sorts indices by their lowest `highest` bits, with the place that each came from, and counts
    how often each occurs where the gradient is divided by that."""
    for name in ("sorted indices", "original indices"):
        yield Workspace(count * size, what=name)
    numbers = Workspace(count * size, what="a range")
    yield numbers
    temporary = cub.radix_sort(count, size, size, highest, call.gpu.cc)
    yield from cub.for_a_moment(temporary, "radix sort")
    yield Release(numbers)
    if argument(call, "scale_grad_by_freq", False):
        yield Workspace(count * size, what="frequencies")


@before("aten::_embedding_bag_dense_backward")
def sorted_bags(call: Call) -> Iterator[Workspace | Release]:
    """Of a sum or mean of each bag: all indices are sorted, by the bits that rows have."""
    if argument(call, "mode", SUM) == MOST or not numel(call.args[1]):
        return
    indices = call.args[1]
    count, size = numel(indices), int(indices.element_size())
    highest = bits(int(argument(call, "num_weights")))
    yield from sorted_indices(call, count, size, highest)


@rule("aten::_embedding_bag_dense_backward")
def summed_bags(call: Call) -> Iterator[Workspace | Release]:
    """The rows of each index are summed, as of an embedding."""
    indices = call.args[1]
    if argument(call, "mode", SUM) != MOST and numel(indices):
        weights = int(argument(call, "num_weights"))
        yield from _segments(call, numel(indices), int(indices.element_size()), weights)


@rule("aten::embedding_dense_backward")
def summed_rows(call: Call) -> Iterator[Workspace | Release]:
    """The rows of each index are summed in segments of at most ten."""
    if _sorts(call):
        indices = call.args[1]
        weights = int(argument(call, "num_weights"))
        yield from _segments(call, numel(indices), int(indices.element_size()), weights)


#: A thread sums up so many rows of a segment.
ROWS_OF_A_THREAD = 10


def _segments(call: Call, count: int, size: int, weights: int) -> Iterator[Workspace | Release]:
    """Buffers for as many segments, and parts of them, as there can be."""
    gradient, version = call.args[0], call.torch_version
    rows = 8 if type_name(gradient) == "float64" else 4
    segments = min(count, weights)
    parts = count // ROWS_OF_A_THREAD + segments
    yield Workspace(count * size, what="segments")
    yield Workspace(8, what="number of segments")
    keys = Workspace(count * size, what="index of each segment")
    yield keys
    unique = cub.unique_by_key(count, size, version, call.gpu.cc)
    yield from cub.for_a_moment(unique, "first of each segment")
    yield Release(keys)
    yield Workspace(segments * size, what="parts of each segment")
    yield Workspace(segments * size, what="first part of each segment")
    yield from cub.for_a_moment(cub.scan(segments, size, version), "scan")
    yield Workspace(8, what="number of parts")
    yield Workspace(parts * size, what="parts of segments")
    yield Workspace(parts * gradient.shape[-1] * rows, what="sums of parts")


@before("aten::where")
def where(call: Call) -> Iterator[Workspace | Release]:
    """A number from the host is a tensor of no dimensions on the device."""
    for given in call.args[1:]:
        if hasattr(given, "device") and not given.shape and on_host(given):
            yield Workspace(nbytes(given), what="number on the device")
