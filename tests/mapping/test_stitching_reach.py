"""How far stitching goes on the recorded traces and on random churn: what is reserved, the smallest
device, the calls of the driver by pass, and who is waited for. Nothing is timed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import bfc
from bench.histories import churn, traces
from bench.report import geometric_mean
from bench.stitching import CHURNS, GIB, PASSES, ROOM, Passes, on_one_stream, usual_device

NAMES = tuple(name for name, _trace in traces())
#: Those that take a second or less.
QUICK = ("gpu_decomfl", "gpu_lm_small", "gpt2m_adam", "resnet50_multiscale")


@cache
def trace_of(name: str) -> bfc.Trace:
    return dict(traces())[name]


@cache
def with_room(name: str) -> Passes:
    return Passes(on_one_stream(trace_of(name)), ROOM)


def slow_but_for(quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


ON_EACH = pytest.mark.parametrize("name", slow_but_for(QUICK))


@ON_EACH
def test_what_is_reserved_with_room(name: str) -> None:
    passes = with_room(name)
    assert passes.refused == 0
    assert passes.ratio <= 1.015


@pytest.mark.slow
def test_what_is_reserved_on_the_whole() -> None:
    assert geometric_mean([with_room(name).ratio for name in NAMES]) <= 1.005


@ON_EACH
def test_the_driver_is_left_alone_when_the_program_repeats(name: str) -> None:
    first, *_two, fourth, fifth, sixth = with_room(name).calls
    assert sixth == 0
    assert fourth <= first / 5
    assert fifth <= first / 5


@ON_EACH
def test_nobody_waits_on_one_stream(name: str) -> None:
    passes = with_room(name)
    assert passes.waits == [0] * PASSES
    assert passes.figures["stream_waits"] == 0


@ON_EACH
def test_the_smallest_device(name: str) -> None:
    """All passes complete on a device of 1.015 times what is live; and on one that has no more than
    was reserved where there was room."""
    trace = on_one_stream(trace_of(name))
    for capacity in (int(with_room(name).live * 1.015), with_room(name).reserved):
        passes = Passes(trace, capacity)
        assert passes.refused == 0
        assert passes.calls[-1] == 0
        assert passes.waits == [0] * PASSES


@ON_EACH
def test_the_rule_for_the_size_of_a_page(name: str) -> None:
    trace = on_one_stream(trace_of(name))
    live = with_room(name).live
    for capacity, most in ((usual_device(live), 1.025), (80 * GIB, 1.035)):
        passes = Passes(trace, capacity, page_size=None, passes=2)
        assert passes.refused == 0
        assert passes.ratio <= most


@pytest.mark.slow
def test_a_program_of_three_streams_on_a_full_device() -> None:
    trace = trace_of("llama7b_zero3_lro")
    assert len(np.unique(trace.stream)) == 3
    passes = Passes(trace, int(with_room("llama7b_zero3_lro").live * 1.01))
    assert passes.refused == 0
    assert max(passes.waits) <= 10
    assert passes.ratio <= 1.015
    assert passes.calls[2:] == [0] * (PASSES - 2)  # its streams pass the same pages to each other


@pytest.mark.parametrize(("live", "smallest", "largest"), CHURNS)
def test_random_churn(live: int, smallest: int, largest: int) -> None:
    trace = churn(live, 10_000, smallest=smallest, largest=largest).closed()
    passes = Passes(trace, ROOM, passes=1)
    assert passes.refused == 0
    assert passes.ratio <= 1.05
