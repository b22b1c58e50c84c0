"""`python -m bench.memory`: which figures stand in its table, and that the original is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import bfc
from bench import memory
from bench.memory import CONTENDERS, Run, run_ours
from bench.peers.tensorflow import PeerUnavailable

MIB = 1 << 20
#: 100 MiB, and 1 MiB, for which PyTorch takes a segment of 2 MiB.
TRACE = bfc.Trace([0, 0], [0, 1], [100 * MIB, MIB]).closed()
DEFAULT, EXPANDABLE, STITCHING, CACHING_STITCHING, GROWING, FIXED = CONTENDERS


@pytest.fixture(autouse=True)
def _a_short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "traces", lambda: iter([("one", TRACE), ("two", TRACE)]))


def stand_in(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], Run] = lambda it: it) -> None:
    """Ours as the original, with what it does changed."""
    by_settings = {contender.settings: contender for contender in CONTENDERS}
    monkeypatch.setattr(memory.torch, "build", lambda: None)
    monkeypatch.setattr(
        memory,
        "run_pytorch",
        lambda settings, trace, nbytes: change(run_ours(by_settings[settings], trace, nbytes)),
    )


def test_the_table_has_every_trace_under_every_contender(monkeypatch, capsys):
    stand_in(monkeypatch)
    memory.main([])
    _machine, heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["trace", "allocator", "reserved"]
    names = [contender.name for contender in CONTENDERS]
    rows, means = lines[:12], lines[12:]
    assert [line[32:52].strip() for line in rows] == names * 2
    assert [line[:32].strip() for line in rows if line[0] != " "] == [
        "one (0.1 GiB)",
        "two (0.1 GiB)",
    ]
    assert [line.split()[-1] for line in rows] == [*["equal"] * 2, *["-"] * 4] * 2
    assert [line[32:52].strip() for line in means] == [name for name in names for _ in range(2)]


def test_the_figures_of_a_trace():
    rows = [memory.measure(contender, TRACE, False) for contender in CONTENDERS]
    default, expandable, stitching, caching, growing, fixed = rows
    # 102 MiB are the fourth step above 101.
    assert default.reserved == expandable.reserved == 102 / 101
    assert default.smallest == expandable.smallest == pytest.approx(1.01)
    # 1 MiB is a small request, which gets a page of its own.
    for stitched in (stitching, caching):
        assert stitched.reserved == 102 / 101
        assert stitched.smallest == pytest.approx(1.01)
        assert stitched.with_room.counts().endswith(" / 0")
    # Two regions of 128 MiB: what is left of the first is too small a part to be split off.
    assert growing.reserved == 256 / 101
    assert fixed.reserved is None
    # The chunk is split only if it has twice the 100 MiB.
    assert fixed.smallest == pytest.approx(1.9825)
    assert default.with_room.counts() == "2 / 0"
    assert expandable.with_room.calls[0] == {"reserve": 2, "create": 6, "map": 6, "access": 2}
    assert all(row.is_equal is None for row in rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_the_smallest_device_is_the_first_on_which_two_passes_complete(contender):
    trace = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [11 * MIB, MIB, 0, 15 * MIB]).closed()
    row = memory.measure(contender, trace, False)
    steps = memory.smallest(contender, trace, row.with_room.live)
    sizes = [memory.device_of(row.with_room.live, at) for at in range(steps + 1)]
    assert [run_ours(contender, trace, size).completed for size in sizes] == [
        *[False] * steps,
        True,
    ]
    assert row.smallest == sizes[-1] / row.with_room.live
    assert len(row.on_smallest.calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda run: replace(run, addresses=[it + 512 for it in run.addresses]),
        lambda run: replace(run, peak_reserved=run.peak_reserved + 1),
        lambda run: replace(run, calls=[calls + calls for calls in run.calls]),
        lambda run: replace(run, addresses=run.addresses[:1]),
    ],
)
def test_a_difference_from_the_original_is_said_and_is_a_failure(monkeypatch, capsys, change):
    stand_in(monkeypatch, change)
    with pytest.raises(SystemExit, match="differs from PyTorch's"):
        memory.main(["--traces", "two"])
    assert capsys.readouterr().out.count("DIFFERS") == 2


def test_without_the_original_ours_is_measured(monkeypatch, capsys):
    def unavailable() -> None:
        raise PeerUnavailable("there is no wheel for this machine")

    monkeypatch.setattr(memory.torch, "build", unavailable)
    memory.main(["--traces", "one"])
    _machine, why, _heading, *lines = capsys.readouterr().out.splitlines()
    assert why == "without PyTorch 2.11: there is no wheel for this machine"
    assert [line.split()[-1] for line in lines[:5]] == ["-"] * 5


def test_a_trace_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--traces", "one", "three"])
    assert "there is no trace 'three'; there are one, two" in capsys.readouterr().err


def test_a_run_ends_with_the_pass_that_is_refused():
    run = run_ours(DEFAULT, TRACE, 101 * MIB)
    assert (run.completed, len(run.calls), len(run.addresses)) == (False, 1, 1)


@pytest.mark.peers
def test_the_original_does_the_same(monkeypatch, capsys):
    monkeypatch.undo()
    memory.main(["--traces", "gpu_decomfl"])
    rows = capsys.readouterr().out.splitlines()[2:7]
    assert [row.split()[-1] for row in rows] == ["equal", "equal", "-", "-", "-"]
