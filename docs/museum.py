"""The table of the museum, made by running all cases whenever the site is built.

`{museum}` draws the cases, and `{given-up}` the threads that could not be reproduced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.collection import all_cases, all_given_up, page_of
from bfc_tools.museum.figures import Figure
from bfc_tools.museum.pictures import Map, map_of

#: The height of the larger map of a row, in pixels.
HEIGHT = 128
COLUMNS = ("case", "what happens", "library", "kind", "date", "there", "here", "cured")


def museum(cases: Mapping[str, Case]) -> str:
    """The table, with what filters and sorts it."""
    can_predict = importlib.util.find_spec("torch") is not None
    rows = []
    for name, case in cases.items():
        trial = None if case.needs_torch and not can_predict else case.run(recorded=True)
        rows.append(_row(name, case, trial))
    filters = [
        _choice("library", {case.library for case in cases.values()}),
        _choice("kind", {case.kind for case in cases.values()}),
        _choice("year", {case.date[:4] for case in cases.values()}),
        _choice("cured", {"yes", "no"}),
        '<input type="search" name="words" placeholder="words or version" aria-label="words">',
        f'<output name="count">{len(rows)} cases</output>',
    ]
    heads = "".join(f'<th scope="col"><button>{name}</button></th>' for name in COLUMNS)
    return "\n".join(
        [
            f'<form class="museum">{" ".join(filters)}</form>',
            f'<table class="museum"><thead><tr>{heads}</tr></thead>',
            *rows,
            "</table>",
        ]
    )


def _choice(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in sorted(values))
    options = f'<option value="">{name}</option>{options}'
    return f'<select name="{name}" aria-label="{name}">{options}</select>'


def _row(name: str, case: Case, trial: Trial | None) -> str:
    """A case as a body of the table: its row, and one with all of it, which is hidden at first."""
    figures = trial.figures if trial else []
    main = next((it for it in figures if it.role == "published"), None)
    cells = (
        f'<a href="{page_of(case.source)}">{escape(name)}</a>',
        escape(case.title),
        escape(case.library),
        escape(case.kind),
        escape(case.date),
        escape(main.text) if main else "",
        escape(main.shown) if main else "not run here",
        "yes" if case.cure else "no",
    )
    words = " ".join((name, case.title, case.library, case.version, case.observed, case.cure))
    facts = {
        "library": case.library,
        "kind": case.kind,
        "year": case.date[:4],
        "cured": "yes" if case.cure else "no",
        "words": words.lower(),
    }
    data = " ".join(f'data-{key}="{escape(value)}"' for key, value in facts.items())
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tbody {data} id="{escape(name.replace("#", "-"))}"><tr tabindex="0">{row}</tr>'
        f'<tr hidden><td colspan="{len(COLUMNS)}">{_whole(name, case, trial)}</td></tr></tbody>'
    )


def _whole(name: str, case: Case, trial: Trial | None) -> str:
    said = {
        "Observed": f"{case.observed} ({case.library} {case.version})",
        "Why": case.why,
        "Cure": case.cure or "none",
        "Upstream": case.upstream,
        "Inferred": " ".join(case.inferred) or "nothing",
        "Run it": f"bfc museum {name}",
    }
    parts = [f"<p><b>{key}</b> {escape(text)}</p>" for key, text in said.items()]
    if trial:
        parts = [_figures(trial.figures), _maps(trial), *parts]
    return "".join(parts)


def _figures(figures: Iterable[Figure]) -> str:
    rows = "".join(
        f"<tr><td>{escape(it.what)}</td><td>{'' if it.role == 'cured' else escape(it.text)}</td>"
        f"<td>{escape(it.shown)}</td><td>{escape(it.role)}</td></tr>"
        for it in figures
    )
    return f"<table><tr><th>figure</th><th>there</th><th>here</th><th></th></tr>{rows}</table>"


def _maps(trial: Trial) -> str:
    maps = {"before": map_of(trial.before), "after the cure": map_of(trial.after)}
    largest = max((it.nbytes for it in maps.values() if it), default=0)
    return "".join(_figure(said, it, largest) for said, it in maps.items() if it)


def _figure(said: str, drawn: Map, largest: int) -> str:
    height = max(2, round(HEIGHT * drawn.nbytes / largest))
    text = f"what lay where, {said}"
    return (
        f'<figure><img src="{drawn.url}" alt="{text}" height="{height}" width="320">'
        f"<figcaption>{said}</figcaption></figure>"
    )


def given_up() -> str:
    rows = "".join(
        f'<tr><td><a href="{page_of(it.source)}">{escape(name)}</a></td>'
        f"<td>{escape(it.observed)}</td><td>{escape(it.whose)}</td><td>{escape(it.reason)}</td></tr>"
        for name, it in all_given_up().items()
    )
    heads = "<tr><th>thread</th><th>observed</th><th>whose</th><th>reason</th></tr>"
    return f"<table>{heads}{rows}</table>"


class Museum(Directive):  # type: ignore[misc]
    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", museum(all_cases()), format="html")]


class GivenUpThreads(Directive):  # type: ignore[misc]
    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", given_up(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("museum", Museum)
    app.add_directive("given-up", GivenUpThreads)
    app.add_js_file("museum.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
