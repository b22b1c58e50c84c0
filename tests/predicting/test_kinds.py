"""What the report takes memory for, where the stacks are those of a real program of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bfc
from bfc_tools.browser.kinds import KINDS, kinds_of
from bfc_tools.browser.lifetimes import lives_of

WIDTH, WORDS, BATCH, LENGTH = 256, 1000, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Sequential):
    def __init__(self) -> None:
        blocks = (Block() for _ in range(3))
        super().__init__(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def most_of_each_kind(trace: bfc.Trace) -> dict[str, int]:
    """The most bytes that each kind has at once."""
    lives = lives_of(trace)
    kinds, _said = kinds_of(trace, lives)
    found = {}
    for number, kind in enumerate(KINDS):
        chosen = kinds == number
        size = trace.size[lives.born[chosen]].astype(np.int64)
        died = lives.died[chosen]
        change = np.zeros(len(trace) + 1, np.int64)
        np.add.at(change, lives.born[chosen], size)
        np.add.at(change, died[died >= 0], -size[died >= 0])
        found[kind] = int(change.cumsum().max())
    return found


@pytest.mark.parametrize("states", [0, 1, 2])
def test_weights_and_states_are_told_to_the_byte(states: int) -> None:
    """Of plain SGD, of SGD with momentum, and of AdamW, which keeps two numbers for each weight."""
    with bfc.predict("h100") as run:
        model = Net().cuda()
        weights = sum(weight.nbytes for weight in model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        if states < 2:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * states)
        for _ in range(3):
            words = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = most_of_each_kind(run.trace)
    assert (found["weights"], found["optimizer state"]) == (weights, states * weights)
    assert found["gradients"] >= weights  # those of activations that are kept for a while, too
    for_backward = BATCH * LENGTH * 4 * WIDTH * 4  # what the second layer of each block gets
    assert found["activations"] >= 3 * for_backward
    assert found["other"] <= 2 * words.nbytes
