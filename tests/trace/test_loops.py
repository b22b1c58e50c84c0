"""The iterations of programs whose recorded stacks show their loops: each begins where it does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

import bfc

KIB = 1 << 10


class Program:
    """A training as far as its memory goes, which counts the requests before each step."""

    def __init__(self, seed: int) -> None:
        self.pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB"))
        self.pool.record_history(context="all")
        self.dice = random.Random(seed)
        self.asked = 0
        self.weights = [self.ask(64) for _ in range(12)]
        self.states: list[bfc.Buffer] = []
        self.begins: list[int] = []

    def ask(self, size: int) -> bfc.Buffer:
        self.asked += 1
        return self.pool.allocate(size * KIB)

    def began(self) -> None:
        self.begins.append(self.asked)

    def layer(self, length: int) -> list[bfc.Buffer]:
        hidden = self.ask(length)
        extra = self.ask(2 * length) if self.dice.random() < 0.3 else hidden
        scores = self.ask(max(1, length * length // 64))
        return [hidden, extra, scores]

    def forward(self, length: int) -> list[bfc.Buffer]:
        kept: list[bfc.Buffer] = []
        for _ in range(self.dice.choice([10, 12])):
            kept += self.layer(length)
        return kept

    def backward(self, kept: list[bfc.Buffer]) -> list[bfc.Buffer]:
        gradients = []
        while kept:
            gradients.append(self.ask(64))
            kept.pop()
        return gradients

    def update(self) -> None:
        for weight in self.weights:
            if len(self.states) < len(self.weights):
                self.states.append(self.ask(128))
            weight.nbytes and self.ask(64).free()

    def evaluate(self) -> None:
        for _ in range(3):
            kept = self.forward(self.dice.randrange(8, 64))
            del kept

    def length(self) -> int:
        return self.dice.randrange(8, 200)


def in_one_function(program: Program) -> None:
    for _ in range(8):
        program.began()
        batch = program.ask(8)
        kept = program.forward(program.length())
        gradients = program.backward(kept)
        program.update()
        del batch, gradients


def with_evaluations_between(program: Program) -> None:
    for number in range(9):
        program.began()
        kept = program.forward(program.length())
        gradients = program.backward(kept)
        program.update()
        del gradients
        if number % 3 == 2:
            program.evaluate()


def in_epochs(program: Program) -> None:
    for _ in range(3):
        for _ in range(4):
            program.began()
            gradients = program.backward(program.forward(program.length()))
            program.update()
            del gradients
        program.evaluate()


def with_gradients_added_up(program: Program) -> None:
    for _ in range(5):
        program.began()
        added = []
        for _ in range(4):
            batch = program.ask(8)
            kept = program.forward(program.length())
            added += program.backward(kept)
            del batch
        program.update()
        del added


def with_two_gradients_added_up(program: Program) -> None:
    for number in range(12):
        if number % 2 == 0:
            program.began()
            added = []
        batch = program.ask(8)
        kept = program.forward(program.length())
        added += program.backward(kept)
        del batch
        if number % 2:
            program.update()
            added.clear()


def in_a_function_for_each_epoch(program: Program) -> None:
    def epoch() -> None:
        order = program.ask(1)
        for number in range(4):
            if number:
                program.began()
            batch = program.ask(8)
            gradients = program.backward(program.forward(program.length()))
            program.update()
            del batch, gradients
        del order

    for _ in range(3):
        program.asked += 1
        program.began()  # behind the order of the batches
        program.asked -= 1
        epoch()


def by_a_function_for_each_step(program: Program) -> None:
    def step() -> None:
        kept = program.forward(
            program.length(),
        )
        program.backward(kept)
        program.update()

    for _ in range(7):
        program.began()
        step()


def on_one_line(program: Program) -> None:
    for _ in range(6):
        program.began()
        program.backward(program.forward(program.length())), program.update()


def by_a_generator(program: Program) -> None:
    def batches() -> Iterator[bfc.Buffer]:
        for _ in range(6):
            program.began()
            yield program.ask(8)

    for _ in batches():
        kept = program.forward(program.length())
        program.backward(kept)
        program.update()


def where_some_end_early(program: Program) -> None:
    for number in range(9):
        program.began()
        batch = program.ask(8)
        kept = program.forward(program.length())
        if number % 4 == 3:  # a loss that is not finite
            del batch, kept
            continue
        program.backward(kept)
        program.update()
        del batch


PROGRAMS = [
    in_one_function,
    with_evaluations_between,
    in_epochs,
    with_gradients_added_up,
    with_two_gradients_added_up,
    in_a_function_for_each_epoch,
    by_a_function_for_each_step,
    on_one_line,
    by_a_generator,
    where_some_end_early,
]


def recorded(run: Callable[[Program], None], seed: int) -> tuple[bfc.Trace, list[int]]:
    """The events, and those at which steps begin."""
    program = Program(seed)
    run(program)
    trace = bfc.Trace.from_snapshot(program.pool.snapshot())
    requests = [event for event, op in enumerate(trace.op.tolist()) if op == 0]
    return trace, [requests[asked] for asked in program.begins]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
def test_each_step_is_found_where_it_begins(run: Callable[[Program], None], seed: int) -> None:
    """Lengths vary, layers are left out, and requests are put in."""
    trace, begins = recorded(run, seed)
    found = trace.iterations()
    assert found.source == "stacks", f"{run.__name__}, seed {seed}"
    assert [one.begin for one in found if one.kind == "train"] == begins


def test_a_launcher_of_many_calls_is_no_hindrance() -> None:
    """Frameworks and launchers stand around the loop, each with one line."""
    names: dict[str, Callable[[Program], None]] = {"step0": in_one_function}
    for number in range(1, 90):
        exec(f"def step{number}(program): step{number - 1}(program)", names)
    trace, begins = recorded(names["step89"], 0)
    assert [one.begin for one in trace.iterations()] == begins


def test_evaluations_are_no_part_of_the_step_before_them() -> None:
    trace, begins = recorded(in_epochs, 0)
    found = trace.iterations()
    assert [one.kind for one in found][:-1] == [*["train"] * 4, "other"] * 2 + ["train"] * 3
    assert all(one.end == later.begin for one, later in itertools.pairwise(found))
    assert found[0].begin == begins[0]


def test_layers_and_one_prompt_are_no_steps() -> None:
    """A loop over layers keeps what it makes, and one over tokens holds little at once."""

    def once(program: Program) -> None:
        kept = program.forward(64)
        program.backward(kept)

    def answers(program: Program) -> None:
        cache = program.ask(8)
        for token in range(40):
            hidden = program.ask(4)
            cache = program.ask(8 + token)
            del hidden
        del cache

    for run in (once, answers):
        assert not recorded(run, 0)[0].iterations()


def test_marks_come_before_stacks_and_frames_of_nothing_are_no_loops() -> None:
    trace, begins = recorded(in_one_function, 0)
    events = [trace.op, trace.id, trace.size]
    again = bfc.Trace(*events, meta={"marks": begins[::2]})
    assert [one.begin for one in again.iterations()] == begins[::2]
    frames = [("train.py", 1, "main")]
    empty = bfc.Trace([], [], [], stack=[], frames=frames, stacks=[(0, 0), (0, 0)])
    assert not empty.iterations()
    plain = bfc.Trace(*events, stack=[1] * len(trace), frames=frames, stacks=[(0, 0), (0, 0)])
    assert plain.iterations().source == "structure"
