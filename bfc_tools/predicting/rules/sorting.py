"""Sorting, choosing and sampling.

From PyTorch's ATen/native/cuda/Sort.cpp, Sort.h and SortStable.cu (which sort is taken),
TensorTopK.cu and TensorTopK.cpp (several blocks for a row, and the sort of what was chosen),
ScanKernels.cpp and ScanUtils.cuh, ATen/native/Distributions.cpp and cuda/MultinomialKernel.cu,
and cuda/Randperm.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import Call, Release, Workspace, on_cuda
from bfc_tools.predicting.rules.operators import answer, before, file, rule
from bfc_tools.predicting.rules.reductions import kernel_of, reduce
from bfc_tools.predicting.rules.tensors import (
    Made,
    argument,
    contiguous_copy,
    div_up,
    is_contiguous,
    nbytes,
    numel,
    operator,
    type_name,
)

NONZERO = file("ATen/native/cuda/Nonzero.cu", read="2.6.0")

INDEX, COUNT = 8, 4
#: Up to so many elements are sorted in place, within a block.
IN_A_BLOCK = 4096
LARGE = 1_000_000
FEW = 128


def _dimension(call: Call, tensor: Any) -> int:
    given = argument(call, "dim", -1)
    return int(-1 if given is None else given) % max(len(tensor.shape), 1)


@rule(
    "aten::sort",
    "aten::argsort",
    "aten::msort",
    source=(
        file("ATen/native/cuda/Sort.cpp", read="2.6.0"),
        file("ATen/native/cuda/Sort.h", read="2.15.0"),
        file("ATen/native/cuda/SortStable.cu", read="2.6.0"),
    ),
    seen="an H200: scans and sums in the tests",
)
def sort(call: Call) -> Iterator[Workspace | Release]:
    """Rows of up to 4096 elements within a block, longer ones by CUB's radix sort."""
    tensor = call.args[0]
    if not tensor.shape or not numel(tensor):
        return
    dim = _dimension(call, tensor)
    count = int(tensor.shape[dim])
    if count <= IN_A_BLOCK:
        yield Workspace(count * INDEX, what="a range")
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


@before("aten::kthvalue", source=file("ATen/native/cuda/Sorting.cpp", read="2.6.0"))
def kth(call: Call) -> Iterator[Workspace | Release]:
    """A copy of what is not contiguous."""
    yield from contiguous_copy(call.args[0], "copy in order")


@rule(
    "aten::topk",
    source=(
        file("ATen/native/cuda/TensorTopK.cu", read="2.6.0"),
        file("ATen/native/cuda/TensorTopK.cpp", read="2.6.0"),
    ),
    seen="an H100 with PyTorch 2.11 and later",
)
def topk(call: Call) -> Iterator[Workspace | Release]:
    """A copy of what is not contiguous; where rows are long, the counts of several blocks."""
    tensor, chosen = call.args[0], call.result[0]
    if not tensor.shape or not numel(chosen):
        return
    copies = contiguous_copy(tensor, "copy in order")
    yield from copies
    count = int(tensor.shape[_dimension(call, tensor)])
    rows = numel(tensor) // count
    if _several_blocks(rows, count):
        yield from _by_several_blocks(call, rows, count)
    yield from map(Release, copies)
    most = int(chosen.shape[_dimension(call, tensor)])
    if most > IN_A_BLOCK and argument(call, "sorted", True):
        yield Workspace(numel(chosen) * INDEX, what="sorted indices")
        yield Workspace(nbytes(chosen), what="sorted values")
        yield from _stable(chosen, most, call.gpu.cc)
        yield Workspace(numel(chosen) * INDEX, what="indices in their order")


#: With so many rows, up to the first number, rows of so many elements are given several blocks.
LONG_ROWS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
LONG_OF_MANY = 400


def _several_blocks(rows: int, count: int) -> bool:
    return count >= next((long for most, long in LONG_ROWS if rows <= most), LONG_OF_MANY)


#: Threads of a block, the digits they count, registers of a multiprocessor and of a thread.
TOPK_THREADS, DIGITS, REGISTERS, OF_A_THREAD = 256, 256, 65536, 40
LEAST_ITEMS, MOST_ITEMS = 4, 64


def _by_several_blocks(call: Call, rows: int, count: int) -> Iterator[Workspace | Release]:
    sums = call.release.sums_digits
    resident = REGISTERS // (OF_A_THREAD * TOPK_THREADS)
    items = div_up(rows * count, call.gpu.sms * resident * TOPK_THREADS)
    items = max(LEAST_ITEMS, min(items, MOST_ITEMS))
    blocks = rows * div_up(count, items * TOPK_THREADS)
    size = int(call.args[0].element_size())
    held = [Workspace(rows * size, what="kth values")]
    if not sums:
        held.append(Workspace(rows * 4, what="semaphores"))
    held += [
        Workspace(2 * rows * 4, what="numbers to find"),
        Workspace(2 * rows * max(size, 4), what="digits to find"),
        Workspace(blocks * DIGITS * 2, what="counts of digits"),
    ]
    if sums:
        held.append(Workspace(rows * DIGITS * 4, what="sums of digits"))
    held += [Workspace(blocks * 4, what=what) for what in ("larger ones", "equal ones")]
    yield from held
    for _ in range(2):
        yield from cub.for_a_moment(cub.scan_by_key(blocks, 4, 4), "scan of each row")
    yield from map(Release, reversed(held))


@rule(
    "aten::cumsum",
    "aten::cumprod",
    "aten::logcumsumexp",
    "aten::cumsum_",
    "aten::cumprod_",
    source=(
        file("ATen/native/cuda/ScanKernels.cpp", read="2.6.0"),
        file("ATen/native/cuda/ScanUtils.cuh", read="2.15.0"),
    ),
    seen="an H200: 640 to 1048576 elements",
)
def scan(call: Call) -> Iterator[Workspace | Release]:
    """A copy in the type of the result, and CUB's scan where all is one row."""
    tensor, result = call.args[0], call.result
    if tensor.dtype != result.dtype:
        yield Workspace(numel(tensor) * int(result.element_size()), what="copy of another type")
    elif not is_contiguous(tensor):
        yield Workspace(nbytes(tensor), what="copy in order")
    whole = tensor.shape and numel(tensor) == tensor.shape[_dimension(call, tensor)]
    if whole and numel(tensor):
        size = int(result.element_size())
        sums = operator(call).startswith("cumsum") and "float" in type_name(result)
        if call.deterministic and sums:
            taken = cub.scan_in_order(numel(tensor), size, call.gpu.sms)
        else:
            taken = cub.scan(numel(tensor), size, call.release.cccl)
        yield from cub.for_a_moment(taken, "scan")


@rule(
    "aten::multinomial",
    source=(
        file("ATen/native/Distributions.cpp", read="2.6.0"),
        file("ATen/native/cuda/MultinomialKernel.cu", read="2.6.0"),
    ),
)
def multinomial(call: Call) -> Iterator[Workspace | Release]:
    """A race of waiting times, or a search in the sums of what may be drawn again."""
    tensor = call.args[0]
    drawn = int(argument(call, "num_samples"))
    if drawn > 1 and argument(call, "replacement", False):
        for what in ("probabilities", "normalised probabilities", "sums of probabilities"):
            yield Workspace(nbytes(tensor), what=what)
        return
    yield from _checks(call, tensor)
    yield Workspace(nbytes(tensor), what="waiting times")
    if drawn > 1:
        yield Workspace(numel(call.result) * int(tensor.element_size()), what="values drawn")
        rows = numel(tensor) // int(tensor.shape[-1])
        if _several_blocks(rows, int(tensor.shape[-1])):
            yield from _by_several_blocks(call, rows, int(tensor.shape[-1]))


def _checks(call: Call, tensor: Any) -> Iterator[Workspace | Release]:
    """Whether the probabilities are right, which is read from the device."""
    size = int(tensor.element_size())
    held: list[Workspace] = []
    for name in ("max", "min"):
        held += Workspace(size, what=f"{name} of all"), Workspace(1, what="whether it is right")
        yield held[-2]
        yield from reduce(
            call, tensor, range(len(tensor.shape)), kernel_of(name, tensor, False), size
        )
        yield held[-1]
    yield Workspace(1, what="whether both are right")
    yield from map(Release, reversed(held))
    rows = Made(tensor, tuple(tensor.shape[:-1]))
    sums = Workspace(numel(rows) * size, what="sums of rows")
    yield sums
    yield from reduce(call, tensor, [-1], kernel_of("sum", tensor, False), size)
    zeros = Workspace(numel(rows), what="which are 0")
    yield zeros
    yield Workspace(1, what="whether any is 0")
    yield Release(zeros)
    yield Release(sums)
    yield from cub.for_a_moment(1, "whether none is")


CHECK = file("ATen/native/DistributionTemplates.h", "CHECK_NORMAL_TENSOR_STD", read="2.15.0")


@rule("aten::normal.Tensor_Tensor", "aten::normal.float_Tensor", source=CHECK)
@before("aten::normal.Tensor_Tensor", "aten::normal.float_Tensor", source=CHECK)
def deviations(call: Call) -> Iterator[Workspace | Release]:
    """Whether the least deviation is negative, which is read from the device: twice
    (ATen/native/DistributionTemplates.h, CHECK_NORMAL_TENSOR_STD)."""
    tensor = argument(call, "std")
    if not numel(tensor):
        return
    size = int(tensor.element_size())
    held = [Workspace(size, what="least deviation"), Workspace(1, what="whether it is right")]
    yield held[0]
    kernel = kernel_of("min", tensor, False)
    yield from reduce(call, tensor, range(len(tensor.shape)), kernel, size)
    yield held[1]
    yield from map(Release, reversed(held))


@before("aten::nonzero", source=NONZERO)
def counted(call: Call) -> Iterator[Workspace | Release]:
    """How many are not zero is counted first (ATen/native/cuda/Nonzero.cu)."""
    tensor = call.args[0]
    yield from contiguous_copy(tensor, "copy in order")
    yield Workspace(COUNT, what="number of chosen")
    yield from cub.for_a_moment(cub.total(numel(tensor), COUNT, call.gpu), "sum")


@rule("aten::nonzero", source=NONZERO)
def chosen(call: Call) -> Iterator[Workspace | Release]:
    """Then their places are written."""
    tensor = call.args[0]
    if tensor.shape:
        size = cub.select_flagged(numel(tensor), call.release.cccl, call.gpu.cc)
        yield from cub.for_a_moment(size, "places")


# -- orders at random ------------------------------------------------------------------------------


def bits_of_an_order(count: int) -> int:
    """How many bits random keys have, so that hardly two are alike."""
    seldom = math.log(0.9) * 12
    return min(64, math.ceil(math.log2(count - (6 * count * count + 1) / seldom)))


@answer(
    "aten::randperm",
    source=(
        file("ATen/native/cuda/Randperm.cu", read="2.6.0"),
        file(
            "ATen/native/TensorFactories.h", "check_supported_max_int_with_precision", read="2.15.0"
        ),
    ),
)
def order(call: Call, run: Callable[[], Any]) -> Any:
    """A range is sorted by random keys. The greatest number is made a tensor first, to see that its
    type holds it (ATen/native/TensorFactories.h, check_supported_max_int_with_precision)."""
    made = run()
    count = int(numel(made))
    if not on_cuda(made) or not count:
        return made
    bits = bits_of_an_order(count)
    key = 4 if bits <= 32 else INDEX
    size = cub.radix_sort(count, key, int(made.element_size()), bits, call.gpu.cc)
    with call.recording:
        greatest = made.new_empty(())
        del greatest
        numbers = torch.empty_like(made)
        keys = torch.empty(count * key, dtype=torch.uint8, device=made.device)
        ordered = torch.empty_like(keys)
        sorting = keys.new_empty(size)
    del sorting, ordered, keys, numbers
    return made
