"""A training of a small transformer, as far as its memory goes: no GPU is needed, and no number is
computed. `bfc demo` records what it allocates, with owners and lines.
"""

from __future__ import annotations

import random
from pathlib import Path

import bfc

LAYERS, WIDTH, VOCABULARY, BATCH = 12, 2048, 32_000, 8
COPIES = 7  # the handle of a stream that brings the batches
KIB, MIB = 1 << 10, 1 << 20


class Layer:
    def __init__(self, gpu: bfc.CachingAllocator) -> None:
        self.gpu = gpu
        with bfc.owner("weights"):
            self.weights = [gpu.allocate(2 * rows * WIDTH * WIDTH) for rows in (3, 1, 4, 4)]

    def attention(self, tokens: int) -> list[bfc.Buffer]:
        heads = self.gpu.allocate(3 * 2 * BATCH * tokens * WIDTH)
        scores = self.gpu.allocate(2 * BATCH * 16 * tokens * tokens)
        return [heads, scores]

    def feed_forward(self, tokens: int) -> list[bfc.Buffer]:
        hidden = self.gpu.allocate(4 * 2 * BATCH * tokens * WIDTH)
        workspace = self.gpu.allocate(8 * MIB)  # freed at the end of the call
        del workspace
        return [hidden, self.gpu.allocate(2 * BATCH * tokens * WIDTH)]

    def forward(self, tokens: int) -> list[bfc.Buffer]:
        with bfc.owner("activations"):
            return self.attention(tokens) + self.feed_forward(tokens)

    def backward(self, saved: list[bfc.Buffer]) -> list[bfc.Buffer]:
        gradients = []
        for weight in reversed(self.weights):
            with bfc.owner("gradients"):
                gradients.append(self.gpu.allocate(weight.nbytes))
            with bfc.owner("activations"):
                passed_on = self.gpu.allocate(saved[-1].nbytes)
            if saved:
                saved.pop().free()
            passed_on.free()
        return gradients


class Adam:
    def __init__(self, gpu: bfc.CachingAllocator) -> None:
        self.gpu = gpu
        self.moments: list[bfc.Buffer] = []

    def step(self, layers: list[Layer]) -> None:
        with bfc.owner("optimizer"):
            for weight in [weight for layer in layers for weight in layer.weights]:
                if len(self.moments) < 2 * 4 * LAYERS:
                    self.moments += [self.gpu.allocate(weight.nbytes) for _ in range(2)]
                self.gpu.allocate(2 * weight.nbytes).free()  # the update


def load_batch(gpu: bfc.CachingAllocator, tokens: int) -> bfc.Buffer:
    with bfc.use_stream(COPIES), bfc.owner("batches"):
        return gpu.allocate(8 * BATCH * tokens + 256 * KIB * 6)


def loss(gpu: bfc.CachingAllocator, tokens: int) -> None:
    with bfc.owner("logits"):
        logits = gpu.allocate(2 * BATCH * tokens * VOCABULARY)
        gpu.allocate(logits.nbytes).free()  # the softmax


def generate(gpu: bfc.CachingAllocator) -> list[bfc.Buffer]:
    """Some text: each layer's cache grows, and is copied into a larger block."""
    with bfc.owner("kv cache"):
        caches = [gpu.allocate(4 * MIB) for _ in range(LAYERS)]
        for length in range(2, 6):
            for at in range(LAYERS):
                caches[at] = gpu.allocate(4 * MIB * length)
    return caches


def train(gpu: bfc.CachingAllocator, steps: int = 12) -> None:
    chosen = random.Random(0)
    layers, adam = [Layer(gpu) for _ in range(LAYERS)], Adam(gpu)
    history, caches = [], []
    for number in range(steps):
        tokens = chosen.choice([256, 384, 512, 640, 768])
        batch = load_batch(gpu, tokens)
        saved = [layer.forward(tokens) for layer in layers]
        loss(gpu, tokens)
        gradients = [layer.backward(saved.pop()) for layer in reversed(layers)]
        adam.step(layers)
        with bfc.owner("metrics"):
            history.append(gpu.allocate(700 * KIB))  # never freed: the leak to find
        if number % 4 == 2:
            caches = generate(gpu)
        del batch, gradients
    del caches


def record(path: Path) -> None:
    """Trains on a simulated GPU of 24 GiB, and writes a memory snapshot in PyTorch's format."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("24 GiB")) as gpu:
        gpu.record_history(context="all")
        train(gpu)
        gpu.dump(path)
