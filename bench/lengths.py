"""Made-up trainings whose sizes vary from one iteration to the next, in the ways in which they do.

`RUNS` has them by name. Each makes a trace with marks from a seed: the same seed gives the same
run. The sizes are those of PyTorch's operators where a batch is `sentences` x `length` tokens of
`WIDTH` numbers, or images, or sampled nodes of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import bfc

ITERATIONS = 30
LAYERS, WIDTH, HEADS, WORDS = 6, 1024, 8, 32000
WEIGHTS = 24 * WIDTH * WIDTH
CHANNELS = (64, 64, 128, 128, 256, 256, 512, 512)

#: The sentences of a batch and the length of each.
Batch = Callable[[random.Random], tuple[int, int]]


class Run:
    """The events of a run, as they come."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ops: list[int] = []
        self.ids: list[int] = []
        self.sizes: list[int] = []
        self.streams: list[int] = []
        self.marks: list[list[object]] = []
        self._of: list[tuple[int, int]] = []  # size and stream of each block

    def ask(self, size: float, stream: int = 0) -> int:
        self._of.append((max(int(size), 1), stream))
        self._add(0, len(self._of) - 1, *self._of[-1])
        return len(self._of) - 1

    def free(self, block: int) -> None:
        self._add(1, block, 0, self._of[block][1])

    def backward(self, saved: list[int]) -> None:
        """For each block that was saved, the last one first, a gradient of its size."""
        for block in reversed(saved):
            gradient = self.ask(self._of[block][0])
            self.free(block)
            self.free(gradient)

    def begin(self, kind: str = "train") -> None:
        self.marks.append([len(self.ops), kind])

    def trace(self) -> bfc.Trace:
        meta = {"marks": self.marks}
        return bfc.Trace(self.ops, self.ids, self.sizes, self.streams, meta=meta)

    def _add(self, *event: int) -> None:
        for column, value in zip(
            (self.ops, self.ids, self.sizes, self.streams), event, strict=True
        ):
            column.append(value)


def language(
    seed: int,
    batch: Batch,
    *,
    batches: int = 1,
    block: int = 0,
    chunk: int = 0,
    sharded: bool = False,
) -> bfc.Trace:
    """A language model. An iteration has so many `batches`; attention keeps whole matrices, or
    works in blocks of `block` tokens; the loss is computed at once, or in pieces of `chunk` tokens;
    of a sharded model the weights come on a second stream, and gradients leave on a third."""
    run = Run(seed)
    for size in [WEIGHTS] * LAYERS + [2 * WORDS * WIDTH]:
        run.ask(size)
    loss, state = -1, list[int]()
    for _ in range(ITERATIONS):
        run.begin()
        gradients: list[int] = []
        for number in range(batches):
            sentences, length = batch(run.dice)
            inputs = [run.ask(8 * sentences * length), run.ask(sentences * length)]
            inputs.append(run.ask(2 * sentences * length * WIDTH))
            saved = [_layer(run, sentences, length, block, sharded) for _ in range(LAYERS)]
            last, loss = loss, _loss(run, sentences, length, chunk)
            if last >= 0:
                run.free(last)
            for layer in reversed(saved):
                weights = run.ask(WEIGHTS, stream=1) if sharded else -1
                run.backward(layer)
                gradient = run.ask(WEIGHTS / 4, stream=2) if sharded else run.ask(WEIGHTS)
                if sharded:
                    run.free(weights)
                if number == 0:
                    gradients.append(gradient)
                else:
                    run.free(gradient)
            for one in reversed(inputs):
                run.free(one)
        state = state or [run.ask(2 * WEIGHTS) for _ in range(LAYERS)]
        for gradient in gradients:
            run.free(gradient)
    return run.trace()


def _layer(run: Run, sentences: int, length: int, block: int, sharded: bool) -> list[int]:
    """What a layer saves for the backward pass."""
    hidden = 2 * sentences * length * WIDTH
    weights = run.ask(WEIGHTS, stream=1) if sharded else -1
    saved = [run.ask(hidden), run.ask(3 * hidden)]
    if block:
        blocks = _rounded(length, block)
        saved.append(run.ask(4 * sentences * HEADS * blocks))
        run.free(run.ask(128 * sentences * HEADS * blocks))
    else:
        scores = run.ask(2 * sentences * HEADS * length * length)
        saved.append(run.ask(2 * sentences * HEADS * length * length))
        run.free(scores)
    saved += [run.ask(times * hidden) for times in (1, 4, 4, 1)]
    if sharded:
        run.free(weights)
    return saved


def _loss(run: Run, sentences: int, length: int, chunk: int) -> int:
    for begin in range(0, length, chunk or length):
        tokens = sentences * min(chunk or length, length - begin)
        logits, wide = run.ask(2 * tokens * WORDS), run.ask(4 * tokens * WORDS)
        run.free(logits)
        run.free(wide)
    return run.ask(4)


def vision(seed: int, images: Callable[[random.Random], tuple[int, int]]) -> bfc.Trace:
    """A convolutional network on eight images of a height and a width."""
    run = Run(seed)
    for channels in CHANNELS:
        run.ask(36 * channels * channels)
    state: list[int] = []
    for _ in range(ITERATIONS):
        run.begin()
        high, wide = images(run.dice)
        inputs, saved = run.ask(96 * high * wide), []
        for number, channels in enumerate(CHANNELS):
            if number % 2 == 0:
                high, wide = (high + 1) // 2, (wide + 1) // 2
            workspace = run.ask(16 * channels * high * wide)
            saved.append(run.ask(32 * channels * high * wide))
            run.free(workspace)
            saved += [run.ask(32 * channels * high * wide) for _ in range(2)]
        loss = run.ask(4)
        run.backward(saved)
        gradients = [run.ask(36 * channels * channels) for channels in CHANNELS]
        state = state or [run.ask(72 * channels * channels) for channels in CHANNELS]
        for block in (*gradients, loss, inputs):
            run.free(block)
    return run.trace()


def sampled_graph(seed: int) -> bfc.Trace:
    """Three rounds of neighbours of 1024 nodes, of which some are met twice."""
    run = Run(seed)
    run.ask(50 << 20)
    for _ in range(ITERATIONS + 10):
        run.begin()
        nodes = [1024]
        for _ in range(3):
            nodes.append(int(5 * nodes[-1] * run.dice.uniform(0.6, 0.95)))
        edges = [run.ask(16 * count) for count in nodes[1:]]
        features, saved = run.ask(1024 * nodes[-1]), []
        for number in (3, 2, 1):
            gathered = run.ask(1024 * nodes[number])
            saved += [run.ask(1024 * nodes[number - 1]) for _ in range(2)]
            run.free(gathered)
        run.backward(saved)
        for block in (run.ask(2 << 20), *edges, features):
            run.free(block)
    return run.trace()


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _tokens(dice: random.Random) -> tuple[int, int]:
    """As many sentences as 4096 tokens are."""
    length = dice.randint(64, 512)
    return 4096 // length, length


def _square(dice: random.Random) -> tuple[int, int]:
    side = 32 * dice.randint(6, 16)
    return side, side


#: By name: what varies.
RUNS: dict[str, Callable[[int], bfc.Trace]] = {
    "length": lambda seed: language(seed, lambda dice: (8, dice.randint(64, 512))),
    "length, padded": lambda seed: language(
        seed, lambda dice: (8, _rounded(dice.randint(64, 512), 64))
    ),
    "length, blocks of 128": lambda seed: language(
        seed, lambda dice: (8, dice.randint(64, 1024)), block=128
    ),
    "length, 4096 tokens": lambda seed: language(seed, _tokens),
    "length and sentences": lambda seed: language(
        seed, lambda dice: (dice.randint(2, 8), dice.randint(64, 512))
    ),
    "lengths of four batches": lambda seed: language(
        seed, lambda dice: (4, dice.randint(64, 512)), batches=4
    ),
    "length, loss in chunks": lambda seed: language(
        seed, lambda dice: (4, dice.randint(64, 1024)), block=128, chunk=256
    ),
    "length, three streams": lambda seed: language(
        seed, lambda dice: (8, dice.randint(64, 512)), sharded=True
    ),
    "padded, blocks, streams": lambda seed: language(
        seed, lambda dice: (8, _rounded(dice.randint(64, 1024), 64)), block=128, sharded=True
    ),
    "side": lambda seed: vision(seed, _square),
    "height and width": lambda seed: vision(
        seed, lambda dice: (32 * dice.randint(6, 16), 32 * dice.randint(6, 16))
    ),
    "sampled nodes": sampled_graph,
}
