"""Models train on opencl to the losses of the CPU, step by step, and leave no memory behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

STEPS = 20
#: How far a step's loss may be from the CPU's, relative to it.
MOST = 1e-6

Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], torch.Tensor]]


def mlp(device: str) -> Made:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True).to(device)
    x = x.to(device)
    model.to(device)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        lambda model: ((model(x) - target) ** 2).mean(),
    )


def cnn(device: str) -> Made:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    ).to(device)
    x = torch.randn(16, 1, 14, 14).to(device)
    target = torch.randint(0, 10, (16,)).to(device)
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        lambda model: nn.functional.cross_entropy(model(x), target),
    )


class Transformer(nn.Module):
    """Learns the next of some words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.layers(self.words(text), mask=ahead, is_causal=True))


def transformer(device: str) -> Made:
    model = Transformer().to(device)
    text = torch.randint(0, 20, (4, 13)).to(device)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda model: nn.functional.cross_entropy(
            model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        ),
    )


def losses(make: Callable[[str], Made], device: str) -> list[float]:
    torch.manual_seed(0)
    model, optimizer, loss_of = make(device)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_losses_are_those_of_the_cpu(nothing_left: None, make: Callable[[str], Made]) -> None:
    expected = losses(make, "cpu")
    found = losses(make, "opencl")
    apart = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    print(f"{make.__name__}: {expected[0]:.6f} to {expected[-1]:.6f}, at most {apart:.1e} apart")
    assert expected[-1] < 0.9 * expected[0], "it learns nothing"
    assert apart <= MOST


def test_no_byte_is_left(opencl: torch.device) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model, optimizer, loss_of = cnn("opencl")
    loss_of(model).backward()
    optimizer.step()
    held = torch.accelerator.memory_allocated() - before
    assert held >= 4 * sum(each.nelement() * each.element_size() for each in model.parameters())
    twin = copy.deepcopy(model)
    assert torch.accelerator.memory_allocated() > before + held
    del model, optimizer, loss_of, twin
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_a_model_trains_on_a_planned_pool(nothing_left: None) -> None:
    """Every tensor of the later steps has a place in the plan of the first ones."""
    pool = torch.opencl.pool()
    model, optimizer, loss_of = mlp("opencl")

    def train(steps: int) -> None:
        for _ in range(steps):
            with pool.step("train"):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()

    train(2)
    with pool.record_plan() as recording:
        train(5)
    pool.use_plan(recording.plan(), strict=True, gate=None)  # it is small: segments are larger
    train(5)
    stats = pool.plan_stats()
    pool.use_plan(None)
    assert stats["agreement"] > 0.95
    assert stats["hits"] > 100
    assert pool.check() is None
