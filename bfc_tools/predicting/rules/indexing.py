"""Indexing, its gradient, and the gradient of an embedding.

From PyTorch's ATen/native/cuda/Indexing.cu (makeLinearIndex, index_put_with_sort_kernel),
ATen/native/TensorAdvancedIndexingUtils.h (make_info: indices from the host), ATen/native/cuda/
Embedding.cu, EmbeddingBag.cu and EmbeddingBackwardKernel.cu (the gradient of an embedding, and how
rows that occur often are summed in segments), and TensorAdvancedIndexing.cpp (scatter_reduce_two).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import before, composition, file, order, rule
from bfc_tools.predicting.rules.reductions import WARP, kernel_of, reduce
from bfc_tools.predicting.rules.tensors import (
    Made,
    argument,
    broadcast,
    contiguous_copy,
    div_up,
    is_contiguous,
    nbytes,
    numel,
    on_host,
    operator,
    type_name,
)

EMBEDDING_BAG = file("ATen/native/cuda/EmbeddingBag.cu", read="2.6.0")
EMBEDDING_BACKWARD_KERNEL = file("ATen/native/cuda/EmbeddingBackwardKernel.cu", read="2.6.0")

INDEX = 8
#: Up to so many indices, one kernel adds up the gradient of an embedding without sorting them.
UNSORTED_INDICES = 3072
#: What new memory is filled with if algorithms are to be deterministic, where an operator has made
#: a tensor larger (ATen/native/Resize.h, fill_resize_deterministic_).
FILLS = "what fills new memory"
#: The modes of an embedding bag whose gradient is, or is not, that of a sum.
SUM, MOST = 0, 2

# of a bag the size, the bag of each index, and the result
order(
    {"aten::_embedding_bag": (2, 1, 0), "aten::_embedding_bag_forward_only": (2, 1, 0)},
    source=file("ATen/native/cuda/EmbeddingBag.cu", read="2.6.0"),
)


def bits(highest: int) -> int:
    """How many bits keys up to this one have, as PyTorch counts them: at least 1."""
    return max(1, highest.bit_length())


@rule(
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
    "aten::_unsafe_index_put",
    source=file("ATen/native/cuda/Indexing.cu", "index_put_with_sort_kernel", read="2.6.0"),
    seen="recordings: sorts of 4096 and 8192 pairs",
)
def index_put(call: Call) -> Iterator[Workspace | Release]:
    """Where values add up, or the order matters, the indices are sorted."""
    given = call.args[1]
    if all(index is None for index in given):
        return
    if not argument(call, "accumulate", False) and not call.deterministic:
        yield from _from_host(given)
        return
    yield from _put_in_order(call, given, call.args[2], _is_checked(call))


def _is_checked(call: Call) -> bool:
    """Whether indices could be out of range: not in the gradient of `index`, which works in place
    on a GPU (FunctionsManual.cpp, index_backward)."""
    if operator(call) == "_index_put_impl_":
        return not argument(call, "unsafe", False)
    if operator(call) != "index_put":
        return True
    node = torch._C._current_autograd_node()
    return node is None or node.name() != "IndexBackward0"


def _put_in_order(
    call: Call, given: Sequence[Any], values: Any, checked: bool = True
) -> Iterator[Workspace | Release]:
    """Puts values at indices, which are sorted, so that equal ones lie together."""
    tensor = call.args[0]
    count = math.prod(broadcast([index.shape for index in given if index is not None]))
    held = contiguous_copy(tensor, "target in order")
    yield from held
    held += yield from _linear_index(call, given, count, checked)
    copies = _values(tensor, given, values, count)
    yield from copies
    held += copies
    if count and numel(tensor):
        if not _side_by_side(given):
            held.append(Workspace(nbytes(tensor), what="target, indexed dimensions first"))
            yield held[-1]
        names = ("sorted indices", "original indices", "a range")
        sorted_ones = [Workspace(count * INDEX, what=name) for name in names]
        yield from sorted_ones
        held += sorted_ones
        if call.deterministic:
            yield from cub.for_a_moment(INDEX, FILLS)
        highest = (numel(tensor) - 1) // max(_after(tensor, given), 1)
        size = cub.radix_sort(count, INDEX, INDEX, bits(highest), call.gpu.cc)
        yield from cub.for_a_moment(size, "radix sort")
    yield from map(Release, reversed(held))


def _indexed(given: Sequence[Any]) -> list[int]:
    return [dim for dim, index in enumerate(given) if index is not None]


def _side_by_side(given: Sequence[Any]) -> bool:
    """Whether no other dimension lies between those that are indexed."""
    indexed = _indexed(given)
    return indexed[-1] - indexed[0] == len(indexed) - 1


def _after(tensor: Any, given: Sequence[Any]) -> int:
    """The elements that one index moves: the dimensions behind the last that is indexed, or all
    others, if the indexed ones had to be brought to the front."""
    indexed = _indexed(given)
    begin = indexed[-1] + 1 if _side_by_side(given) else 0
    sizes = enumerate(tensor.shape)
    return math.prod(size for dim, size in sizes if dim >= begin and dim not in indexed)


def _values(tensor: Any, given: Sequence[Any], values: Any, count: int) -> list[Workspace]:
    """The copy of values that are fewer than the places, or not in order."""
    missing = math.prod(
        size for dim, size in enumerate(tensor.shape) if dim >= len(given) or given[dim] is None
    )
    if numel(values) == count * missing and is_contiguous(values):
        return []
    return [Workspace(count * missing * int(values.element_size()), what="values in order")]


def _linear_index(
    call: Call, given: Sequence[Any], count: int, checked: bool
) -> Generator[Workspace | Release, None, list[Workspace]]:
    """The position of each element: computed where the index lies, and copied to the device."""
    indices = [index for index in given if index is not None]
    longs = [_long(index) for index in indices if not on_host(index) and _is_short(index)]
    yield from longs
    linear: list[Workspace] = []
    for index in indices:
        product = Workspace(count * INDEX, what="linear index")
        if on_host(index):
            yield product
        else:
            if checked:
                yield from _in_range(call, index, count)
            wrapped = Workspace(count * INDEX, what="wrapped index")
            yield wrapped
            yield product
            yield Release(wrapped)
        if not linear:
            linear = [product]
        else:
            yield Release(product)
    yield from map(Release, longs)
    return linear


def _is_short(index: Any) -> bool:
    return type_name(index) == "int32"


def _long(index: Any) -> Workspace:
    return Workspace(numel(index) * INDEX, what="index in 64 bits")


def _in_range(call: Call, index: Any, count: int) -> Iterator[Workspace | Release]:
    """The highest and the lowest index are compared with the size of the dimension."""
    alike = numel(index) == count and is_contiguous(index)
    whole = index if alike else Made(index, (count,))
    for name in ("max", "min"):
        found = Workspace(INDEX, what=f"{name} of the index")
        yield found
        copies = [] if alike else [Workspace(count * INDEX, what="index in order")]
        yield from copies
        dims = range(len(whole.shape))
        yield from reduce(call, whole, dims, kernel_of(name, whole, False), INDEX)
        yield from map(Release, copies)
        yield from cub.for_a_moment(1, "whether it is in range")
        yield Release(found)


# -- with deterministic algorithms -----------------------------------------------------------------


@rule(
    "aten::index_add",
    "aten::index_add_",
    "aten::index_copy",
    "aten::index_copy_",
    source=(
        file("ATen/native/cuda/Indexing.cu", "index_add_cuda_impl", read="2.6.0"),
        file("ATen/native/TensorAdvancedIndexing.cpp", "index_copy_out", read="2.6.0"),
    ),
)
def rows_in_order(call: Call) -> Iterator[Workspace | Release]:
    """Rows are put at sorted indices (index_add_cuda_impl, index_copy_out); those that are added
    are multiplied by `alpha` first."""
    if not call.deterministic:
        return
    source, dim = argument(call, "source"), int(argument(call, "dim"))
    if operator(call).startswith("index_add"):
        yield Workspace(nbytes(source), what="rows times alpha")
    before = [None] * (dim % max(len(call.args[0].shape), 1))
    yield from _put_in_order(call, [*before, argument(call, "index")], source)


@rule(
    "aten::scatter_reduce",
    "aten::scatter_reduce_",
    source=file("ATen/native/TensorAdvancedIndexing.cpp", "scatter_reduce_two", read="2.6.0"),
)
def counts(call: Call) -> Iterator[Workspace | Release]:
    """A mean divides by how many numbers came to each place."""
    if argument(call, "reduce") == "mean":
        ones = Workspace(nbytes(argument(call, "src")), what="ones")
        yield ones
        yield Workspace(nbytes(call.result), what="numbers at each place")
        nowhere = Workspace(numel(call.result), what="places without a number")
        yield nowhere
        yield Release(nowhere)


@rule(
    *("aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_"),
    *("aten::scatter_reduce", "aten::scatter_reduce_"),
    source=file("ATen/native/TensorAdvancedIndexing.cpp", "_scatter_via_index_put", read="2.6.0"),
)
def scattered_in_order(call: Call) -> Iterator[Workspace | Release]:
    """Sums, and numbers that replace others, are put at sorted indices: of each dimension
    (TensorAdvancedIndexing.cpp, _scatter_via_index_put)."""
    source, index = argument(call, "src"), argument(call, "index")
    sums = argument(call, "reduce", "sum") in ("sum", "add", "mean")
    if not (call.deterministic and hasattr(source, "shape") and sums and numel(index)):
        return
    shape, dim = tuple(index.shape), int(argument(call, "dim")) % max(len(index.shape), 1)
    others = [one for one in range(len(shape)) if one != dim]
    source = Made(source, shape, tuple(source.stride()))
    if all(index.stride()[one] == 0 for one in others):
        alone = Made(index, shape[dim : dim + 1], tuple(index.stride())[dim : dim + 1])
        yield from _put_in_order(call, [None] * dim + [alone], source)
        return
    given = [index] * len(shape)
    for one in others:
        yield Workspace(shape[one] * INDEX, what="numbers of a dimension")
        yield from cub.for_a_moment(INDEX, FILLS)
        given[one] = Made(index, shape, tuple(int(place == one) for place in range(len(shape))))
    yield from _put_in_order(call, given, source)


@rule(
    "aten::embedding",
    "aten::index_select",
    source=file("ATen/native/ResizeCommon.h", "fill_resize_deterministic_", read="2.15.0"),
)
def filled(call: Call) -> Iterator[Workspace | Release]:
    """Memory for rows, which is filled before they are written."""
    if call.deterministic:
        yield from cub.for_a_moment(int(call.result.element_size()), FILLS)


# -- indices as they are given --------------------------------------------------------------------


def _from_host(indices: Sequence[Any]) -> Iterator[Workspace | Release]:
    for index in indices:
        if index is not None and on_host(index):
            yield Workspace(numel(index) * INDEX, what="index from the host")


@before(
    "aten::index",
    "aten::_unsafe_index",
    source=(
        file("ATen/native/TensorAdvancedIndexingUtils.h", "make_info", read="2.15.0"),
        file("ATen/native/TensorAdvancedIndexing.cpp", "AdvancedIndex", read="2.6.0"),
    ),
)
def index_alike(call: Call) -> Iterator[Workspace | Release]:
    """Indices on the device, in 64 bits, and with the same strides (make_info in
    TensorAdvancedIndexingUtils.h, and AdvancedIndex)."""
    yield from _from_host(call.args[1])
    given = [one for one in call.args[1] if one is not None and not on_host(one)]
    yield from (_long(one) for one in given if _is_short(one))
    shape = broadcast([one.shape for one in given]) if given else ()
    if len({_strides(one, shape) for one in given}) > 1:
        for one in given:
            if tuple(one.shape) != shape or not is_contiguous(one):
                yield Workspace(math.prod(shape) * INDEX, what="index in order")


def _strides(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an index that is spread over a shape."""
    missing = len(shape) - len(index.shape)
    sizes = zip(index.shape, index.stride(), strict=True)
    return (0,) * missing + tuple(0 if size == 1 else int(step) for size, step in sizes)


@before("aten::embedding", source=file("ATen/native/Embedding.cpp", read="2.6.0"))
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


@before(
    "aten::embedding_dense_backward", source=file("ATen/native/cuda/Embedding.cu", read="2.6.0")
)
def sorted_rows(call: Call) -> Iterator[Workspace | Release]:
    """Indices and gradient in a row; many are sorted before their rows are summed."""
    yield from contiguous_copy(call.args[1], "indices in a row")
    yield from contiguous_copy(call.args[0], "gradient in a row")
    if not _sorts(call):
        return
    indices = call.args[1]
    count, size = numel(indices), int(indices.element_size())
    yield from sorted_indices(call, count, size)


def sorted_indices(call: Call, count: int, size: int) -> Iterator[Workspace | Release]:
    """Sorts indices by all their bits, with the place that each came from, and counts how often
    each occurs where the gradient is divided by that."""
    for name in ("sorted indices", "original indices"):
        yield Workspace(count * size, what=name)
    numbers = Workspace(count * size, what="a range")
    yield numbers
    if call.deterministic:
        yield from cub.for_a_moment(size, FILLS)
    temporary = cub.radix_sort(count, size, size, size * 8, call.gpu.cc)
    yield from cub.for_a_moment(temporary, "radix sort")
    yield Release(numbers)
    if argument(call, "scale_grad_by_freq", False):
        yield Workspace(count * size, what="frequencies")
        for _ in range(2):  # from the first to the last, and from the last to the first
            taken = cub.scan_by_key(count, size, size)
            yield from cub.for_a_moment(taken, "scan of equal ones")


@composition(
    "aten::_embedding_bag_backward",
    source=file("ATen/native/EmbeddingBag.cpp", "_embedding_bag_backward", read="2.6.0"),
)
def gradient_of_bags(
    gradient: Any,  # as PyTorch calls it
    indices: Any,
    offsets: Any,
    bags: Any,
    sizes: Any,
    highest: Any,
    rows: int,
    by_frequency: bool,
    mode: int,
    is_sparse: bool,
    weights: Any,
    padding: int = -1,
) -> Any:
    """Of two kernels (ATen/native/EmbeddingBag.cpp, _embedding_bag_backward)."""
    common = rows, by_frequency, mode, weights, padding
    if is_sparse:
        backward = torch.ops.aten._embedding_bag_sparse_backward
        return backward(gradient, indices, offsets, bags, sizes, *common)
    backward = torch.ops.aten._embedding_bag_dense_backward
    return backward(gradient, indices, bags, sizes, highest, *common)


@before("aten::_embedding_bag_dense_backward", source=EMBEDDING_BAG)
def sorted_bags(call: Call) -> Iterator[Workspace | Release]:
    """Of a sum or mean of each bag: all indices are sorted."""
    if argument(call, "mode", SUM) == MOST or not numel(call.args[1]):
        return
    indices = call.args[1]
    count, size = numel(indices), int(indices.element_size())
    yield from sorted_indices(call, count, size)


@rule("aten::_embedding_bag_dense_backward", source=(EMBEDDING_BAG, EMBEDDING_BACKWARD_KERNEL))
def summed_bags(call: Call) -> Iterator[Workspace | Release]:
    """The rows of each index are summed, as of an embedding."""
    indices = call.args[1]
    if argument(call, "mode", SUM) != MOST and numel(indices):
        weights = int(argument(call, "num_weights"))
        yield from _segments(call, numel(indices), int(indices.element_size()), weights)


@rule(
    "aten::embedding_dense_backward",
    source=(EMBEDDING_BACKWARD_KERNEL, file("ATen/native/cuda/SortingCommon.cuh", read="2.15.0")),
    seen="an H200",
)
def summed_rows(call: Call) -> Iterator[Workspace | Release]:
    """The rows of each index are summed in segments of at most ten."""
    if _sorts(call):
        indices = call.args[1]
        weights = int(argument(call, "num_weights"))
        yield from _segments(call, numel(indices), int(indices.element_size()), weights)


#: A thread sums up so many rows of a segment.
ROWS_OF_A_THREAD = 10
#: What decides whether the sums are added to the result at once (EmbeddingBackwardKernel.cu and
#: SortingCommon.cuh): the threads of a block at most, blocks for each multiprocessor that are
#: enough to keep it busy, and how many more parts than blocks are worth it.
MOST_THREADS, ENOUGH_BLOCKS, TIMES_AS_MANY_PARTS = 1024, 4, 4


def _adds_at_once(call: Call, segments: int, parts: int) -> bool:
    """Whether the parts of segments are added to the result without a buffer for them, as few
    segments of many rows are in newer releases. Those of bags are not."""
    if (
        not call.release.adds_segments_at_once
        or call.deterministic
        or operator(call) != "embedding_dense_backward"
    ):
        return False
    columns = div_up(int(call.args[0].shape[-1]), WARP) * WARP
    blocks = div_up(segments * columns, min(columns, MOST_THREADS))
    return blocks < ENOUGH_BLOCKS * call.gpu.sms and parts > TIMES_AS_MANY_PARTS * blocks


def _segments(call: Call, count: int, size: int, weights: int) -> Iterator[Workspace | Release]:
    """Buffers for as many segments, and parts of them, as there can be."""
    gradient, cccl = call.args[0], call.release.cccl
    rows = 8 if type_name(gradient) == "float64" else 4
    segments = min(count, weights)
    parts = count // ROWS_OF_A_THREAD + segments
    yield Workspace(count * size, what="segments")
    yield Workspace(8, what="number of segments")
    keys = Workspace(count * size, what="index of each segment")
    yield keys
    unique = cub.unique_by_key(count, size, cccl, call.gpu.cc)
    yield from cub.for_a_moment(unique, "first of each segment")
    yield Release(keys)
    yield Workspace(segments * size, what="parts of each segment")
    yield Workspace(segments * size, what="first part of each segment")
    yield from cub.for_a_moment(cub.scan(segments, size, cccl), "scan")
    yield Workspace(8, what="number of parts")
    yield Workspace(parts * size, what="parts of segments")
    if not _adds_at_once(call, segments, parts):
        yield Workspace(parts * gradient.shape[-1] * rows, what="sums of parts")
        return
    yield Workspace(parts * size, what="segment of each part")
    if type_name(gradient) in ("float16", "bfloat16"):
        yield Workspace(weights * gradient.shape[-1] * rows, what="sums in 32 bits")


@before(
    "aten::where",
    source=file("ATen/native/TensorCompare.cpp", read="2.6.0"),
    seen="recordings of programs",
)
def where(call: Call) -> Iterator[Workspace | Release]:
    """A number from the host is a tensor of no dimensions on the device."""
    for given in call.args[1:]:
        if hasattr(given, "device") and not given.shape and on_host(given):
            yield Workspace(nbytes(given), what="number on the device")
