"""More made-up trainings whose sizes vary. Those of `LATER` were first served when most rules of
plans were done; the rule of evaluations between trainings was changed after that.

`RUNS` has them by name, as `bench.lengths` does.
"""

from __future__ import annotations

from collections.abc import Callable

import bfc
from bench.lengths import ITERATIONS, LAYERS, WIDTH, WORDS, Run

EXPERTS, LONGEST = 8, 1024
WEIGHTS = 24 * WIDTH * WIDTH


def _weights(run: Run, layers: int = LAYERS, size: int = WEIGHTS) -> list[int]:
    return [run.ask(size) for _ in range(layers)]


def _attention(run: Run, tokens: int, longest: int, sentences: int) -> list[int]:
    """What a layer saves whose attention works in blocks of 128 tokens."""
    hidden = 2 * tokens * WIDTH
    blocks = -(-longest // 128) * 128
    saved = [run.ask(hidden), run.ask(3 * hidden), run.ask(32 * sentences * blocks)]
    run.free(run.ask(256 * sentences * blocks))
    saved.append(run.ask(hidden))
    return saved


def _network(run: Run, tokens: int) -> list[int]:
    return [run.ask(times * 2 * tokens * WIDTH) for times in (4, 4, 1)]


def _loss(run: Run, tokens: int) -> int:
    logits, wide = run.ask(2 * tokens * WORDS), run.ask(4 * tokens * WORDS)
    run.free(logits)
    run.free(wide)
    return run.ask(4)


def _finish(
    run: Run, loss: int, saved: list[list[int]], state: list[int], size: int = WEIGHTS
) -> None:
    """The backward pass from a loss, and the optimizer's step."""
    gradients = []
    for layer in reversed(saved):
        run.backward(layer)
        gradients.append(run.ask(size))
    if not state:
        state += [run.ask(2 * size) for _ in gradients]
    for block in (*gradients, loss):
        run.free(block)


def experts(seed: int) -> bfc.Trace:
    """Each layer sends its tokens to experts: so many to each as nobody knows before."""
    run, state = Run(seed), list[int]()
    _weights(run)
    for _ in range(ITERATIONS):
        run.begin()
        tokens = 8 * run.dice.randint(64, 512)
        inputs, saved = run.ask(8 * tokens), list[list[int]]()
        for _ in range(LAYERS):
            layer = _attention(run, tokens, tokens // 8, 8)
            shares = [run.dice.gammavariate(8, 1) for _ in range(EXPERTS)]
            for share in shares:
                its = int(2 * tokens * share / sum(shares)) + 1
                layer += [run.ask(2 * its * WIDTH), run.ask(8 * its * WIDTH)]
            saved.append([*layer, run.ask(2 * tokens * WIDTH)])
        _finish(run, _loss(run, tokens), saved, state)
        run.free(inputs)
    return run.trace()


def packed(seed: int) -> bfc.Trace:
    """Sentences stand one behind the other, as many as fit into 4096 tokens."""
    run, state = Run(seed), list[int]()
    _weights(run)
    for _ in range(ITERATIONS):
        run.begin()
        lengths = list[int]()
        while sum(lengths) <= 4096 - LONGEST:
            lengths.append(run.dice.randint(32, LONGEST))
        tokens = sum(lengths)
        inputs = [run.ask(8 * tokens), run.ask(4 * (len(lengths) + 1)), run.ask(2 * tokens * WIDTH)]
        saved = [
            _attention(run, tokens, max(lengths), len(lengths)) + _network(run, tokens)
            for _ in range(LAYERS)
        ]
        _finish(run, _loss(run, tokens), saved, state)
        for block in inputs:
            run.free(block)
    return run.trace()


def curriculum(seed: int) -> bfc.Trace:
    """Sentences grow longer while the model learns: each length is longer than all before."""
    run, state = Run(seed), list[int]()
    _weights(run)
    length = 64
    for _ in range(ITERATIONS):
        run.begin()
        length += run.dice.randint(0, 24)
        tokens = 8 * length
        inputs = run.ask(8 * tokens)
        saved = [_attention(run, tokens, length, 8) + _network(run, tokens) for _ in range(LAYERS)]
        _finish(run, _loss(run, tokens), saved, state)
        run.free(inputs)
    return run.trace()


def resolutions(seed: int) -> bfc.Trace:
    """A batch of six images, each of a size of its own, through one network."""
    run, state = Run(seed), list[int]()
    channels = (64, 128, 256, 512)
    weights = [run.ask(36 * each * each) for each in channels]
    for _ in range(ITERATIONS):
        run.begin()
        images = [(32 * run.dice.randint(4, 16), 32 * run.dice.randint(4, 16)) for _ in range(6)]
        inputs = [run.ask(12 * high * wide) for high, wide in images]
        saved = list[int]()
        for high, wide in images:
            for number, each in enumerate(channels):
                area = 4 * each * (high >> number) * (wide >> number)
                work = run.ask(2 * area)
                saved += [run.ask(area), run.ask(area)]
                run.free(work)
        loss = run.ask(4)
        run.backward(saved)
        gradients = [run.ask(36 * each * each) for each in channels]
        state = state or [run.ask(72 * each * each) for each in channels]
        for block in (*gradients, loss, *inputs):
            run.free(block)
    assert weights
    return run.trace()


def alternating(seed: int) -> bfc.Trace:
    """Two models in turn, each with batches of its own."""
    run = Run(seed)
    states: list[list[int]] = [[], []]
    _weights(run, 4)
    _weights(run, 3, WEIGHTS // 4)
    for number in range(2 * ITERATIONS):
        which = number % 2
        run.begin(("first", "second")[which])
        tokens = (8, 24)[which] * run.dice.randint(64, 512)
        inputs = run.ask(8 * tokens)
        layers, size = ((4, WEIGHTS), (3, WEIGHTS // 4))[which]
        saved = [_attention(run, tokens, tokens // 8, 8) for _ in range(layers)]
        if which == 0:
            for layer in saved:
                layer += _network(run, tokens)
        _finish(run, run.ask(4), saved, states[which], size)
        run.free(inputs)
    return run.trace()


def beams(seed: int) -> bfc.Trace:
    """Each batch of prompts is answered with beams that end one after the other."""
    run = Run(seed)
    _weights(run)
    for _ in range(ITERATIONS):
        run.begin("answer")
        length, width = run.dice.randint(64, 512), 16
        cache = [run.ask(4 * width * length * WIDTH) for _ in range(LAYERS)]
        for _ in range(40):
            length += 8
            width = max(1, width - (run.dice.random() < 0.3))
            for layer in range(LAYERS):
                work = run.ask(8 * width * WIDTH)
                grown = run.ask(4 * width * length * WIDTH)
                run.free(cache[layer])
                run.free(work)
                cache[layer] = grown
            run.free(run.ask(4 * width * WORDS))
        for block in cache:
            run.free(block)
    return run.trace()


def shallow(seed: int) -> bfc.Trace:
    """Layers are left out at random, and lengths vary."""
    run, state = Run(seed), list[int]()
    _weights(run, 2 * LAYERS)
    for _ in range(ITERATIONS):
        run.begin()
        tokens = 8 * run.dice.randint(64, 512)
        inputs = run.ask(8 * tokens)
        saved = [
            _attention(run, tokens, tokens // 8, 8) + _network(run, tokens)
            for _ in range(2 * LAYERS)
            if run.dice.random() < 0.9
        ]
        _finish(run, _loss(run, tokens), saved, state)
        run.free(inputs)
    return run.trace()


def evaluated(seed: int) -> bfc.Trace:
    """After each fifth iteration three evaluations, of lengths of their own."""
    run, state = Run(seed), list[int]()
    _weights(run)
    for number in range(ITERATIONS):
        run.begin()
        tokens = 8 * run.dice.randint(64, 512)
        inputs = run.ask(8 * tokens)
        saved = [
            _attention(run, tokens, tokens // 8, 8) + _network(run, tokens) for _ in range(LAYERS)
        ]
        _finish(run, _loss(run, tokens), saved, state)
        run.free(inputs)
        for _ in range(3 if number % 5 == 4 else 0):
            run.begin("evaluation")
            tokens = 32 * run.dice.randint(64, 400)
            inputs = run.ask(8 * tokens)
            for _ in range(LAYERS):
                for block in _attention(run, tokens, tokens // 32, 32) + _network(run, tokens):
                    run.free(block)
            run.free(_loss(run, tokens))
            run.free(inputs)
    return run.trace()


#: By name: what varies.
RUNS: dict[str, Callable[[int], bfc.Trace]] = {
    "tokens of experts": experts,
    "packed sentences": packed,
    "length, always longer": curriculum,
    "images of six sizes": resolutions,
    "two models in turn": alternating,
}
#: These were looked at when most rules were done.
LATER: dict[str, Callable[[int], bfc.Trace]] = {
    "beams that end": beams,
    "layers left out": shallow,
    "evaluations between": evaluated,
}
