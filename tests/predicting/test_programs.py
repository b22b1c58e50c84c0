"""Programs with no recording behind them: what must hold of any prediction."""

from __future__ import annotations

import gc
from typing import Any

import prediction_programs as programs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor

import bfc

BLOCK = 512


def rounded(nbytes: int) -> int:
    """The bytes of a block of the allocator."""
    return -(-nbytes // BLOCK) * BLOCK


def reachable() -> int:
    """What the tensors take on the device that Python can reach, each storage once."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if isinstance(one, FakeTensor) and one.fake_device.type == "cuda":
            storage = one.untyped_storage()
            found[storage._cdata] = rounded(storage.nbytes())
    return sum(found.values())


def kept(run: Any) -> int:
    """The workspaces that stay."""
    return sum(rounded(one.nbytes) for one in run._memory.kept.values())


def bytes_of(tensors: Any) -> int:
    return sum(rounded(one.numel() * one.element_size()) for one in tensors)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_training(name: str) -> None:
    make, data, optimizer_of, states, dtype = programs.PROGRAMS[name]
    peaks = []
    with bfc.predict("a100") as run:
        model = make().cuda()
        optimizer = optimizer_of(model.parameters())
        for _ in range(3):
            programs.step(model, data(), optimizer, dtype)
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            # between steps no graph is alive: what lives is what Python can reach
            assert torch.cuda.memory_allocated() == reachable() + kept(run)
        parameters = list(model.parameters())
        assert peaks[1] == peaks[2] >= (2 + states) * bytes_of(parameters)
        del model, optimizer, parameters
        gc.collect()
        assert torch.cuda.memory_allocated() == kept(run)
    replay = run.trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB")))
    assert (replay.failed, replay.peak_bytes_reserved) == (0, run.peak_reserved)
    assert ("aten::convolution" in run.unknown) == (name in ("resnet", "unet", "vit"))
    assert ("aten::_cudnn_rnn" in run.unknown) == (name == "lstm")


# -- random programs of a few operators ---------------------------------------------------------

SIZES = st.sampled_from([1, 3, 64, 200, 1000])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), SIZES, SIZES),
        *(
            st.tuples(st.just(name), st.integers(0, 9), st.integers(0, 9))
            for name in ("view", "add", "matmul", "relu_", "sum", "half", "cat", "pick", "drop")
        ),
        st.tuples(st.just("resize"), st.integers(0, 9), SIZES),
    ),
    max_size=25,
)


def take(step: tuple[str, int, int], held: list[torch.Tensor]) -> None:
    """One step of a program; what does not fit does nothing."""
    name, a, b = step
    if name == "new":
        held.append(torch.empty(a, b, device="cuda"))
        return
    if not held:
        return
    one, other = held[a % len(held)], held[b % len(held)]
    if name == "drop":
        del held[a % len(held)]
    elif name == "relu_":
        torch.relu_(one)
    elif name == "view":
        held.append(one[b % max(len(one), 1) :].t())
    elif name == "half":
        held.append(one.half().float())
    elif name == "sum":
        held.append(one.sum(b % 2, keepdim=True))
    elif name == "pick":
        held.append(one[torch.zeros(b, dtype=torch.int64, device="cuda")] if len(one) else one)
    elif name == "resize":
        held.append(torch.empty(0, device="cuda").resize_(b, b))
    elif name == "matmul" and one.shape[1] == other.shape[0]:
        held.append(one @ other)
    elif name == "add" and one.shape == other.shape:
        held.append(one + other)
    elif name == "cat" and one.shape[1] == other.shape[1]:
        held.append(torch.cat([one, other]))


def requested() -> int:
    """The bytes of what lives: a block may be larger, if what is left of it is too small to be
    one."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@settings(max_examples=25)
@given(steps=STEPS)
@example(steps=[("new", 1000, 1000), ("matmul", 0, 0), ("matmul", 0, 0)])  # which has such a block
def test_what_lives_is_what_can_be_reached(steps: list[tuple[str, int, int]]) -> None:
    held: list[torch.Tensor] = []
    with bfc.predict("a100") as run, torch.no_grad():
        for step in steps:
            take(step, held)
            storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in held}
            alive = sum(one.nbytes() for one in storages.values())
            del storages
            assert requested() == alive + sum(one.nbytes for one in run._memory.kept.values())
        held.clear()
        assert torch.cuda.memory_allocated() == kept(run)
    assert (
        len(run.trace.op)
        == run.trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"))).events
    )
