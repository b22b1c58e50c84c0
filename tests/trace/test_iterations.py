"""`Trace.iterations` beside runs whose iterations are known."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

import bfc
from bfc.errors import TraceError

TRACES = Path(__file__).parents[2] / "bench" / "traces"
RECORDINGS = Path(__file__).parents[1] / "recordings"
TRUTH = json.loads((TRACES / "truth.json").read_text())
KNOWN = [name for name, marks in TRUTH.items() if marks]


def boundaries(trace: bfc.Trace, kind: str = "train") -> list[int]:
    return [one.begin for one in trace.iterations() if one.kind == kind]


def assert_near(found: list[int], truth: list[int]) -> None:
    """Each boundary within 2 % of the events of an iteration, and no others."""
    lengths = sorted(later - one for one, later in itertools.pairwise(truth))
    within = 0.02 * lengths[len(lengths) // 2]
    assert len(found) == len(truth), (found, truth)
    for one, true in zip(found, truth, strict=True):
        assert abs(one - true) <= within, (found, truth)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KNOWN)
def test_iterations_of_large_runs_are_found(name: str):
    """Lengths, experts and image sizes vary in most; three streams, evaluations, recomputation."""
    trace = bfc.Trace.load(TRACES / f"{name}.npz")
    assert_near(boundaries(trace), [at for at, kind in TRUTH[name] if kind == "train"])
    between = [at for at, kind in TRUTH[name][:-1] if kind == "eval"]
    assert boundaries(trace, "other") == between


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "path",
    [
        *(TRACES / f"{name}.npz" for name in sorted(set(TRUTH) - set(KNOWN))),
        *sorted(RECORDINGS.glob("rec_*.npz")),
    ],
    ids=lambda path: path.stem,
)
def test_none_are_claimed_where_there_are_none(path: Path):
    """Single steps, inference of one prompt, requests that are served: their layers repeat."""
    found = bfc.Trace.load(path).iterations()
    assert not found
    assert found.reason
    assert str(found) == f"no iterations: {found.reason}"


class Training:
    """A made run: weights, and steps that keep what a backward pass frees again."""

    def __init__(self, seed: int, *, accumulate: int = 1, keeps: bool = False):
        self.random = random.Random(seed)
        self.layers = self.random.randint(5, 12)
        self.ops = [self.random.randint(3, 9) for _ in range(self.random.randint(2, 4))]
        self.accumulate, self.keeps = accumulate, keeps
        self.events: list[tuple[int, int, int]] = []
        self.begins: list[int] = []
        self.gradients: list[int] = []
        self.count = 0
        for _ in range(2 * self.layers + 3):
            self.allocate(self.random.randrange(1 << 12, 1 << 22))

    def allocate(self, size: int) -> int:
        self.events.append((0, self.count, size))
        self.count += 1
        return self.count - 1

    def free(self, block: int) -> None:
        self.events.append((1, block, 0))

    def step(self, length: int) -> None:
        self.begins.append(len(self.events))
        for _ in range(self.accumulate):
            self.backward(self.forward(length))
        self.optimize()

    def forward(self, length: int, *, saves: bool = True) -> list[int]:
        held = [self.allocate(length * 8), self.allocate(length * 4096)]
        for _ in range(self.layers):
            for ops in self.ops:
                made = [self.allocate(length * 256 * (one + ops)) for one in range(ops)]
                keep = (ops + 1) // 2 if saves else 0
                for block in made[keep:]:
                    self.free(block)
                held += made[:keep]
        return held

    def backward(self, held: list[int]) -> None:
        first = not self.gradients
        for number, block in enumerate(reversed(held)):
            passing = self.allocate(1 << 16)
            if first and number % 2 == 0:
                self.gradients.append(self.allocate(1 << 14 + number % 5))
            self.free(block)
            self.free(passing)

    def optimize(self) -> None:
        if len(self.begins) == 1:  # its state stays
            for _ in self.gradients:
                self.allocate(1 << 15)
        for _ in self.gradients:
            self.free(self.allocate(1 << 15))
        if not self.keeps:
            for block in self.gradients:
                self.free(block)
            self.gradients = []

    def trace(self, begin: int = 0, end: int | None = None) -> bfc.Trace:
        """The events, without the frees of what was allocated before `begin`."""
        events = self.events[begin:end]
        born = {block for op, block, _ in events if op == 0}
        return bfc.Trace(*zip(*[one for one in events if one[1] in born], strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("accumulate", [1, 4])
def test_iterations_are_found_where_lengths_vary(seed: int, accumulate: int):
    """A step that adds up gradients is one iteration, and its batches are none."""
    run = Training(seed, accumulate=accumulate)
    for _ in range(6):
        run.step(run.random.randint(40, 2000))
    assert_near(boundaries(run.trace()), run.begins)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_evaluations_lie_between_iterations(seed: int):
    run = Training(seed, keeps=True)
    evaluations = []
    for number in range(9):
        run.step(run.random.randint(40, 2000))
        if number in (2, 5):
            evaluations.append(len(run.events))
            for _ in range(3):
                for block in run.forward(900, saves=False):
                    run.free(block)
    assert_near(boundaries(run.trace()), run.begins)
    found = boundaries(run.trace(), "other")
    assert len(found) == 2
    assert all(abs(x - y) <= 4 for x, y in zip(found, evaluations, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_may_begin_and_end_in_mid_iteration(seed: int):
    run = Training(seed)
    for _ in range(6):
        run.step(run.random.randint(40, 2000))
    begin, end = (run.begins[0] + run.begins[1]) // 2, (run.begins[5] + len(run.events)) // 2
    trace = run.trace(begin, end)
    left_out = end - begin - len(trace)
    found = trace.iterations()
    assert [one.complete for one in found] == [True] * 4 + [False]
    truth = [one - begin - left_out for one in run.begins[1:]]
    assert_near([one.begin for one in found], truth)


def test_some_requests_may_be_missing_or_put_in():
    """One in a hundred. Where it is among the first of an iteration, that one may not be found."""
    missed = 0
    for seed in range(8):
        run = Training(seed)
        for number in range(6):
            run.step(500 + 100 * number)
        events, begins = run.events, run.begins
        lost = {block for block in range(run.count) if run.random.random() < 0.005}
        run.events, run.begins = [], []
        for at, event in enumerate(events):
            if at in begins:
                run.begins.append(len(run.events))
            if event[1] not in lost:
                run.events.append(event)
            if run.random.random() < 0.005:
                run.free(run.allocate(run.random.randrange(1, 1 << 20)))
        found = boundaries(run.trace())
        near = [one for one in run.begins if any(abs(one - other) <= 8 for other in found)]
        assert len(found) == len(near), (seed, found, run.begins)
        missed += 6 - len(near)
    assert missed <= 5  # of 48


def test_marks_of_the_recording_come_first():
    trace = bfc.Trace([0, 1] * 3, [0, 0, 1, 1, 2, 2], [512, 0] * 3)
    marked = trace._with_meta({"marks": [[0, "train:7"], [2, ""], 4]})
    found = marked.iterations()
    assert found.source == "marks"
    assert [(one.begin, one.end, one.kind) for one in found] == [(0, 2, "train"), (4, 6, "train")]
    for wrong in ([[2, "train"], [1, "train"]], [["x", "train"]], [[1]], [[99, "train"]], 7):
        with pytest.raises(TraceError, match="marks"):
            trace._with_meta({"marks": wrong}).iterations()


def test_a_run_without_requests_has_none():
    assert bfc.Trace([], [], []).iterations().reason == "the run asks for no memory"


def test_churn_has_none():
    """Blocks of any size that live for any time."""
    chance = random.Random(5)
    run = Training(5)
    alive: list[int] = []
    for _ in range(6000):
        if alive and chance.random() < 0.5:
            run.free(alive.pop(chance.randrange(len(alive))))
        else:
            alive.append(run.allocate(chance.randrange(1, 1 << 22)))
    assert not run.trace().iterations()
