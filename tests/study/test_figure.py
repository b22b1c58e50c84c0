"""One figure of several policies: what it draws, and that its legend hides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.study import compare, plot
from bfc_tools.cli import main
from bfc_tools.study.figure import COLOURS, STROKES

TRACES = Path(__file__).parents[2] / "bench" / "traces"
LONG = "caching:expandable_segments:True,max_split_size_mb:128"


@pytest.fixture(scope="module")
def timelines() -> dict[str, bfc.Timeline]:
    """On 1 GiB both refuse, on 80 GiB none does."""
    trace = bfc.Trace.load(TRACES / "gpu_decomfl.npz")
    kinds = {"bfc": bfc.BFCAllocator, LONG: bfc.CachingAllocator}
    large, small = (compare(trace, kinds, size, passes=1, samples=300) for size in ("9GiB", "1GiB"))
    return large.timelines | {"bfc on 1 GiB": small.timelines["bfc"]}


@pytest.mark.parametrize("width", [3.4, 6.4])
def test_the_legend_is_a_table_that_hides_nothing(pyplot: Any, timelines: Any, width: float):
    ax = plot(timelines, width=width)
    figure = ax.figure
    figure.canvas.draw()
    (legend,) = figure.legends
    box, axes = legend.get_window_extent(), ax.get_tightbbox()
    assert box.y0 >= axes.y1
    assert box.x1 <= figure.bbox.x1 + 1  # pixels, of hundreds
    assert box.y1 <= figure.bbox.y1 + 1
    assert axes.height > figure.bbox.height / 3
    assert figure.get_figwidth() == width
    lines = [text.get_text() for text in legend.get_texts()]
    refused = int(timelines["bfc on 1 GiB"].refused.max())
    assert [line.split() for line in lines] == [
        ["at", "most", "reserved", "live", "refused"],
        ["bfc", "9.00", "GiB", "1.66", "GiB", "0"],
        ["caching:", "1.77", "GiB", "1.66", "GiB", "0", *LONG[8:].replace(",", ", ").split()],
        ["bfc", "on", "1", "GiB", "1.00", "GiB", "990.82", "MiB", str(refused)],
        ["live:", "asked", "for,", "and", "not", "freed"],
        ["first", "refusal"],
    ]


def test_each_policy_has_its_own_line(pyplot: Any, timelines: Any) -> None:
    _, ax = pyplot.subplots()
    assert plot(timelines, ax) is ax
    drawn = [line for line in ax.get_lines() if line.get_linewidth() == 1.3]
    assert [line.get_color() for line in drawn] == list(COLOURS[:3])
    assert [list(line.get_ydata()) for line in drawn] == [
        it.reserved.tolist() for it in timelines.values()
    ]
    assert len({str(line._unscaled_dash_pattern) for line in drawn}) == 3
    (cross,) = (line for line in ax.get_lines() if line.get_marker() == "x")
    small = timelines["bfc on 1 GiB"]
    assert cross.get_xdata()[0] == small.event[small.refused > 0][0]
    assert ax.get_legend() is not None
    assert len(COLOURS) % len(STROKES), "so that a pair of both comes again as late as it can"


def test_the_colours_differ_in_grey_or_by_stroke() -> None:
    """By their lightness (CIE L*), or by their strokes, any two of the first seven policies."""

    def lightness(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
        luminance = sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        return 116 * luminance ** (1 / 3) - 16 if luminance > 0.009 else 903 * luminance

    seen = [(lightness(it), at % len(STROKES)) for at, it in enumerate(COLOURS)]
    for at, (light, stroke) in enumerate(seen):
        for other, another in seen[at + 1 :]:
            assert stroke != another or abs(light - other) > 15
        assert light < 75  # seen on white


def test_what_cannot_be_drawn_is_said(timelines: Any) -> None:
    with pytest.raises(ValueError, match="give at least one timeline"):
        plot({})
    rows = compare(bfc.Trace([], [], []), {"bfc": bfc.BFCAllocator}, "1 GiB", passes=1)
    with pytest.raises(ValueError, match=r"compare\(..., samples=400\) keeps them"):
        rows.plot()


def test_the_command_draws_it(pyplot: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "policies.svg"
    small = str(TRACES / "gpu_lm_small.npz")
    words = ["--no-picture", "--passes", "1", "--policy", "caching", "--policy", "bfc", "--figure"]
    assert main(["replay", small, *words, str(path)]) == 0
    assert path.read_text().startswith("<?xml")
    capsys.readouterr()
    for given, name, said in (([small], "x.doc", "ends in"), ([small] * 2, "x.png", "one TRACE")):
        assert main(["replay", *given, *words, str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.out == ""
    assert sorted(tmp_path.iterdir()) == [path]
