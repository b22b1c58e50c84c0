"""Compiles a model with Inductor, and writes what its second and third step ask the allocator for:
`inductor_steps.py run|predict PROGRAM`, to standard output.

`run` runs PyTorch's own allocator, Inductor and Triton on the emulated driver, where kernels do
nothing. `predict` predicts the same program. Either prints `sizes`, by number of a block, and
`events`: the number of a block that is made, `~` of it where it is freed, or null where a block
from before is freed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import compiled_models

BEGIN = """
import torch, torch.nn as nn, torch.nn.functional as functional
import torch._functorch.config as config

def numbers(*size):
    return torch.randn(size, device="cuda")

def train(model, give, end=lambda: None):
    model = torch.compile(model)
    for step in range(3):
        if step == 1:
            begin()     # the first step compiles, and tunes kernels
        model(*give()).square().mean().backward()
        end()
"""
MLP = (
    compiled_models.MLP
    + """
train(nn.Sequential(*[Block(260) for _ in range(3)]).cuda(), lambda: [numbers(32, 260)])
"""
)
TRANSFORMER = (
    compiled_models.TRANSFORMER
    + """
train(nn.Sequential(*[Block(256) for _ in range(3)]).cuda(), lambda: [numbers(2, 64, 256)])
"""
)
GATES = """
class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        wide = self.up(x)
        return x + self.down(wide * torch.sigmoid(1.702 * wide) + wide.tanh())

train(nn.Sequential(Gate(256), Gate(256)).cuda(), lambda: [numbers(4096, 256)])
"""
WORDS = """
class Words(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.drop = nn.Embedding(512, width), nn.Dropout(0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512, bias=False)
    def forward(self, x, y):
        x = self.drop(self.words(x))
        x = self.norm(x + x.cumsum(1)).bfloat16().float()
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

model = Words(256).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def end():
    optimizer.step()
    optimizer.zero_grad()

train(model, lambda: [torch.randint(512, (8, 64), device="cuda") for _ in range(2)], end)
"""
HALVED = "config.activation_memory_budget = 0.5\n"
PROGRAMS = {
    "mlp": MLP,
    "transformer": TRANSFORMER,
    "transformer, half": HALVED + TRANSFORMER,
    "gates": GATES,
    "words": WORDS,
}


class Steps:
    """Numbers blocks as they are made."""

    def __init__(self) -> None:
        self.events: list[int | None] = []
        self.sizes: list[int] = []
        self._live: dict[Any, int] = {}

    def made(self, block: Any, size: int) -> None:
        self._live[block] = len(self.sizes)
        self.events.append(len(self.sizes))
        self.sizes.append(int(size))

    def freed(self, block: Any) -> None:
        number = self._live.pop(block, None)
        self.events.append(None if number is None else ~number)


def run(program: str) -> Steps:
    from bfc.testing import cuda_emulator
    from bfc_cuda_emulator.library import build

    cuda_emulator.load().reset(devices=1)
    os.environ["TRITON_LIBCUDA_PATH"] = str(build().parent)  # which asks ldconfig otherwise
    import torch

    def begin() -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1 << 20)

    exec(compile(BEGIN + program, "<program>", "exec"), {"begin": begin, "__name__": "__main__"})
    steps = Steps()
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            steps.made(entry["addr"], entry["size"])
        elif entry["action"] == "free_completed":
            steps.freed(entry["addr"])
    return steps


def predict(program: str) -> Steps:
    import bfc
    from bfc.trace.trace import ALLOCATE, FREE

    begun: list[int] = []
    with bfc.predict("h100", real_files=True) as prediction:
        history = prediction._memory.history
        names = {"begin": lambda: begun.append(len(history)), "__name__": "__main__"}
        exec(compile(BEGIN + program, "<program>", "exec"), names)
    steps = Steps()
    events = list(zip(history.op, history.id, history.size, strict=True))
    for op, block, size in events[begun[0] :]:
        if op == ALLOCATE:
            steps.made(block, size)
        elif op == FREE:
            steps.freed(block)
    return steps


if __name__ == "__main__":
    done = {"run": run, "predict": predict}[sys.argv[1]](PROGRAMS[sys.argv[2]])
    print(json.dumps({"events": done.events, "sizes": done.sizes}))
