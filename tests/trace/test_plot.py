"""`timeline.plot()`: what it draws, and what it says without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import bfc

TRACE = Path(__file__).parents[2] / "bench" / "traces" / "gpu_decomfl.npz"


def replay(capacity: str) -> bfc.Replay:
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator(capacity), strict=True) as allocator:
        return bfc.Trace.load(TRACE).replay(allocator, samples=400)


def test_it_draws_every_row(pyplot, tmp_path):
    result = replay("80 GiB")
    timeline = result.timeline
    ax = timeline.plot()
    assert len(ax.get_lines()) == 3
    for line, name in zip(ax.get_lines(), ("reserved", "in_use", "live"), strict=True):
        assert np.array_equal(line.get_xdata(), timeline.event)
        assert np.array_equal(line.get_ydata(), getattr(timeline, name))
        assert line.get_drawstyle() == "steps-post"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [
        "reserved, at most 1.77 GiB",
        "in use, at most 1.67 GiB",
        "live, at most 1.66 GiB",
    ]
    ax.figure.savefig(tmp_path / "run.png")
    ticks = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ticks[1:4] == ["0 B", "256 MiB", "512 MiB"]
    assert ax.get_ylim()[1] > result.peak_bytes_reserved
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_it_draws_where_it_is_told(pyplot):
    _, (left, right) = pyplot.subplots(1, 2)
    timeline = replay("80 GiB").timeline
    assert timeline.plot(ax=right) is right
    assert not left.get_lines()
    assert len(pyplot.get_fignums()) == 1


def test_a_refusal_is_marked(pyplot):
    timeline = replay("1 GiB").timeline
    ax = timeline.plot()
    first = int(timeline.event[timeline.refused > 0][0])
    assert list(ax.get_lines()[-1].get_xdata()) == [first, first]
    assert ax.get_legend().get_texts()[-1].get_text() == f"refused by event {first}"


def test_an_empty_replay_is_drawn(pyplot):
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    ax = bfc.Trace([], [], []).replay(allocator, samples=9).timeline.plot()
    ax.figure.canvas.draw()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    timeline = replay("80 GiB").timeline
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(bfc.DeviceUnavailableError, match="try: pip install matplotlib"):
        timeline.plot()


def test_a_second_run_leaves_the_first_in_sight(pyplot):
    ax = replay("80 GiB").timeline.plot()
    _, before = ax.get_ylim()
    small = bfc.Trace([0, 1], [0, 0], [1 << 20, 0])
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        small.replay(allocator, samples=400).timeline.plot(ax)
    assert ax.get_ylim()[1] == pytest.approx(before)
    assert len(ax.get_lines()) == 6
