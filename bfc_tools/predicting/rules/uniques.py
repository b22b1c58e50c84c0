"""Elements that differ, and how often each occurs.

From PyTorch's ATen/native/cuda/UniqueCub.cu (compute_unique), cuda/Unique.cu
(unique_dim_cuda_template), ATen/native/TensorCompare.cpp (isin_sorting, isin_Tensor_Tensor_out),
and cuda/TensorModeKernel.cpp and TensorModeKernel.cu (mode_kernel_impl, calculate_mode). How many
differ is known of numbers that were drawn evenly; of others it is all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import answer, composition, file, rule
from bfc_tools.predicting.rules.tensors import (
    argument,
    div_up,
    is_contiguous,
    nbytes,
    numel,
    operator,
)

INDEX = 8
#: Up to so many elements the most frequent one is found within a block.
IN_A_BLOCK = 2048
#: So many elements are searched at once.
SEARCHED = 1 << 20


def _different(call: Call, tensor: Any, what: str) -> int:
    count = call.choices.different(tensor) if call.choices else numel(tensor)
    call.assume(what, count)
    return count


@answer(
    "aten::_unique2",
    "aten::_unique",
    "aten::unique_consecutive",
    source=file("ATen/native/cuda/UniqueCub.cu", "compute_unique", read="2.6.0"),
)
def unique(call: Call, run: Callable[[], Any]) -> Any:
    """Memory for all elements is allocated, and kept. They are sorted, unless those count as
    different that do not lie side by side."""
    tensor = call.args[0]
    if argument(call, "dim") is not None:
        return _unique_rows(call, False)
    different = _different(call, tensor, "unique: elements that differ")
    sorts = operator(call) != "unique_consecutive"
    key, count = int(tensor.element_size()), numel(tensor)
    inverse, with_counts = (argument(call, f"return_{one}") for one in ("inverse", "counts"))
    with call.recording:
        flat = tensor.reshape(-1)
        held = [tensor.new_empty(count)] if sorts else []
        size = cub.radix_sort(count, key, INDEX if inverse else 0, key * 8, call.gpu.cc)
        held += _indices(flat, count, 2 if sorts and inverse else 0)
        if sorts:
            _for_a_moment(flat, size)
        del held[1:-1]  # the range
        places = _indices(flat, count, 1)[0].view(tensor.shape) if inverse else None
        if inverse:
            marks = flat.new_empty(count, dtype=torch.int64 if sorts else torch.int32)
            _for_a_moment(flat, cub.sum_of_marks(count))
            del marks
        found = flat.new_empty(count)
        number = _indices(flat, 1, 1)
        counts = _indices(flat, count, 1)[0] if with_counts else None
        chosen = cub.select_flagged(count, call.release.cccl, call.gpu.cc)
        _for_a_moment(flat, cub.run_lengths(count) if with_counts else chosen)
        del number, held
        nothing = flat.new_empty(0, dtype=torch.int64)
        results = [found[:different], nothing if places is None else places]
    if operator(call) != "_unique":
        results.append(nothing if counts is None else counts[:different])
    return tuple(results)


@answer(
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
    source=file("ATen/native/cuda/Unique.cu", "unique_dim_cuda_template", read="2.6.0"),
)
def unique_rows(call: Call, run: Callable[[], Any]) -> Any:
    """Rows that differ: at most all."""
    return _unique_rows(call, operator(call) == "unique_dim")


def _unique_rows(call: Call, sorts: bool) -> Any:
    tensor, dim = call.args[0], int(argument(call, "dim"))
    count = int(tensor.shape[dim])
    call.assume("unique: all rows", count)
    with call.recording:
        rows = tensor.transpose(dim, 0).contiguous()
        indices = _indices(rows, count, 1)[0]
        if sorts:
            _for_a_moment(rows, cub.merge_sort(count, INDEX, 0))
        places = counts = rows.new_empty(0, dtype=torch.int64)
        if argument(call, "return_inverse"):
            where, places = _indices(rows, count, 2)
            del where
        if argument(call, "return_counts"):
            numbers = _indices(rows, count + 1, 1)
            counts = _indices(rows, count, 1)[0]
            del numbers
        else:
            chosen = cub.select_flagged(count, call.release.cccl, call.gpu.cc)
            _for_a_moment(rows, cub.aliased(chosen, INDEX))
        del rows
        found = tensor.index_select(dim, indices)
        del indices
    return found, places, counts


def _indices(like: Any, count: int, times: int) -> list[Any]:
    return [like.new_empty(count, dtype=torch.int64) for _ in range(times)]


def _for_a_moment(like: Any, nbytes: int) -> None:
    like.new_empty(nbytes, dtype=torch.uint8)


@composition(
    "aten::isin",
    source=file(
        "ATen/native/TensorCompare.cpp", "isin_sorting", "isin_Tensor_Tensor_out", read="2.6.0"
    ),
)
def is_in(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Few are compared with all; with many they are sorted, and are there if two lie side by side
    that are alike."""
    tensors = [one for one in (elements, test_elements) if isinstance(one, torch.Tensor)]
    if not isinstance(test_elements, torch.Tensor):
        return (elements != test_elements) if invert else (elements == test_elements)
    if not isinstance(elements, torch.Tensor):
        elements = torch.full((), elements, dtype=tensors[0].dtype, device=tensors[0].device)
    found = elements.new_empty(elements.shape, dtype=torch.bool)
    if test_elements.numel() < 10 * elements.numel() ** 0.145:
        alike = elements.unsqueeze(-1) == test_elements.reshape(-1)
        found.copy_(alike.any(-1))
        del alike
        return found.logical_not_() if invert else found
    order = None
    flat, tests = elements.reshape(-1), test_elements.reshape(-1)
    if not assume_unique:
        flat, order = torch.ops.aten._unique(flat, False, True)
        tests = torch.ops.aten._unique(tests, False)[0]
    both = torch.cat([flat, tests])
    del tests, flat
    ordered, places = both.sort(stable=True)
    alike = torch.empty_like(ordered, dtype=torch.bool)
    alike[:-1].copy_(ordered[1:] == ordered[:-1])
    mask = torch.empty_like(alike)
    mask.index_copy_(0, places, alike)
    chosen = mask[: elements.numel()] if order is None else mask[order]
    found.copy_(chosen.view(elements.shape))
    del chosen, mask, alike, places, ordered, both, order
    return found


@rule(
    "aten::mode",
    source=(
        file("ATen/native/cuda/TensorModeKernel.cpp", "mode_kernel_impl", read="2.6.0"),
        file("ATen/native/cuda/TensorModeKernel.cu", "calculate_mode", read="2.6.0"),
    ),
)
def mode(call: Call) -> Iterator[Workspace | Release]:
    """Long rows are sorted one by one in a copy, and the runs of equal elements counted."""
    tensor = call.args[0]
    dim = int(argument(call, "dim", -1))
    count = int(tensor.shape[dim]) if tensor.shape else 1
    if not numel(tensor):
        return
    if count <= IN_A_BLOCK:
        if not is_contiguous(tensor.transpose(dim, -1)):
            yield Workspace(nbytes(tensor), what="copy in order")
        return
    different = min(_different(call, tensor, "mode: elements that differ"), count)
    yield Workspace(nbytes(tensor), what="copy in order")
    for _ in range(numel(tensor) // count):
        yield from _most_frequent(call, count, different)


def _most_frequent(call: Call, count: int, different: int) -> Iterator[Workspace | Release]:
    key = int(call.args[0].element_size())
    order = Workspace(count * INDEX, what="indices")
    yield order
    yield from cub.for_a_moment(cub.thrust_sort(count, key, INDEX, call.gpu.cc), "sort")
    yield from cub.for_a_moment(cub.total(count, 4, call.gpu) + 4, "number of different ones")
    held = [Workspace(different * size, what=what) for size, what in ((key, "keys"), (8, "counts"))]
    yield from held
    yield from cub.for_a_moment(cub.runs(count), "counts of equal ones")
    yield from cub.for_a_moment(cub.aliased(cub.NOTHING, 16), "greatest count")
    for _ in range(div_up(div_up(count, SEARCHED), 2)):  # it's found half-way
        yield from cub.for_a_moment(cub.total(max(count, SEARCHED), 16, call.gpu) + 16, "search")
    yield from (Release(one) for one in (*reversed(held), order))
