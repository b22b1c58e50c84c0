"""What a comment on a pull request can show: Markdown, in which strangers' names are only text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bfc.units import printable


def code(name: str) -> str:
    """A name as code. Nothing in it is a tag, a mention or the end of a cell.

    >>> print(code("layers.0"), code("a`b|c"))
    `layers.0` `a'b\\|c`
    """
    text = printable(name).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table: texts in the first column, and figures in all others."""
    yield f"| {' | '.join(headings)} |"
    yield f"|---|{'--:|' * (len(headings) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
