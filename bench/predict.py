"""What a prediction costs: an operator of a small model, and a step of one with 7 billion weights.

It needs PyTorch. `python -m bench.predict` runs each in a process of its own, and prints seconds of
the processor, and the most host memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import bfc


def model_of(width: int, inner: int, layers: int, vocabulary: int) -> object:
    """A decoder as Llama's: RMSNorm, attention, SwiGLU, no biases."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.out = (
                nn.Linear(width, width, bias=False) for _ in range(4)
            )
            self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x)
            q, k, v = (
                one(y).unflatten(-1, (-1, 128)).transpose(1, 2) for one in (self.q, self.k, self.v)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            y = self.norm2(x)
            return x + self.down(functional.silu(self.up(y)) * self.gate(y))

    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Block() for _ in range(layers)),
        nn.RMSNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )


def steps(model: object, count: int, context: int) -> None:
    """Trains a model, with AdamW."""
    import torch
    from torch.nn import functional

    assert isinstance(model, torch.nn.Module)
    model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(count):
        text = torch.randint(1000, (1, context + 1), device="cuda")
        scores = model(text[:, :-1])
        functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def operator() -> None:
    """Milliseconds of the processor for an operator, in five rounds."""

    with bfc.predict("h100") as run:
        steps(model_of(768, 3072, 12, 32_000), 1, 512)
        costs = []
        for _ in range(5):
            before, began = run.operators, time.process_time()
            steps(model_of(768, 3072, 12, 32_000), 1, 512)
            costs.append((time.process_time() - began) / (run.operators - before) * 1e3)
    print(
        f"an operator: {min(costs):.3f} / {statistics.median(costs):.3f} / {max(costs):.3f} ms of "
        f"the processor (min, median, max of {len(costs)})"
    )


def billions() -> None:
    """A step of a model with 7 billion parameters, and AdamW."""
    began, wall = time.process_time(), time.perf_counter()
    with bfc.predict("h200") as run:
        steps(model_of(4096, 11_008, 32, 32_000), 1, 2048)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"7B with AdamW, one step: {time.process_time() - began:.1f} s of the processor, "
        f"{time.perf_counter() - wall:.1f} s in all, {run.operators} operators, "
        f"{run.peak_reserved / 2**30:.2f} GiB reserved on the GPU, {kib / 2**20:.2f} GiB of host "
        "memory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("operator", "billions"))
    part = parser.parse_args().part
    if part == "operator":
        operator()
    elif part == "billions":
        billions()
    else:
        for name in ("operator", "billions"):
            subprocess.run([sys.executable, "-m", "bench.predict", name], check=True)


if __name__ == "__main__":
    main()
