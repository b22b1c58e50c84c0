"""More made-up trainings whose sizes vary. Those of `LATER` were first served when most rules of
plans were done; the rule of evaluations between trainings was changed after that.

`RUNS` has them by name, as `bench.lengths` does.
"""

from __future__ import annotations

from collections.abc import Callable

import bfc
from bench.lengths import ITERATIONS, LAYERS, WIDTH, WORDS, Run

EXPERTS, LONGEST = 8, 1024
MIB = 1 << 20
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


def training_step(
    run: Run, saved: list[int], works: list[int], layers: int, state: list[int]
) -> None:
    """A training's: a block that stays for each layer, and one for its computation."""
    kept = []
    for size, work in zip(saved, works, strict=True):
        scratch = run.ask(work)
        kept.append(run.ask(size))
        run.free(scratch)
    run.backward(kept)
    gradients = [run.ask(8 * MIB) for _ in range(layers)]
    if not state:
        state += [run.ask(16 * MIB) for _ in range(layers)]
    for block in gradients:
        run.free(block)


def heavy_tailed(seed: int) -> bfc.Trace:
    """Few batches are very long."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(3, 8)
    power = dice.choice([1.2, 1.6, 2.5])
    for _ in range(layers):
        run.ask(8 * MIB)
    for _ in range(40):
        run.begin()
        length = min(4096, int(48 * dice.paretovariate(power)))
        words = run.ask(64 * length)
        sizes = [16384 * length, 64 * length * length, 65536 * length]
        training_step(run, sizes * layers, [1, 128 * length * length, 1] * layers, layers, state)
        run.free(words)
    return run.trace()


def shrinking(seed: int) -> bfc.Trace:
    """Batches become shorter."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(3, 8)
    length = dice.randint(400, 800)
    for _ in range(layers):
        run.ask(8 * MIB)
    for _ in range(40):
        run.begin()
        length = max(16, int(length * dice.uniform(0.85, 1.01)))
        words = run.ask(64 * length)
        sizes = [16384 * length, 65536 * length, 128 * length * length]
        training_step(run, sizes * layers, [1, 32768 * length, 1] * layers, layers, state)
        run.free(words)
    return run.trace()


def sampled(seed: int) -> bfc.Trace:
    """Graphs, with as many neighbours as nobody knows before."""
    run = Run(seed)
    dice, hops = run.dice, run.dice.randint(2, 4)
    run.ask(dice.randint(10, 80) * MIB)
    for _ in range(30):
        run.begin()
        nodes = [512]
        for _ in range(hops):
            more = int(nodes[-1] * dice.uniform(1.5, 5) * (1 + 0.3 * dice.paretovariate(3)))
            nodes.append(min(more, 400_000))
        edges = [run.ask(16 * count) for count in nodes[1:]]
        features, saved = run.ask(512 * nodes[-1]), []
        for number in range(hops, 0, -1):
            gathered = run.ask(512 * nodes[number])
            saved += [run.ask(512 * nodes[number - 1]) for _ in range(2)]
            run.free(gathered)
        run.backward(saved)
        for block in (*edges, features):
            run.free(block)
    return run.trace()


def mixed(seed: int) -> bfc.Trace:
    """Training, evaluation, and sentences that grow word by word, in any order."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(2, 8)
    for _ in range(layers):
        run.ask(8 * MIB)
    chances = [1, dice.random(), dice.random()]
    for number in range(36):
        [kind] = dice.choices(["train", "evaluate", "write"], chances if number > 2 else [1, 0, 0])
        run.begin(kind)
        length = 8 * dice.randint(64, 512)
        if kind == "write":
            caches = [run.ask(8192 * length) for _ in range(layers)]
            for more in range(dice.randint(10, 40)):
                for layer, cache in enumerate(caches):
                    caches[layer] = run.ask(8192 * (length + 8 * more))
                    run.free(cache)
            for block in caches:
                run.free(block)
            continue
        words = run.ask(8 * length)
        if kind == "train":
            sizes = [2048 * length, 6144 * length, 8192 * length]
            training_step(run, sizes * layers, [1, 4096 * length, 1] * layers, layers, state)
        else:
            for size in (2048, 8192, 2048) * layers + (16000,):
                run.free(run.ask(size * length))
        run.free(words)
    return run.trace()


def recursive(seed: int) -> bfc.Trace:
    """Trees: as many requests as each has branches."""
    run, state = Run(seed), list[int]()
    for _ in range(4):
        run.ask(16 * MIB)
    for _ in range(30):
        run.begin()
        sizes = [run.dice.randint(1, 64) << 16 for _ in range(run.dice.randint(20, 120))]
        training_step(run, sizes, [2 * size for size in sizes], 4, state)
    return run.trace()


def accumulating(seed: int) -> bfc.Trace:
    """Batches are added up, more of them after a while; the optimizer has no state at first."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(2, 8)
    width, lazily = 256 * dice.randint(1, 4), dice.randint(0, 3)
    weights = [run.ask(24 * width * width) for _ in range(layers)]
    batches = dice.randint(1, 3)
    for number in range(30):
        run.begin()
        batches += number > 6 and dice.random() < 0.06
        gradients = list[int]()
        for batch in range(batches):
            tokens = 8 * dice.randint(64, 384)
            words, kept = run.ask(8 * tokens), list[int]()
            for _ in range(layers):
                scratch = run.ask(8 * tokens * width)
                kept += [run.ask(2 * tokens * width), run.ask(6 * tokens * width)]
                run.free(scratch)
            run.backward(kept)
            made = [run.ask(24 * width * width) for _ in weights]
            if batch:
                for block in made:
                    run.free(block)
            else:
                gradients = made
            run.free(words)
        if number >= lazily and not state:
            state += [run.ask(48 * width * width) for _ in weights]
        for block in gradients:
            run.free(block)
    return run.trace()


def routed(seed: int) -> bfc.Trace:
    """Experts, to which each layer sends so many tokens as nobody knows before."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(2, 6)
    width, experts = 256 * dice.randint(1, 3), dice.choice([4, 8, 16])
    even = dice.choice([4, 16, 64])
    for _ in range(layers):
        run.ask(16 * experts * width * width)
    fixed = dice.random() < 0.5
    for _ in range(30):
        run.begin()
        tokens = 2048 if fixed else 8 * dice.randint(64, 384)
        words, kept = run.ask(8 * tokens), list[int]()
        for _ in range(layers):
            shares = [dice.gammavariate(even, 1) for _ in range(experts)]
            kept.append(run.ask(2 * tokens * width))
            for share in shares:
                its = int(2 * tokens * share / sum(shares)) + 1
                kept += [run.ask(2 * its * width), run.ask(8 * its * width)]
            kept.append(run.ask(4 * tokens * width))
        run.backward(kept)
        gradients = [run.ask(8 * experts * width * width) for _ in range(layers)]
        state = state or [run.ask(16 * experts * width * width) for _ in range(layers)]
        for block in (*gradients, words):
            run.free(block)
    return run.trace()


def sharded(seed: int) -> bfc.Trace:
    """Weights come on a second stream, and gradients leave on a third."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(3, 8)
    weights = dice.randint(4, 48) * MIB
    width = 512 * dice.randint(1, 4)
    loss = -1
    for _ in range(layers):
        run.ask(weights // 4)
    for _ in range(30):
        run.begin()
        tokens = 8 * dice.randint(64, 512)
        words, kept = run.ask(8 * tokens), list[list[int]]()
        for _ in range(layers):
            gathered = run.ask(weights, stream=1)
            scratch = run.ask(8 * tokens * width)
            kept.append([run.ask(times * tokens * width) for times in (2, 6, 8)])
            run.free(scratch)
            run.free(gathered)
        last, loss = loss, run.ask(4)
        if last >= 0:
            run.free(last)
        gradients = list[int]()
        for layer in reversed(kept):
            gathered = run.ask(weights, stream=1)
            run.backward(layer)
            gradients.append(run.ask(weights // 4, stream=2))
            run.free(gathered)
        state = state or [run.ask(weights // 2) for _ in range(layers)]
        for block in (*gradients, words):
            run.free(block)
    return run.trace()


def bucketed(seed: int) -> bfc.Trace:
    """Sentences of about the same length, as many as fit into a batch of some thousand words."""
    run, state = Run(seed), list[int]()
    dice, layers = run.dice, run.dice.randint(2, 7)
    width, room = 256 * dice.randint(1, 4), 1024 * dice.randint(2, 8)
    buckets = sorted(8 * dice.randint(4, 128) for _ in range(dice.randint(3, 9)))
    for _ in range(layers):
        run.ask(24 * width * width)
    for _ in range(36):
        run.begin()
        length = dice.choice(buckets)
        tokens = max(1, room // length) * length
        words, kept = run.ask(8 * tokens), list[int]()
        for _ in range(layers):
            scratch = run.ask(16 * tokens * length)
            kept += [run.ask(8 * tokens * length), run.ask(2 * tokens * width)]
            run.free(scratch)
            kept.append(run.ask(8 * tokens * width))
        run.free(run.ask(2 * tokens * 32000))
        run.backward(kept)
        gradients = [run.ask(24 * width * width) for _ in range(layers)]
        state = state or [run.ask(48 * width * width) for _ in range(layers)]
        for block in (*gradients, words):
            run.free(block)
    return run.trace()


def detecting(seed: int) -> bfc.Trace:
    """Pictures of several sizes with some boxes in each; after each tenth they are counted."""
    run, state = Run(seed), list[int]()
    dice, depth = run.dice, run.dice.randint(3, 6)
    channels = [32 << min(level, 4) for level in range(depth)]
    for each in channels:
        run.ask(36 * each * each)
    for number in range(30):
        phases = ["train"] + (["count"] * dice.randint(1, 4) if number % 10 == 9 else [])
        for phase in phases:
            run.begin(phase)
            high, wide = 32 * dice.randint(8, 20), 32 * dice.randint(8, 20)
            picture, kept = run.ask(12 * high * wide), list[int]()
            for level, each in enumerate(channels):
                area = 4 * each * (high >> level) * (wide >> level)
                scratch = run.ask(2 * area)
                made = [run.ask(area), run.ask(area)]
                run.free(scratch)
                kept += made if phase == "train" else []
                for block in made if phase == "count" else []:
                    run.free(block)
            boxes = [run.ask(4096 * dice.randint(1, 500)) for _ in range(dice.randint(1, 12))]
            if phase == "train":
                run.backward(boxes)
                run.backward(kept)
                gradients = [run.ask(36 * each * each) for each in channels]
                state = state or [run.ask(72 * each * each) for each in channels]
                boxes = gradients
            for block in (*boxes, picture):
                run.free(block)
    return run.trace()


#: Programs whose depth and sizes come from the seed, too: another seed is another program.
PROGRAMS: dict[str, Callable[[int], bfc.Trace]] = {
    "heavy tails": heavy_tailed,
    "always shorter": shrinking,
    "sampled graphs": sampled,
    "mixes": mixed,
    "trees": recursive,
    "batches added up": accumulating,
    "routed tokens": routed,
    "three streams": sharded,
    "buckets": bucketed,
    "detection": detecting,
}
