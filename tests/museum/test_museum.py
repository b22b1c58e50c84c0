"""Every case of the museum: its figures come out, it is short, and it says what a case must say."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bfc_tools.cli import main
from bfc_tools.museum.case import KINDS, Case
from bfc_tools.museum.collection import all_cases, all_given_up, chosen
from bfc_tools.museum.figures import Figure
from bfc_tools.museum.pictures import map_of

CASES = all_cases()
MOST_LINES, MOST_OF_A_THREAD = 20, 3
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
# Predictions have an environment of their own: elsewhere their figures are left out, not skipped.
HAS_TORCH = importlib.util.find_spec("torch") is not None
RUNNABLE = [name for name, case in CASES.items() if HAS_TORCH or not case.needs_torch]


def code_lines(case: Case) -> int:
    """The lines of a case's functions, without what they are given to say."""
    tree = ast.parse(Path(inspect.getfile(case.reproduce)).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in functions)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "pytorch#198129" else name
        for name in RUNNABLE
    ],
)
def test_the_published_figures_come_out(name):
    case = CASES[name]
    trial = case.run()
    failures = [(it.what, it.text, it.shown, it.error) for it in case.failures(trial)]
    assert failures == []
    roles = Counter(it.role for it in trial.figures)
    assert roles["published"] + roles["cured, published"] >= 1, "all its figures built it"
    assert bool(case.cure) == bool(roles["cured"] + roles["cured, published"]), "a cure shows one"


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_what_it_must(name):
    case = CASES[name]
    assert SOURCE.fullmatch(case.source)
    assert re.fullmatch(r"20\d\d(-\d\d){0,2}", case.date)
    assert case.kind in KINDS
    assert case.within <= 0.05
    assert code_lines(case) <= MOST_LINES
    for text in (case.title, case.version, case.observed, case.why, case.upstream):
        assert text
        assert text == " ".join(text.split())
    assert len(case.title) <= 90
    assert len(re.findall(r"[.!?](?:\s|$)", case.why)) in (1, 2), "why in two sentences"


def test_no_thread_has_more_than_three_cases():
    threads = Counter(case.source for case in CASES.values())
    assert [source for source, cases in threads.items() if cases > MOST_OF_A_THREAD] == []


def test_what_was_given_up_says_why():
    for given_up in all_given_up().values():
        assert SOURCE.fullmatch(given_up.source)
        assert given_up.whose in ("ours", "hardware", "thread")
        assert given_up.reason
    assert not all_given_up().keys() & CASES.keys()


@pytest.mark.parametrize(
    ("text", "measured", "exact", "error"),
    [
        ("2,980 MiB", 2980 << 20, True, 0),
        ("0.27 GiB", round(0.274 * 2**30), True, 0),
        ("0.27 GiB", round(0.279 * 2**30), True, 0),  # cut off
        ("0.27 GiB", round(0.265 * 2**30) + 1, True, 0),  # rounded
        ("0.27 GiB", round(0.28 * 2**30) + 1, False, 0.037),
        ("100 MB", 101 * 10**6, False, 0.01),
        ("33", 33, True, 0),
        ("refused", "refused", True, 0),
        ("refused", "fits", False, float("inf")),
    ],
)
def test_a_figure_is_exact_to_its_last_digit(text, measured, exact, error):
    figure = Figure("some", text, measured, "published")
    assert figure.exact is exact
    assert figure.error == pytest.approx(error, abs=1e-3)


def test_a_figure_of_no_known_unit_is_refused():
    with pytest.raises(ValueError, match="is not a figure"):
        _ = Figure("some", "3 furlongs", 3, "published").exact


def test_the_command_lists_and_runs(capsys):
    assert main(["museum", "--kind", "fragmentation", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"pytorch#193400"} <= {one["case"] for one in listed}
    assert {one["kind"] for one in listed} == {"fragmentation"}
    assert main(["museum", "pytorch/pytorch#193400"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"reserved, cycle 100 +14,060 MiB +14,060 MiB\n", out)
    assert main(["museum", "nobody#1"]) == 2
    assert "`bfc museum` lists them" in capsys.readouterr().err


def test_the_command_says_what_is_off(capsys, monkeypatch):
    case = CASES["pytorch#193400"]

    def off(trial):
        trial.published("reserved", "100 MiB", 2**20)

    other = Case(**{key: getattr(case, key) for key in vars(case)} | {"reproduce": off})
    monkeypatch.setattr("bfc_tools.cli.museum.chosen", lambda name: {name: other})
    assert main(["museum", "pytorch#193400"]) == 1
    assert "99.0 % off" in capsys.readouterr().out


def test_a_case_is_found_by_any_name_of_its_thread():
    for name in ("pytorch#193400", "pytorch/pytorch#193400", "PyTorch#193400"):
        assert list(chosen(name)) == ["pytorch#193400"]
    assert list(chosen("https://github.com/pytorch/pytorch/pull/193400")) == ["pytorch#193400"]


def test_the_maps_of_a_case_show_what_it_took():
    trial = CASES["pytorch#193400"].run(recorded=True)
    before, after = map_of(trial.before), map_of(trial.after)
    assert before is not None
    assert after is not None
    assert before.png.startswith(b"\x89PNG")
    assert before.nbytes > 30 * after.nbytes
