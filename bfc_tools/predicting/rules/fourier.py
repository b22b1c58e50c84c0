"""What cuFFT works in, for a moment of each transform.

Only cuFFT knows. The estimates are as an H100 with CUDA 13.0 had it in 80 transforms of 3 to
1048576 numbers in one or two dimensions: nothing for lengths whose prime factors are small, else
the signal once, and up to four times for long ones of large factors. What it overwrites is copied
first, from PyTorch's ATen/native/cuda/SpectralOps.cpp (_fft_c2r_cufft).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import Call, Doubt, Release, Workspace
from bfc_tools.predicting.rules.operators import file, rule
from bfc_tools.predicting.rules.tensors import argument, nbytes, numel, operator

#: Lengths of these factors need nothing up to here; a longer one of them was 65536.
SMALL_FACTOR, LONGEST = 7, 16384
#: Of these factors up to this length, and of any up to this one.
LARGER_FACTOR, SHORT, SHORTEST = 13, 1024, 127
#: Of these factors the real numbers are held once more; of larger ones all as complex numbers, and
#: those several times if they are many: a 32nd part of 10007 to 131070 took 2.5 to 4 times.
LARGE_FACTOR, MANY = 223, 8192
WHY_NOT_KNOWN = "cuFFT's workspaces are estimates from 80 transforms on an H100"


def largest_factor(number: int) -> int:
    """The largest prime factor.

    >>> largest_factor(65536), largest_factor(2310), largest_factor(10007)
    (2, 11, 10007)
    """
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


@rule(
    "aten::_fft_c2r",
    source=file("ATen/native/cuda/SpectralOps.cpp", "_fft_c2r_cufft", read="2.6.0"),
)
def complex_to_real(call: Call) -> Iterator[Workspace | Release]:
    """cuFFT overwrites what it is given: a copy of that."""
    yield Workspace(nbytes(call.args[0]), what="copy for cuFFT")


@rule(
    "aten::_fft_r2c",
    "aten::_fft_c2c",
    "aten::_fft_c2r",
    seen="an H100 with CUDA 13.0: 80 transforms of 3 to 1048576 numbers",
)
def transform(call: Call) -> Iterator[Workspace | Release]:
    """By the lengths of the signal in the dimensions that are transformed."""
    kind = operator(call)
    signal = call.result if kind == "_fft_c2r" else call.args[0]
    lengths = [int(signal.shape[dim]) for dim in argument(call, "dim")]
    if numel(signal) and lengths:
        real = numel(signal) * int(signal.element_size()) // (2 if kind == "_fft_c2c" else 1)
        both = kind == "_fft_c2c"
        size = workspace(lengths, real, nbytes(call.result), both)
        doubt = None
        if any(map(_is_hard, lengths)):
            doubt = Doubt(0, max(size, _most(real, both)), WHY_NOT_KNOWN)
        yield from cub.for_a_moment(size, "cuFFT's workspace", doubt)


def workspace(lengths: list[int], real: int, result: int, both: bool) -> int:
    """The bytes that are needed. `real` is the size of the signal as real numbers, `both` whether
    it and the result are complex."""
    hard = [length for length in lengths if _is_hard(length)]
    if not hard:
        return result if max(lengths) > LONGEST else 0
    factor, longest = max(map(largest_factor, hard)), max(hard)
    if factor <= LARGE_FACTOR and len(lengths) == 1:
        return 2 * real if both else real
    if longest <= MANY:
        return 2 * real
    return _most(real, both)


def _most(real: int, both: bool) -> int:
    """The most bytes that were seen."""
    return math.ceil((4 if both else 2.5) * 2 * real)


def _is_hard(length: int) -> bool:
    """Whether a length needs memory, unless it is just very long."""
    factor = largest_factor(length)
    at_once = length <= SHORTEST or (factor <= LARGER_FACTOR and length <= SHORT)
    return factor > SMALL_FACTOR and not at_once
