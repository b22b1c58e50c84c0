"""What iterations hold equals an obvious recount, and the sentence says what differs."""

from __future__ import annotations

import random

import pytest

import bfc
from bfc_tools.study.iterations import figures_of, steady_of

MIB = 1 << 20


def run_of(
    iterations: list[list[int]], *, weights: int = 40 * MIB, kept: int = 0
) -> tuple[bfc.Trace, list[int]]:
    """Weights, then iterations that ask for so many bytes each, free them in reverse, and keep
    `kept` bytes; and where each begins."""
    events: list[tuple[int, int, int]] = [(0, 0, weights)]
    marks, number = [], 1
    for sizes in iterations:
        marks.append(len(events))
        first = number
        for size in sizes:
            events.append((0, number, size))
            number += 1
        events += [(1, one, 0) for one in reversed(range(first, number))]
        if kept:
            events.append((0, number, kept))
            number += 1
    ends = [*marks, [len(events), ""]]
    return bfc.Trace(*zip(*events, strict=True), meta={"marks": ends}), marks


def sentence_of(trace: bfc.Trace) -> str:
    steady = steady_of(trace, figures_of(trace, trace.iterations()))
    assert steady is not None
    return steady.sentence


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_a_recount(seed: int) -> None:
    dice = random.Random(seed)
    live: dict[int, int] = {}
    events, after = [], []
    for number in range(dice.randrange(20, 200)):
        if live and dice.random() < 0.45:
            one = dice.choice([*live])
            del live[one]
            events.append((1, one, 0))
        else:
            live[number] = dice.choice([0, 1, 512, 3 * MIB])
            events.append((0, number, live[number]))
        after.append(sum(live.values()))
    begins = sorted(dice.sample(range(len(events)), 4))
    marks = [(begin, dice.choice(["train", "evaluate", ""])) for begin in begins]
    trace = bfc.Trace(*zip(*events, strict=True), meta={"marks": marks})
    spans = zip(marks, [*begins[1:], len(events)], strict=True)
    expected = [
        (
            kind,
            begin,
            end,
            sum(op == 0 for op, *_ in events[begin:end]),
            max(after[begin:end]),
            begin + after[begin:end].index(max(after[begin:end])),
            after[end - 1],
        )
        for (begin, kind), end in spans
        if kind
    ]
    found = [
        (it.kind, it.begin, it.end, it.allocations, it.peak_live, it.peak_event, it.live_after)
        for it in figures_of(trace, trace.iterations())
    ]
    assert found == expected, f"seed {seed}"


def test_a_first_iteration_that_holds_less_is_said() -> None:
    trace, _ = run_of([[10 * MIB] * 2] + [[10 * MIB] * 3] * 4)
    assert sentence_of(trace) == (
        "5 iterations (train): the first holds 60.00 MiB at most, the later ones 70.00 MiB."
    )


def test_lengths_that_vary_are_a_range_and_a_peak_before_them_is_said() -> None:
    trace, begins = run_of([[MIB], [2 * MIB], [MIB]])
    loaded = bfc.Trace(
        [0, 1, *trace.op],
        [900, 900, *trace.id],
        [99 * MIB, 0, *trace.size.tolist()],
        meta={"marks": [*(begin + 2 for begin in begins), [len(trace) + 2, ""]]},
    )
    assert sentence_of(loaded) == (
        "3 iterations (train): the first holds 41.00 MiB at most, the later ones 41.00 MiB to "
        "42.00 MiB; the most is live before them."
    )


def test_what_is_kept_from_one_to_the_next_is_said() -> None:
    kept, _ = run_of([[10 * MIB] * 2] * 6, kept=3 * MIB)
    assert "after each, 3.00 MiB more stay live: something is kept" in sentence_of(kept)
    little, _ = run_of([[10 * MIB] * 2] * 6, kept=1024)
    assert "stay live" not in sentence_of(little)
    states, _ = run_of([[10 * MIB] * 2], kept=30 * MIB)
    once = bfc.Trace(
        [*states.op, *[0, 1] * 4],
        [*states.id, *[50, 50, 51, 51, 52, 52, 53, 53]],
        [*states.size.tolist(), *[9 * MIB, 0] * 4],
        meta={"marks": [1, 6, 8, 10, 12]},
    )
    assert "stay live" not in sentence_of(once)  # an optimizer's states, made in the first


def test_one_that_is_cut_off_is_left_out() -> None:
    trace, _ = run_of([[10 * MIB], [10 * MIB, 20 * MIB], [10 * MIB, 20 * MIB]])
    cut = bfc.Trace(trace.op[:-3], trace.id[:-3], trace.size[:-3], meta={"marks": [1, 3, 7]})
    assert not cut.iterations()[-1].complete
    assert "the later ones 70.00 MiB." in sentence_of(cut)


def test_one_iteration_is_beside_none() -> None:
    trace, _ = run_of([[MIB]])
    assert steady_of(trace, figures_of(trace, trace.iterations())) is None
    nothing = bfc.Trace([], [], [])
    assert figures_of(nothing, nothing.iterations()) == ()


def test_advice_says_what_is_reserved_up_to_the_first_and_to_the_second() -> None:
    """The figures are those of replays that end there."""
    trace, marks = run_of([[10 * MIB] * 2] + [[30 * MIB, 8 * MIB] * 2] * 3)
    advice = bfc.advise(trace, "1 GiB", jobs=1)
    reserved = [
        replayed.peak_bytes_reserved
        for end in (marks[1], marks[2], len(trace))
        for replayed in [
            trace[:end].replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 40)))
        ]
    ]
    assert reserved[0] < reserved[1]
    assert advice.steady is not None
    assert list(advice.steady.reserved) == reserved
    assert advice.steady.sentence in advice.text().splitlines()
    assert advice.as_dict()["steady"]["first_live"] == 60 * MIB
