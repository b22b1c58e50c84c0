"""The kernels on a real GPU: `make test-gpu`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from copy_cases import CHANGES, DTYPES, case
from copy_memory import run
from cuda_machine import ON_GPU

import bfc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu"),
    pytest.mark.filterwarnings(
        "ignore:the imaginary part", "ignore:overflow encountered", "ignore:invalid value"
    ),
]
PLACES = ((0, 0), (0, None), (None, 0))


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_every_dtype_to_this_one_with_every_change(to):
    for source, change in itertools.product(DTYPES, CHANGES):
        made = case(f"gpu {source} {to} {change}", source, to, change)
        made.check(run(made, 0, 0))


def test_random_copies_between_every_two_places():
    for seed in range(300):
        made = case(f"gpu {seed}", aligned=seed % 4 > 0)
        for places, non_blocking in itertools.product(PLACES, (False, True)):
            if places[0] is None and non_blocking:
                continue  # the host may look only once the stream is done
            made.check(run(made, *places, non_blocking=non_blocking), (places, non_blocking))


def test_more_items_than_32_bits_count():
    """2**31 + 5 of them, cast, so that a kernel does it; and what is read lies above 2**32."""
    count = 2**31 + 5
    with bfc.BFCAllocator(bfc.CUDASubAllocator(), allow_growth=True) as allocator:
        try:
            source = allocator.allocate(count)
            to = allocator.allocate(2 * count)
        except bfc.OutOfMemoryError:
            pytest.skip("needs a GPU with 7 GiB free")
        host = np.arange(count, dtype=np.uint64).astype(np.uint8)
        bfc.copy(source, host)
        del host
        bfc.copy(to.view("i2"), source)  # casts
        for at in (0, 2**31 - 3, count - 3):
            part = Part(to, at * 2, 3, "<i2")
            found = bfc.copy(np.zeros(3, "i2"), part)
            assert found.tolist() == [(at + i) % 256 for i in range(3)]


class Part:
    """A few items inside a buffer."""

    def __init__(self, buffer: bfc.Buffer, offset: int, count: int, typestr: str) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": typestr,
            "data": (buffer.ptr + offset, False),
            "version": 3,
        }
