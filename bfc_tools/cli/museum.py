"""`bfc museum`: published reports of memory that behaved oddly, each reproduced here."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from bfc_tools.cli.tables import Cells, add_formats, show
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.collection import all_cases, chosen, page_of

HELP = "reproduce published reports of memory that behaved oddly, without a GPU"
EPILOG = """\
Without CASE it lists the cases. With one it runs it, and prints each published figure beside the
one that is measured here, and what cures it. CASE is a name of the list, such as pytorch#193400,
or the address of the thread's page.

exit code: 0 all well, 1 a figure is further off than its case allows, 2 a wrong call.
"""

#: What a figure's role is called beside it.
ROLES = {
    "used": "used to build it",
    "published": "",
    "cured": "after the cure",
    "cured, published": "after the cure, published",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", nargs="?", metavar="CASE", help="the case to run")
    parser.add_argument("--library", help="list the cases of one library only, such as PyTorch")
    parser.add_argument("--kind", help="list the cases of one kind only, such as fragmentation")
    add_formats(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Lists the cases, or runs one. Returns whether all figures are as near as they are to be."""
    if arguments.case is None:
        return _list(arguments)
    ran = {name: (case, case.run()) for name, case in chosen(arguments.case).items()}
    show(
        arguments,
        text=lambda: "\n\n".join(_told(name, *it) for name, it in ran.items()),
        as_json=lambda: json.dumps(
            [_facts(name, case) | {"figures": _rows(trial)} for name, (case, trial) in ran.items()],
            indent=2,
        ),
        rows=lambda: [
            {"case": name, **row} for name, (_, trial) in ran.items() for row in _rows(trial)
        ],
    )
    return not any(case.failures(trial) for case, trial in ran.values())


def _list(arguments: argparse.Namespace) -> bool:
    wanted = {key: getattr(arguments, key) for key in ("library", "kind")}
    found = {
        name: case
        for name, case in all_cases().items()
        if all(value in (None, getattr(case, key)) for key, value in wanted.items())
    }
    show(
        arguments,
        text=lambda: "\n".join(_listed(found)),
        as_json=lambda: json.dumps([_facts(*it) for it in found.items()], indent=2),
        rows=lambda: [_facts(*it) for it in found.items()],
    )
    return True


def _listed(found: dict[str, Case]) -> Iterator[str]:
    width = max(map(len, found), default=0)
    kinds = max((len(case.kind) for case in found.values()), default=0)
    for name, case in found.items():
        yield f"{name:{width}}  {case.kind:{kinds}}  {case.title}"
    yield f"{len(found)} cases. Run one: bfc museum NAME"


def _facts(name: str, case: Case) -> dict[str, Any]:
    """What a case says of itself, without its figures."""
    facts = ("title", "library", "version", "kind", "date", "observed", "why", "cure", "upstream")
    return {
        "case": name,
        **{fact: getattr(case, fact) for fact in facts},
        "page": page_of(case.source),
        "inferred": " ".join(case.inferred),
    }


def _rows(trial: Trial) -> list[Cells]:
    return [
        {
            "figure": figure.what,
            "role": figure.role,
            "expected": figure.text,
            "measured": figure.shown,
            "exact": figure.exact,
            "value": figure.measured,
        }
        for figure in trial.figures
    ]


def _told(name: str, case: Case, trial: Trial) -> str:
    """A case that ran, for people."""
    heads = ("figure", "there", "here", "")
    rows = [
        (
            figure.what,
            "" if figure.role == "cured" else figure.text,
            figure.shown,
            "; ".join(
                filter(None, (ROLES[figure.role], "" if figure.exact else _off(figure.error)))
            ),
        )
        for figure in trial.figures
    ]
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(3)]
    table = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in (heads, *rows)
    ]
    paragraphs = {
        "Observed": case.observed,
        "Why": case.why,
        "Cure": case.cure or "none",
        "Upstream": case.upstream,
        "Inferred": " ".join(case.inferred) or "nothing",
    }
    return "\n".join(
        [
            f"{name}: {case.title}",
            f"{page_of(case.source)}, {case.date}. {case.library} {case.version}",
            "",
            *table,
            "",
            *(textwrap.fill(f"{key}: {text}", 100) for key, text in paragraphs.items()),
        ]
    )


def _off(error: float) -> str:
    return "differs" if error == float("inf") else f"{100 * error:.1f} % off"
