"""Plans beside the policy alone, on runs of kinds that no rule was made for."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest

import bfc
from bench.lengths import Run
from bench.plans import first_iterations, without_marks
from bench.repeated import caching, growing_bfc
from bfc.plans.trying import in_other_order

MIB = 1 << 20
MAKES = {"caching": caching, "bfc": growing_bfc}


def step(run: Run, saved: list[int], works: list[int], layers: int, state: list[int]) -> None:
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
        step(run, sizes * layers, [1, 128 * length * length, 1] * layers, layers, state)
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
        step(run, sizes * layers, [1, 32768 * length, 1] * layers, layers, state)
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


RUNS: list[Callable[[int], bfc.Trace]] = [heavy_tailed, shrinking, sampled]


@pytest.mark.parametrize("policy", MAKES)
@pytest.mark.parametrize("made", RUNS)
@pytest.mark.parametrize("seed", [1, 3])
def test_a_plan_takes_no_more_than_the_policy_alone(
    made: Callable[[int], bfc.Trace], policy: str, seed: int
):
    """But for 3 %: with steps that are marked, and with those that begin by themselves, made of the
    first iterations of a run of which most come later."""
    trace = made(seed)
    learned = random.Random(seed).choice([3, 4, 6, 10])
    plan = bfc.Plan.from_trace(first_iterations(trace, learned), fallback=policy)
    with MAKES[policy](bfc.SimulatedSubAllocator("1 TiB")) as pool:
        alone = trace.replay(pool).peak_bytes_reserved
    for steps, run in ((None, trace), ("auto", without_marks(trace))):
        with MAKES[policy](bfc.SimulatedSubAllocator("1 TiB")) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may be declined, or end
            pool.use_plan(plan, steps=steps)
            taken = run.replay(pool).peak_bytes_reserved
        assert taken <= 1.03 * alone, (made.__name__, seed, learned, steps)


def test_iterations_in_another_order_are_the_same_iterations():
    trace = sampled(2)
    order = list(range(len(trace.meta["marks"])))
    same = in_other_order(trace, order)
    assert (same.op == trace.op).all()
    assert (same.size == trace.size).all()
    assert same.meta["marks"] == trace.meta["marks"]
    turned = in_other_order(trace, [0, *reversed(order[1:])])
    assert sorted(turned.size) == sorted(trace.size)
    begins = [event for event, _ in turned.meta["marks"]]
    old = [event for event, _ in trace.meta["marks"]]
    count = old[2] - old[1]
    assert (turned.size[begins[-1] : begins[-1] + count] == trace.size[old[1] : old[2]]).all()


def test_what_would_not_pay_by_itself_is_declined_there():
    """No request of these steps tells where one begins: with marks the plan pays."""
    trace = sampled(2)
    plan = bfc.Plan.from_trace(first_iterations(trace, 6), fallback="bfc")
    assert plan.unmarked >= plan.worst >= plan.planned * 0.999
    gate = plan.worst / plan.online + 0.001
    if plan.unmarked > plan.worst:
        assert plan._declined(gate) is None
        why = plan._declined(gate, by_itself=True)
        assert why is not None
        assert "steps that began by themselves" in why
