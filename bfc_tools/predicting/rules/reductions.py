"""Sums, means, maxima: the partial results of a reduction that is split over several blocks.

From PyTorch's ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size),
ATen/native/TensorIterator.cpp (the order of dimensions, and tensors beyond 2 GiB) and the files
ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceArgMaxKernel.cu and their like (which types
they add up in).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import file, rule
from bfc_tools.predicting.rules.tensors import argument, div_up, numel, operator, type_name

INT_MAX = 2**31 - 1
WARP = 32
LEAST_VALUES, MOST_VALUES = 16, 256
HALVES = ("float16", "bfloat16")


@dataclass
class Dimension:
    """A dimension of a reduction: strides are in elements, and 0 in the output if it is reduced."""

    size: int
    stride: int
    output_stride: int

    @property
    def reduced(self) -> bool:
        """Whether the reduction goes over it."""
        return self.output_stride == 0


@dataclass(frozen=True)
class Kernel:
    """What a kernel of Reduce.cuh is compiled with."""

    partial: int  # the bytes of one partial result
    unroll: int = 4  # the elements of one turn of a thread (vt0)
    #: The elements that it loads at once, where the input is contiguous (input_vec_size).
    vector: int = 4
    threads: int = 512  # the most threads of a block
    in_output: bool = True  # whether the output has the precision to add up in


def dimensions(
    shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int]
) -> list[Dimension]:
    """The dimensions in TensorIterator's order, the fastest first, adjacent ones merged."""
    own = [0] * len(shape)
    step = 1
    for index in reversed(range(len(shape))):
        if index not in reduced:
            own[index] = step
            step *= shape[index]
    order = _sorted_by_strides(shape, (own, strides))
    merged: list[Dimension] = []
    for index in order:
        size, stride, output = shape[index], strides[index], own[index]
        if size == 1:
            continue
        if merged:
            last = merged[-1]
            if last.size * last.stride == stride and last.size * last.output_stride == output:
                last.size *= size
                continue
        merged.append(Dimension(size, stride, output))
    return merged or [Dimension(1, 1, 0)]


def _sorted_by_strides(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """An insertion sort, as TensorIterator's: what cannot be compared stays where it is."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        place = start
        for before in reversed(range(start)):
            comparison = _compare(shape, operands, order[before], order[place])
            if comparison > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif comparison < 0:
                break
    return order


def _compare(
    shape: Sequence[int], operands: Sequence[Sequence[int]], first: int, second: int
) -> int:
    for index, strides in enumerate(operands):
        one, other = strides[first], strides[second]
        if index == 0 and (one == 0) != (other == 0):  # reduced dimensions come first
            return 1 if other == 0 else -1
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if shape[first] > shape[second]:
            return 1
    return 0


def _last_power_of_2(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


@dataclass
class _Block:
    """The block of threads that setReduceConfig chooses."""

    width: int
    height: int
    output_vector: int

    @classmethod
    def of(cls, first: int, second: int, most: int, output_vector: int) -> _Block:
        most //= output_vector
        first = _last_power_of_2(first) if first < most else most
        second = _last_power_of_2(second) if second < most else most
        width = min(first, WARP)
        height = min(second, most // width)
        return cls(min(first, most // height), height, output_vector)


def _output_vector(dims: Sequence[Dimension], fastest: Dimension, offset: int) -> int:
    """How many outputs a thread computes at once, where the output is contiguous."""
    vector = 4
    numbers = [offset, fastest.size, *(one.stride for one in dims if one is not fastest)]
    for number in numbers:
        while number % vector:
            vector //= 2
    return vector


def partial_results(
    dims: Sequence[Dimension], kernel: Kernel, gpu: GPU, offset: int = 0
) -> tuple[int, int]:
    """The bytes of a reduction's partial results and of its semaphores: (0, 0) if one block sees
    all inputs of an output. `dims` are in TensorIterator's order, and `offset` is the first element
    of the input, in elements from an aligned address."""
    inner = [one for one in dims if one.reduced]
    outer = [one for one in dims if not one.reduced]
    inputs = math.prod(one.size for one in inner)
    outputs = math.prod(one.size for one in outer)
    fastest = inner[0] if inner else dims[0]
    along_input = not outer or (bool(inner) and inner[0].stride < outer[0].stride)
    if not along_input:
        fastest = outer[0]
    first, second = (inputs, outputs) if along_input else (outputs, inputs)
    vector = 1
    if fastest.stride == 1:
        if along_input and first >= 128 and len(inner) == 1:
            first //= kernel.vector
        elif not along_input:
            vector = _output_vector(dims, fastest, offset)
            first //= vector
    block = _Block.of(first, second, kernel.threads, vector)
    return _split(block, along_input, inputs, outputs, kernel, gpu)


def _split(
    block: _Block, along_input: bool, inputs: int, outputs: int, kernel: Kernel, gpu: GPU
) -> tuple[int, int]:
    input_step, output_step = (block.width, 1) if along_input else (1, block.width)
    across = div_up(inputs, input_step) >= min(block.height * 16, MOST_VALUES)
    if across:
        input_step *= block.height
    else:
        output_step *= block.height
    values = div_up(inputs, input_step)
    grid = div_up(outputs // block.output_vector, output_step)
    target = gpu.sms * (gpu.threads_per_sm // (block.width * block.height))
    if not across or values < MOST_VALUES or grid > target:
        return 0, 0
    most = min(div_up(target, grid), div_up(values, LEAST_VALUES))
    blocks = max(most, div_up(values, MOST_VALUES))
    if blocks <= 1:
        return 0, 0
    size = kernel.partial * outputs * blocks
    return size if along_input else size * block.width * block.output_vector, 4 * grid


def parts(dims: list[Dimension], element_size: int, output_size: int) -> Iterator[list[Dimension]]:
    """The parts of a tensor that 32 bits can index, which are reduced one after the other."""
    spans = [
        sum((one.size - 1) * one.stride for one in dims) * element_size,
        sum((one.size - 1) * one.output_stride for one in dims) * output_size,
    ]
    if math.prod(one.size for one in dims) <= INT_MAX and max(spans) + 1 <= INT_MAX:
        yield dims
        return
    extents = [
        (one.size - 1) * max(one.stride * element_size, one.output_stride * output_size)
        for one in dims
    ]
    index = extents.index(max(extents))
    whole = dims[index]
    for size in (whole.size // 2, whole.size - whole.size // 2):
        part = list(dims)
        part[index] = Dimension(size, whole.stride, whole.output_stride)
        yield from parts(part, element_size, output_size)


def reduce(
    call: Call, tensor: Any, reduced: Sequence[int], kernel: Kernel, output_size: int
) -> Iterator[Workspace | Release]:
    """The partial results and semaphores of each part in turn."""
    if numel(tensor) == 0 or not tensor.shape:
        return
    dims = dimensions(tensor.shape, tensor.stride(), reduced)
    split = list(parts(dims, tensor.element_size(), output_size))
    if len(split) > 1 and not kernel.in_output:
        outputs = math.prod(one.size for one in dims if not one.reduced)
        yield Workspace(outputs * kernel.partial, what="sums of the parts")
    offset = tensor.storage_offset() if hasattr(tensor, "storage_offset") else 0
    for part in split:
        size, semaphores = partial_results(part, kernel, call.gpu, offset)
        if size:
            held = Workspace(size, what="partial results"), Workspace(semaphores, what="semaphores")
            yield from held
            yield from map(Release, reversed(held))


def _accumulated(name: str, tensor: Any) -> int:
    """The bytes of what sums of such elements are kept in."""
    kind = type_name(tensor)
    if kind.startswith("complex"):
        return 16 if kind == "complex128" else 8
    return 8 if kind == "float64" or not kind.startswith(("float", "bfloat")) else 4


def kernel_of(name: str, tensor: Any, with_index: bool) -> Kernel:
    """What the kernel of an operator is compiled with for such elements."""
    size = int(tensor.element_size())
    threads = 256 if type_name(tensor) == "complex128" else 512
    if with_index:
        return Kernel(16, threads=threads)  # a value, padded, and its index in 8 bytes
    if name in ("std", "var", "std_mean", "var_mean"):
        wide = type_name(tensor) == "float64"
        return Kernel(32 if wide else 16, 2, 2, threads)
    if name in ("max", "min", "amax", "amin", "aminmax", "any", "all"):
        return Kernel(size * 2 if name == "aminmax" else size, threads=threads)
    vector = 8 if name in ("sum", "mean", "nansum") and size == 2 else 4
    in_output = type_name(tensor) not in HALVES
    return Kernel(_accumulated(name, tensor), 4, vector, threads, in_output)


def _reduced(call: Call, tensor: Any) -> list[int]:
    given = argument(call, "dim")
    given = [given] if isinstance(given, int) else list(given or [])
    count = len(tensor.shape)
    return [dim % count for dim in given] or list(range(count))


NAMES = (
    *("sum", "nansum", "mean", "prod", "any", "all", "amax", "amin", "aminmax", "max", "min"),
    *("argmax", "argmin", "std", "var", "std_mean", "var_mean", "linalg_vector_norm", "norm"),
)


@rule(
    *(f"aten::{name}" for name in NAMES),
    source=(
        file(
            "ATen/native/cuda/Reduce.cuh",
            "setReduceConfig",
            "global_memory_size",
            "semaphore_size",
            read="2.15.0",
        ),
        file("ATen/native/cuda/ReduceSumProdKernel.cu", read="2.6.0"),
        file("ATen/native/cuda/ReduceMomentKernel.cu", read="2.6.0"),
        file("ATen/native/cuda/ReduceArgMaxKernel.cu", read="2.6.0"),
        file("ATen/TensorIterator.cpp", read="2.6.0"),
    ),
    seen="19 recordings of programs",
)
def reduction(call: Call) -> Iterator[Workspace | Release]:
    """A reduction; first the copy in the type of the result, if the kernel cannot convert."""
    name = operator(call)
    tensor = call.args[0]
    if any(argument.name == "other" for argument in call.func._schema.arguments):
        return  # max(a, b) goes element by element
    results = call.result if isinstance(call.result, (tuple, list)) else [call.result]
    with_index = name in ("argmax", "argmin") or (name in ("max", "min") and len(results) > 1)
    converted = name in ("sum", "prod", "nansum", "mean") and _converts(tensor, results[0])
    if converted:
        yield Workspace(numel(tensor) * results[0].element_size(), what="copy of another type")
        tensor = _Copy(tensor, results[0])
    kernel = kernel_of(name, tensor, with_index)
    yield from reduce(call, tensor, _reduced(call, tensor), kernel, results[0].element_size())


def _converts(tensor: Any, result: Any) -> bool:
    """Whether the input is copied in the type of the result: halves are converted on the way."""
    if tensor.dtype == result.dtype:
        return False
    return not (type_name(tensor) in HALVES and type_name(result) == "float32")


class _Copy:
    """A tensor of the same layout in the type of another."""

    def __init__(self, tensor: Any, like: Any) -> None:
        self.shape, self.dtype, self.device = tensor.shape, like.dtype, tensor.device
        self._tensor, self._like = tensor, like

    def stride(self) -> tuple[int, ...]:
        """The strides of a dense copy, which keeps the order of the original's."""
        strides = [0] * len(self.shape)
        step = 1
        inner_first = range(len(self.shape) - 1, -1, -1)
        for index in sorted(inner_first, key=lambda index: self._tensor.stride()[index]):
            strides[index] = step
            step *= self.shape[index]
        return tuple(strides)

    def element_size(self) -> int:
        """The bytes of an element."""
        return int(self._like.element_size())
