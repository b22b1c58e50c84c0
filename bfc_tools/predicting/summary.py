"""A prediction as a comment on a pull request: the answer, the figures, and what holds most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bfc.units import format_bytes
from bfc_tools.predicting.text import at_most, joined
from bfc_tools.study.markdown import code, table

if TYPE_CHECKING:
    from bfc_tools.predicting.prediction import Prediction
    from bfc_tools.predicting.verdict import Verdict
    from bfc_tools.study.advice import Advice

#: How many rows a table has.
ROWS = 5


def markdown(found: Prediction, verdict: Verdict, advice: Advice | None) -> Iterator[str]:
    """The lines of the comment. The first is the answer, as the command prints it."""
    yield f"**{verdict.answer}**"
    if advice is not None:
        yield from ["", advice.answer]
        yield from ["", "```sh", advice.to_copy, "```"] if advice.to_copy else []
    if not len(found.trace):
        return
    peaks = {
        "live": found.peak_requested,
        "allocated": found.peak_allocated,
        "reserved": found.peak_reserved,
    }
    yield ""
    yield from table(
        (at_most(found), "bytes"), [(name, format_bytes(nbytes)) for name, nbytes in peaks.items()]
    )
    yield ""
    yield f"The peak is at {code(found.peak.line) or 'an unknown line'}. What was live there:"
    yield ""
    yield from _rows("kind", found.peak.by_kind)
    yield ""
    yield from _rows("module", joined(found.peak.by_module))


def _rows(heading: str, held: Mapping[str, int]) -> Iterator[str]:
    total = sum(held.values()) or 1
    rows = [
        (code(name) or "(none)", format_bytes(nbytes), f"{nbytes / total:.1%}")
        for name, nbytes in list(held.items())[:ROWS]
    ]
    if rest := list(held.values())[ROWS:]:
        rows.append((f"{len(rest)} others", format_bytes(sum(rest)), f"{sum(rest) / total:.1%}"))
    yield from table((heading, "bytes", "share"), rows)
