"""One run under several policies, in one figure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from bfc.trace import Timeline
from bfc.trace.timeline import ABOVE, pyplot_of, set_axes
from bfc.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours, which the colour-blind tell apart, but for those that are too light for
#: a thin line; and strokes, which tell the lines apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 3)))
#: The characters of a policy's name in one line of the legend.
WIDEST = 26
HEADINGS = ("reserved", "live", "refused")
#: The points of the text, and of the legend, in a wide figure and in one of a column's width.
WIDE, NARROW = (9.0, 8.0), (7.0, 6.0)
#: The lines of a legend's row, with the space between rows.
ROW = 1.5


def plot(timelines: Mapping[str, Timeline], ax: Axes | None = None, *, width: float = 6.4) -> Axes:
    """Draw what one run reserves under several policies, and what is live, with matplotlib.

    Parameters
    ----------
    timelines : mapping of str to Timeline
        The policies by name, each with the `timeline` of a replay of the same trace.
    ax : matplotlib.axes.Axes, optional
        Where to draw. The default is a new figure.
    width : float, optional
        The width of a new figure in inches: 3.4 is a column of most papers in two columns.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on, to be changed, shown or saved: `ax.figure.savefig("policies.pdf")`.

    Raises
    ------
    DeviceUnavailableError
        If matplotlib is not installed.
    ValueError
        If there is no timeline.

    Notes
    -----
    The legend is a table of the peaks, and stands above the axes, where it hides no line. The grey
    area is what is live under the policy that refuses least. A policy that refuses a request has a
    cross at its first refusal, and a thin line for what is live under it. Colours and strokes can
    be told apart in grey, and by the colour-blind.

    Examples
    --------
    >>> import bfc
    >>> from bfc.study import compare, plot
    >>> trace = bfc.Trace(op=[0, 0, 1, 1], id=[0, 1, 0, 1], size=[1000, 300, 0, 0])
    >>> kinds = {"bfc": bfc.BFCAllocator, "caching": bfc.CachingAllocator}
    >>> found = compare(trace, kinds, "1 GiB", samples=400)
    >>> ax = plot(found.timelines)  # doctest: +SKIP
    """
    if not timelines:
        raise ValueError("there is nothing to draw: give at least one timeline")
    pyplot = pyplot_of()
    names = {name: _broken(name) for name in timelines}
    size, small = NARROW if width < 5 else WIDE
    if ax is not None:
        _draw(ax, timelines)
        set_axes(ax)
        _add_legend(ax, ax, timelines, names, ABOVE)
        return ax
    with pyplot.rc_context({"font.size": size, "legend.fontsize": small}):
        lines = 3 + sum(map(len, names.values()))
        height = 0.5 * width + lines * small * ROW / 72
        figure, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
        _draw(ax, timelines)
        set_axes(ax)
        where = {"loc": "outside upper left", "frameon": False}
        _add_legend(figure, ax, timelines, names, where)
    return ax


def _broken(name: str) -> list[str]:
    """A policy's name in short lines, which end where a setting does."""
    kind, colon, rest = name.partition(":")
    parts = f"{kind}{colon} {rest.replace(',', ', ')}" if len(name) > WIDEST else name
    lines = textwrap.wrap(parts, WIDEST) or [""]
    return [line.replace(", ", ",").replace(": ", ":") for line in lines]


def _draw(ax: Axes, timelines: Mapping[str, Timeline]) -> None:
    whole = min(timelines.values(), key=lambda it: int(it.refused.max(initial=0)))
    ax.fill_between(
        whole.event, whole.live, step="post", color="0.85", linewidth=0, label="live", zorder=0
    )
    for timeline, colour, stroke in zip(
        timelines.values(), cycle(COLOURS), cycle(STROKES), strict=False
    ):
        step: dict[str, Any] = {"where": "post", "color": colour}
        ax.step(timeline.event, timeline.reserved, linestyle=stroke, linewidth=1.3, **step)
        refused = timeline.refused > 0
        if refused.any():
            at = int(refused.argmax())
            ax.step(timeline.event, timeline.live, linewidth=0.5, **step)
            ax.plot(timeline.event[at], timeline.reserved[at], "x", color=colour, label="refused")
    ax.margins(x=0.01)


def _add_legend(
    owner: Any,
    ax: Axes,
    timelines: Mapping[str, Timeline],
    names: Mapping[str, list[str]],
    where: Mapping[str, Any],
) -> None:
    """A table: the policies, and the peaks of each. `owner` is the figure or the axes."""
    from matplotlib import rcParams
    from matplotlib.lines import Line2D

    rows = {name: _cells(timeline) for name, timeline in timelines.items()}
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows.values(), strict=True)]
    first = max(len(line) for lines in names.values() for line in lines)

    def line_of(name: str, cells: tuple[str, ...]) -> str:
        right = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([name.ljust(first), *right])

    strokes = [line for line in ax.get_lines() if line.get_linewidth() == 1.3]
    handles: list[Any] = [Line2D([], [], linestyle="none"), *strokes[-len(rows) :]]
    labels = [line_of("at most", HEADINGS)]
    labels += ["\n".join([line_of(names[name][0], rows[name]), *names[name][1:]]) for name in rows]
    handles.append(ax.collections[-1])
    labels.append("live: asked for, and not freed")
    if any(int(timeline.refused.max(initial=0)) for timeline in timelines.values()):
        handles.append(Line2D([], [], linestyle="none", marker="x", color="black"))
        labels.append("first refusal")
    owner.legend(
        handles,
        labels,
        prop={"family": "monospace", "size": rcParams["legend.fontsize"]},
        handlelength=3,
        labelspacing=0.3,
        borderaxespad=0,
        **where,
    )


def _cells(timeline: Timeline) -> tuple[str, str, str]:
    reserved, live, refused = (
        int(values.max(initial=0))
        for values in (timeline.reserved, timeline.live, timeline.refused)
    )
    return format_bytes(reserved), format_bytes(live), str(refused)
