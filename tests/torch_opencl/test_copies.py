"""Copies between tensors give the bits that they give on the CPU, in the order of the streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pyopencl as cl
import pytest
import torch
from torch_twins import DTYPES, Twins, are_same, random_shape, raw, that_broadcasts

import bfc
from bfc.copying import opencl_stream
from bfc_torch_opencl import places

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]

WAYS = ("to the device", "to the host", "on the device")


@pytest.fixture(autouse=True)
def _enabled(opencl: torch.device) -> None:
    """All tests here need the device."""


@contextlib.contextmanager
def held() -> Iterator[cl.UserEvent]:
    """What the default stream waits for, until its status is set."""
    queue = torch.opencl.pool().sub_allocator.queue
    event = cl.UserEvent(queue.context)
    queue.finish()
    cl.enqueue_barrier(queue, wait_for=[event])
    yield event
    if event.command_execution_status != cl.command_execution_status.COMPLETE:
        open_gate(event)
    queue.finish()


@pytest.fixture
def gate() -> Iterator[cl.UserEvent]:
    with held() as event:
        yield event


def open_gate(event: cl.UserEvent) -> None:
    event.set_status(cl.command_execution_status.COMPLETE)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler builds nothing, as PoCL's does for a processor that it does not know."""

    def refuse(*_given: object) -> None:
        raise opencl_stream.CompilerRefusedError("the compiler knows no such processor")

    monkeypatch.setattr(opencl_stream.Context, "program", refuse)
    monkeypatch.setattr(places, "_has_warned", False)


# -- the bits --------------------------------------------------------------------------------------


def copy_on_host(to: torch.Tensor, source: torch.Tensor) -> None:
    if {to.dtype, source.dtype} == {torch.float16, torch.float32}:
        source = source.resolve_neg().to(to.dtype)  # PyTorch 2.13 loses the neg bit there
    to.copy_(source)


def copied(way: str, to: Twins, source: Twins, non_blocking: bool) -> torch.Tensor:
    """All memory of the destination, after a copy in which a device takes part."""
    if way == "to the device":
        to.there.copy_(source.here, non_blocking=non_blocking)
        return to.device_whole.cpu()
    if way == "on the device":
        to.there.copy_(source.there, non_blocking=non_blocking)
        return to.device_whole.cpu()
    to.here.copy_(source.there, non_blocking=non_blocking)
    return to.whole


@contextlib.contextmanager
def dice_of(seed: str) -> Iterator[random.Random]:
    try:
        yield random.Random(seed)
    except BaseException:
        print(f"repeat with random.Random({seed!r})")
        raise


def check_pair(to: Twins, source: Twins, way: str, non_blocking: bool) -> None:
    before = to.whole.clone()
    try:
        copy_on_host(to.here, source.here)
    except NotImplementedError:  # the CPU does not negate this dtype
        return
    wanted = to.whole.clone()
    to.whole.copy_(before)
    found = copied(way, to, source, non_blocking)
    if to.whole.is_complex() and (to.here.is_neg() or source.here.is_neg()):
        # The CPU gives zeros of either sign here, by how long its loop is.
        wanted, found = wanted.to(torch.complex128) + 0, found.to(torch.complex128) + 0
    assert raw(found) == raw(wanted), (to.here.shape, to.here.stride(), source.here.stride())


@pytest.mark.parametrize("bits", [False, True], ids=["plain", "bits"])
@pytest.mark.parametrize("given", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_pair_of_dtypes_is_copied_as_on_the_cpu(given: torch.dtype, bits: bool) -> None:
    for wanted, way, non_blocking in itertools.product(DTYPES, WAYS, (False, True)):
        with dice_of(f"{given} {wanted} {way} {non_blocking} {bits}") as dice:
            shape = random_shape(dice)
            to = Twins(shape, wanted, dice)
            source = Twins(that_broadcasts(shape, dice), given, dice)
            if bits and torch.bool not in (given, wanted):
                to.set_bits(wanted.is_complex and dice.random() < 0.5, dice.random() < 0.5)
                source.set_bits(given.is_complex and dice.random() < 0.5, dice.random() < 0.5)
            check_pair(to, source, way, non_blocking)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_compiler_copies_go_through_the_host(way: str, no_compiler: None) -> None:
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for given, wanted, round_ in itertools.product(dtypes, dtypes, range(6)):
            with dice_of(f"{given} {wanted} {way} {round_}") as dice:
                shape = random_shape(dice)
                to = Twins(shape, wanted, dice)
                source = Twins(that_broadcasts(shape, dice), given, dice)
                check_pair(to, source, way, non_blocking=bool(round_ % 2))
    told = [str(one.message) for one in heard if "on the host" in str(one.message)]
    assert len(told) == 1
    assert "knows no such processor" in told[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_an_item_is_the_number_that_it_is_on_the_cpu(dtype: torch.dtype) -> None:
    dice = random.Random(0)
    twins = Twins((3, 2), dtype, dice)
    assert twins.there[2, 1].item() == twins.here[2, 1].item()
    if dtype in (torch.complex64, torch.complex128):
        twins.set_bits(conj=True, neg=True)
        assert twins.there[1:2, 1:].item() == twins.here[1:2, 1:].item()


def test_a_device_rounds_a_double_to_a_half_as_the_cpu() -> None:
    """By way of a float: this number would be another half at once."""
    twice = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert twice.half().item() != float(twice.numpy().astype("f2")[0])
    there = torch.empty(1, dtype=torch.float16, device="opencl").copy_(twice.to("opencl"))
    assert are_same(there, twice.half())


# -- shapes and memory -----------------------------------------------------------------------------


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    there = torch.zeros(2, 3, device="opencl")
    with pytest.raises(RuntimeError, match="expand"):
        there.copy_(torch.ones(4))
    assert not there.cpu().any()


def test_a_tensor_that_was_expanded_cannot_be_written() -> None:
    there = torch.zeros(3, device="opencl")
    with pytest.raises(RuntimeError, match="share one place in memory"):
        there.expand(2, 3).copy_(torch.ones(2, 3))
    assert there.cpu().tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5)])
def test_a_copy_of_nothing_does_nothing(shape: tuple[int, ...]) -> None:
    here, there = torch.empty(shape), torch.empty(shape, dtype=torch.int16, device="opencl")
    assert there.copy_(here).shape == here.copy_(there).shape == there.clone().shape == shape


@pytest.mark.parametrize("seed", range(40))
def test_memory_that_overlaps_is_read_before_it_is_written(seed: int) -> None:
    print(f"repeat: pytest -k 'overlaps and [{seed}]'")
    dice = random.Random(seed)
    whole = torch.arange(100, dtype=dice.choice([torch.int32, torch.float64, torch.bfloat16]))
    there = whole.to("opencl")
    shape = tuple(dice.choice([2, 3, 4]) for _ in range(2))
    ways = [
        (dice.choice([(shape[1], 1), (1, shape[0]), (10, 2)]), dice.randint(0, 20))
        for _ in range(2)
    ]
    (to, start), (source, first) = ways
    expected = whole.clone()
    expected.as_strided(shape, to, start).copy_(whole.as_strided(shape, source, first))
    there.as_strided(shape, to, start).copy_(there.as_strided(shape, source, first))
    assert are_same(there, expected)


# -- order -----------------------------------------------------------------------------------------


def test_a_pageable_source_may_be_changed_at_once(gate: cl.UserEvent) -> None:
    here = torch.arange(1000.0)
    there = torch.empty(1000, device="opencl")
    there.copy_(here, non_blocking=True)
    here.zero_()
    del here
    open_gate(gate)
    assert there.cpu().equal(torch.arange(1000.0))


def test_a_pinned_source_is_kept_until_the_copy_is_done(gate: cl.UserEvent) -> None:
    here = torch.arange(1000.0).pin_memory()
    address = here.data_ptr()
    there = torch.empty(1000, device="opencl")
    there.copy_(here, non_blocking=True)
    del here
    other = torch.zeros(1000).pin_memory()
    assert other.data_ptr() != address
    open_gate(gate)
    assert there.cpu().equal(torch.arange(1000.0))


def test_a_copy_to_pinned_memory_does_not_wait(gate: cl.UserEvent) -> None:
    there = torch.ones(1000, device="opencl")
    plain, cast = (torch.zeros(1000, dtype=dtype).pin_memory() for dtype in (None, torch.int32))
    plain.copy_(there, non_blocking=True)
    cast.copy_(there, non_blocking=True)
    assert not plain.any()
    assert not cast.any()
    open_gate(gate)
    torch.opencl.synchronize()
    assert plain.sum() == cast.sum() == 1000


def test_a_copy_to_pageable_memory_is_complete_on_return(gate: cl.UserEvent) -> None:
    there = torch.ones(1000, device="opencl")
    here = torch.zeros(1000)
    opener = threading.Thread(target=open_gate, args=(gate,))
    opener.start()
    here.copy_(there, non_blocking=True)
    assert here.sum() == 1000
    opener.join()


def test_a_copy_is_on_the_current_stream() -> None:
    """The default stream is held: a copy on another one ends nevertheless."""

    def copy_there_and_back() -> list[int]:
        return torch.arange(10.0).to("opencl").to(torch.int32).cpu().tolist()

    with torch.Stream("opencl"):
        first = copy_there_and_back()  # a region that is new waits for the default stream
        with held() as gate:
            assert copy_there_and_back() == first == list(range(10))
            assert gate.command_execution_status != cl.command_execution_status.COMPLETE


def test_a_lack_of_memory_for_a_temporary_is_told_as_pytorch_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = torch.zeros(4, 6, device="opencl").t()

    def refuse(*_given: object) -> None:
        raise bfc.OutOfMemoryError(96, 0, 0, 0, 0)

    monkeypatch.setattr(opencl_stream.OpenCLCopyStream, "temporary", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        there.copy_(torch.ones(6, 4))
    monkeypatch.undo()
    assert not there.cpu().any()


TWO_DEVICES = """
import pocl
pocl.start()
import pyopencl as cl
import torch
from bfc.integrations import torch_opencl

device = pocl.devices()[0]
contexts = [cl.Context([device]), cl.Context([device])]
torch_opencl.enable("64 MiB", devices=contexts)
queues = [torch.opencl.pool(index).sub_allocator.queue for index in (0, 1)]
for source_dtype in (torch.float32, torch.bfloat16, torch.complex64):
    for dtype in (torch.float32, torch.int16):
        here = torch.arange(24.0).to(source_dtype).view(4, 6)
        first = here.to("opencl:0")
        second = torch.zeros(6, 4, dtype=dtype, device="opencl:1")
        second.t().copy_(first, non_blocking=True)
        first.zero_()
        assert second.cpu().equal(here.to(dtype).t()), (source_dtype, dtype)
        assert second.device.index == 1 and second.to("opencl:0").cpu().equal(second.cpu())
print("copied between", torch.opencl.device_count())
"""


def test_tensors_are_copied_between_two_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "copied between 2\n", done.stderr
