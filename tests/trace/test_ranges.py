"""Iterations by the ranges that a program named while PyTorch recorded it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bfc

LAYERS = 9


class Program:
    """A training on a pool with a history, whose snapshot has ranges as PyTorch writes them."""

    def __init__(self) -> None:
        self.pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("4 GiB"))
        self.pool.record_history(context=None)
        self.weights = [self.pool.allocate("1 MiB") for _ in range(LAYERS)]
        self.rows: list[dict[str, Any]] = []
        self.begins: list[int] = []  # requests before each step
        self.asked = LAYERS

    def ask(self, size: int) -> bfc.Buffer:
        self.asked += 1
        return self.pool.allocate(size)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self._note(name, "START")
        yield
        self._note(name, "END")

    def _note(self, name: str, stage: str) -> None:
        time.sleep(0.0001)  # the times of two entries differ
        row = {"name": name, "stage": stage, "device": 0, "time_us": time.time_ns() // 1000}
        self.rows.append(row)
        time.sleep(0.0001)

    def step(self, length: int, parts: int = 1) -> None:
        """One that adds up the gradients of so many batches."""
        self.begins.append(self.asked)
        gradients: list[bfc.Buffer] = []
        for _ in range(parts):
            with self.range("forward"):
                saved = [self.ask(length * (one + 1)) for one in range(LAYERS)]
            while saved:
                gradient = self.ask(2000)
                if len(gradients) < LAYERS:
                    gradients.append(gradient)
                else:
                    gradient.free()
                saved.pop().free()
        with self.range("Optimizer.step#AdamW.step"):
            for gradient in gradients:
                self.ask(1000).free()
                gradient.free()

    def evaluate(self) -> None:
        with self.range("forward"):
            for one in range(2 * LAYERS):
                self.ask(4000 + one).free()

    def trace(self, folder: Path, **changes: Any) -> bfc.Trace:
        content = self.pool.snapshot().to_torch() | {"external_annotations": self.rows} | changes
        path = folder / "snapshot.pickle"
        path.write_bytes(pickle.dumps(content))
        return bfc.Trace.from_torch(path)


def starts_of(trace: bfc.Trace) -> list[int]:
    """How many requests there were before each iteration."""
    found = trace.iterations()
    assert found.source == "ranges", str(found)
    return [int((trace.op[: one.begin] == 0).sum()) for one in found if one.kind == "train"]


def test_steps_of_a_profiler_are_iterations(tmp_path: Path):
    """They are numbered, and touch. Lengths vary."""
    program = Program()
    for number in range(6):
        with program.range(f"ProfilerStep#{number}"):
            program.step(1000 * (1 + number % 4))
    assert starts_of(program.trace(tmp_path)) == program.begins


@pytest.mark.parametrize("parts", [1, 2])
def test_an_optimizer_that_names_its_step_is_enough(tmp_path: Path, parts: int):
    """Each step ends with it. Two batches a step have four ranges "forward" for two steps."""
    program = Program()
    for number in range(6):
        program.step(1000 * (1 + number % 4), parts)
    trace = program.trace(tmp_path)
    assert starts_of(trace) == program.begins
    plan = bfc.Plan.from_trace(trace, marks="auto")
    assert plan.kinds == ("train",)


def test_a_trace_that_is_saved_keeps_its_ranges(tmp_path: Path):
    program = Program()
    for _ in range(4):
        program.step(1000)
    trace = program.trace(tmp_path)
    trace.save(tmp_path / "trace.npz")
    kept = bfc.Trace.load(tmp_path / "trace.npz")
    assert kept.meta["ranges"] == trace.meta["ranges"] != []
    assert starts_of(kept) == program.begins
    assert "ranges" not in trace.anonymised().meta  # names are the program's own


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        [3, None, {}],
        [{"name": 1, "stage": "START", "time_us": 2}],
        [{"name": "a", "stage": "END", "time_us": 2}],
        [{"name": "a", "stage": "START", "time_us": -2}],
        [{"name": "a", "stage": "START", "time_us": 1 << 70}],
    ],
)
def test_rows_that_are_no_ranges_are_left_out(tmp_path: Path, rows: Any):
    program = Program()
    for _ in range(4):
        program.step(1000)
    trace = program.trace(tmp_path, external_annotations=rows)
    assert "ranges" not in trace.meta
    assert trace.iterations().source != "ranges"


@pytest.mark.parametrize(
    "ranges", [3, [[1, 2]], [["a", 0, 1 << 60]], [["a", 5, 2]], [[["a"], 0, 9]]]
)
def test_wrong_ranges_in_a_meta_are_left_out(ranges: Any):
    step = [(0, one, 512) for one in range(20)] + [(1, one, 0) for one in range(20)]
    run = [(op, 20 * number + one, size) for number in range(5) for op, one, size in step]
    trace = bfc.Trace(*zip(*run, strict=True), meta={"ranges": ranges})
    assert trace.iterations().source == "structure"


def test_ranges_that_are_no_iterations_leave_it_to_the_structure(tmp_path: Path):
    """A range of each layer alone is none: little is held where it ends."""
    program = Program()
    for number in range(5):
        program.begins.append(program.asked)
        saved = []
        for one in range(LAYERS):
            with program.range("layer"):
                saved += [program.ask(1000 * (one + 1) + number), program.ask(77000)]
        while saved:
            program.ask(500).free()
            saved.pop().free()
    found = program.trace(tmp_path).iterations()
    assert found.source == "structure"


def test_what_comes_between_two_steps_is_none_of_them(tmp_path: Path):
    """Evaluations begin where an optimizer's step ends."""
    program = Program()
    for number in range(9):
        program.step(1000 * (1 + number % 4))
        if number % 3 == 2:
            program.evaluate()
    trace = program.trace(tmp_path)
    assert starts_of(trace) == program.begins
    assert [one.kind for one in trace.iterations()].count("other") == 2
