"""Threads that allocate, train, run out of memory and raise in the middle, all at once: contents
stay what they were, every refusal is PyTorch's own error, and nothing is left."""

from __future__ import annotations

import random
import secrets
import threading
from typing import Any

import pytest
import torch

THREADS, STEPS, MOST_KEPT = 3, 80, 12


class Stumbles(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError(f"stumbled over {gradient.numel()}")


class Program:
    """What one thread does, by the seed alone. `kept` has tensors and what fills each."""

    def __init__(self, device: torch.device, seed: str) -> None:
        self.device, self.dice = device, random.Random(seed)
        self.kept: list[tuple[torch.Tensor, int]] = []

    def run(self) -> None:
        actions = [self.make, self.make, self.make, self.drop, self.drop, self.copy]
        actions += [self.train, self.stumble, self.run_out]
        for _ in range(STEPS):
            self.dice.choice(actions)()
        while self.kept:
            self.drop()

    def make(self) -> None:
        if len(self.kept) == MOST_KEPT:
            self.drop()
        size, value = self.dice.choice((1, 700, 5000, 300_000)), self.dice.randrange(1, 100)
        self.kept.append((torch.full((size,), value, device=self.device), value))

    def drop(self) -> None:
        """A tensor, once it has been read."""
        if self.kept:
            tensor, value = self.kept.pop(self.dice.randrange(len(self.kept)))
            assert bool((tensor.cpu() == value).all()), "another tensor was written over it"

    def copy(self) -> None:
        """Through pinned memory, and as a view."""
        if self.kept:
            tensor, value = self.dice.choice(self.kept)
            held = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
            held.copy_(tensor[:])
            self.kept.append((held.to(self.device), value))

    def train(self) -> None:
        weights = torch.ones(64, device=self.device, requires_grad=True)
        (weights * weights).sum().backward()
        assert bool((weights.grad.cpu() == 2).all())

    def stumble(self) -> None:
        weights = torch.ones(64, device=self.device, requires_grad=True)
        with pytest.raises(RuntimeError, match="stumbled over 64"):
            (Stumbles.apply(weights * 2) * 3).sum().backward()
        assert weights.grad is None

    def run_out(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device=self.device)


@pytest.mark.long
def test_threads_that_fail_in_the_middle_leave_nothing(
    opencl: torch.device, nothing_left: None
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    failed: list[BaseException] = []

    def play(number: int) -> None:
        try:
            Program(opencl, f"{seed} {number}").run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    torch.accelerator.synchronize()
