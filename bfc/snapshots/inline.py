"""Small drawings for notebooks: HTML and SVG without a script, in the colours of the page around
them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby

from bfc.units import format_bytes

#: The width and the height of a drawing, in pixels.
WIDTH, HEIGHT = 640, 120
#: The most bars in a drawing, and the number of pieces of each bar.
MOST_BARS, PIECES = 24, 320
#: How many shades a piece may have.
SHADES = 4
COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e")


def framed(caption: str, *parts: str) -> str:
    """A piece of HTML with a line of text above."""
    style = "font:13px/1.5 system-ui,sans-serif;max-width:42em"
    return f'<div style="{style}"><div>{html.escape(caption)}</div>{"".join(parts)}</div>'


def drawing(label: str, height: int, parts: Iterable[str]) -> str:
    """An SVG, with a label for screen readers."""
    return (
        f'<svg role="img" aria-label="{html.escape(label)}" viewBox="0 0 {WIDTH} {height}" '
        f'style="width:100%;height:auto;color:inherit">{"".join(parts)}</svg>'
    )


def lines(label: str, events: Sequence[int], columns: dict[str, Sequence[int]], end: int) -> str:
    """Bytes over events: each column is a line of steps, from event 0 to `end`."""
    top = max((max(column, default=0) for column in columns.values()), default=0) or 1
    parts = [f'<path d="M0 {HEIGHT}H{WIDTH}" stroke="currentColor" opacity=".4"/>']
    for colour, column in zip(COLOURS, columns.values(), strict=False):
        steps, height = [], HEIGHT
        for event, value in zip(events, column, strict=True):
            height = HEIGHT - round(value / top * (HEIGHT - 4))
            steps.append(f"H{event / max(end, 1) * WIDTH:.1f}V{height}")
        path = f"M0 {HEIGHT}{''.join(steps)}H{WIDTH}" if steps else f"M0 {HEIGHT}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    named = "".join(
        f'<span style="color:{colour}">&#9632;</span> {html.escape(name)} &nbsp; '
        for colour, name in zip(COLOURS, columns, strict=False)
    )
    return drawing(label, HEIGHT, parts) + f"<div>{named}(top {format_bytes(top)})</div>"


def bars(label: str, rows: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> str:
    """Memory: rows of bytes, and in each the ranges that are in use, as (start, bytes) in rising
    order. The first rows are drawn."""
    widest = max((size for size, _ in rows), default=1)
    parts = []
    for at, (size, used) in enumerate(rows[:MOST_BARS]):
        width = max(size / widest * WIDTH, 2.0)
        parts.append(
            f'<rect x="0" y="{at * 12}" width="{width:.1f}" height="9" fill="currentColor" '
            'opacity=".15"/>'
        )
        piece = width / PIECES
        for shade, run in groupby(enumerate(_shades(size, used)), key=lambda pair: pair[1]):
            places = [place for place, _ in run]
            if shade:
                parts.append(
                    f'<rect x="{places[0] * piece:.1f}" y="{at * 12}" '
                    f'width="{len(places) * piece:.1f}" height="9" fill="{COLOURS[0]}" '
                    f'opacity="{shade / SHADES:.2f}"/>'
                )
    left = len(rows) - MOST_BARS
    more = f"<div>and {left} smaller regions</div>" if left > 0 else ""
    return drawing(label, max(len(rows[:MOST_BARS]), 1) * 12, parts) + more


def _shades(size: int, used: Sequence[tuple[int, int]]) -> list[int]:
    """How much of each piece of a row is in use, from 0 to SHADES; at least 1 where anything is."""
    filled = [0.0] * PIECES
    for start, nbytes in used:
        low, high = start * PIECES, (start + nbytes) * PIECES
        for piece in range(low // size, (high - 1) // size + 1):
            filled[piece] += (min(high, (piece + 1) * size) - max(low, piece * size)) / size
    return [min(-int(-part * SHADES // 1), SHADES) for part in filled]


def preformatted(text: str) -> str:
    """A text for a terminal, as it stands."""
    return f'<pre style="margin:.5em 0;overflow-x:auto">{html.escape(text)}</pre>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. Its texts are escaped."""

    def row(cells: Iterable[object], tag: str) -> str:
        inside = "".join(
            f'<{tag} style="text-align:left;padding:0 1em 0 0">{html.escape(str(cell))}</{tag}>'
            for cell in cells
        )
        return f"<tr>{inside}</tr>"

    return f"<table>{row(headings, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
