"""The strategies: what they make is valid, reaches what matters, and shrinks to little."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, given
from hypothesis import settings as options

import bfc
from bfc import testing

MIB = 1 << 20
THOROUGH = options(
    max_examples=2000,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def reached(strategy, condition) -> object:
    return find(strategy, condition, settings=THOROUGH)


def peak_count(trace: bfc.Trace) -> int:
    live = most = 0
    for op in trace.op:
        live += 1 if op == 0 else -1
        most = max(most, live)
    return most


@given(testing.sizes(100, 10_000))
def test_sizes_stay_between_their_ends(nbytes: int) -> None:
    assert 100 <= nbytes <= 10_000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("border", [255, 256, 257, 512, MIB - 1, MIB, MIB + 1, 20 * MIB, 64 * MIB])
def test_sizes_reach_the_borders(border: int) -> None:
    assert reached(testing.sizes(), lambda nbytes: nbytes == border) == border


def test_sizes_may_be_of_one_kind() -> None:
    assert reached(testing.sizes(3, 3), lambda nbytes: True) == 3
    assert reached(testing.sizes(0), lambda nbytes: True) == 0
    with pytest.raises(ValueError, match="0 <= smallest <= largest"):
        testing.sizes(5, 4)


@given(testing.traces(streams=3, min_events=4, max_events=30))
@options(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_trace_is_valid_and_as_long_as_asked(trace: bfc.Trace) -> None:
    assert 4 <= len(trace) <= 30
    assert set(trace.stream.tolist()) <= {0, 1, 2}
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("16 GiB"))
    assert trace.replay(allocator).failed == 0


@given(testing.traces(frees_all=True, max_events=20))
def test_a_trace_may_free_all(trace: bfc.Trace) -> None:
    assert len(trace) <= 20
    assert (trace.op == 0).sum() == (trace.op == 1).sum()


def test_odd_traces_are_value_errors() -> None:
    for wrong in ({"min_events": 5, "max_events": 4}, {"min_events": -1}, {"streams": 0}):
        with pytest.raises(ValueError, match="min_events"):
            testing.traces(**wrong)


@pytest.mark.long
def test_histories_are_long_enough_to_matter() -> None:
    trace = reached(testing.traces(max_events=100), lambda trace: peak_count(trace) >= 12)
    assert len(trace) == 12
    assert set(trace.size.tolist()) == {1}


@pytest.mark.long
def test_a_history_shrinks_to_what_is_needed() -> None:
    """Two live at once, of more than a MiB together: one could do it, so that two need a reason."""
    trace = reached(
        testing.traces(),
        lambda trace: peak_count(trace) >= 2 and int(trace.size.max()) > MIB,
    )
    assert trace.op.tolist() == [0, 0]
    assert sorted(trace.size.tolist()) == [1, MIB + 1]


@pytest.mark.long
def test_a_hole_shrinks_to_three_events() -> None:
    """Something is freed while what was allocated after it is live."""

    def leaves_a_hole(trace: bfc.Trace) -> bool:
        with bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 GiB")) as allocator:
            trace.replay(allocator)
            chunks = list(allocator.snapshot().chunks())
            return len(chunks) > 2 and not chunks[0].in_use and chunks[1].in_use

    trace = reached(testing.traces(), leaves_a_hole)
    assert trace.op.tolist() == [0, 0, 1]
    assert trace.size.tolist() == [1, 1, 0]


@pytest.mark.long
def test_a_history_that_frees_the_newest_first_shrinks_too() -> None:
    def is_nested(trace: bfc.Trace) -> bool:
        freed = trace.id[trace.op == 1].tolist()
        return len(freed) >= 3 and freed[0] > freed[1] > freed[2]

    trace = reached(testing.traces(), is_nested)
    assert trace.op.tolist() == [0, 0, 0, 1, 1, 1]
    assert set(trace.size.tolist()) == {0, 1}


@pytest.mark.long
def test_a_refusal_shrinks_to_a_request_or_two() -> None:
    def refuses(trace: bfc.Trace) -> bool:
        with bfc.BFCAllocator(bfc.SimulatedSubAllocator("8 MiB")) as allocator:
            return trace.replay(allocator).failed > 0

    trace = reached(testing.traces(), refuses)
    assert trace.op.tolist() in ([0], [0, 0])
    assert 8 * MIB - 512 < trace.size.sum() <= 8 * MIB + 1


@given(testing.settings())
def test_settings_are_taken(text: str) -> None:
    source = bfc.SimulatedSubAllocator("1 GiB")
    assert bfc.CachingAllocator(source, settings=text).settings == text
    assert bfc.CachingAllocator(source, settings=text, strict=True)


def test_settings_shrink_to_nothing_and_reach_every_key() -> None:
    assert reached(testing.settings(), lambda text: True) == ""
    text = reached(testing.settings(), lambda text: text.count(":") == 6)
    assert text.startswith("large_segment_size_mb:11,max_split_size_mb:11")
    assert text.endswith(",expandable_segments:False")
    on = reached(testing.settings(), lambda text: "expandable_segments:True" in text)
    assert on.endswith("expandable_segments:True")
    only = testing.settings(["max_split_size_mb"])
    assert reached(only, lambda text: text) == "max_split_size_mb:20"
    with pytest.raises(ValueError, match="no setting 'backend'"):
        testing.settings(["backend"])


def test_stream_events_are_of_three_kinds() -> None:
    events = testing.stream_events((0, 2, 4))
    for kind in ("Hold", "Finish", "Use"):
        event = reached(events, lambda event, kind=kind: type(event).__name__ == kind)
        assert event.stream == 0
