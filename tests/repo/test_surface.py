"""What a release promises to keep, as a list: names, parameters, defaults, commands and formats.

A change of it is a decision, which a reviewer sees in `surface.txt` beside this file. To write it
anew: BFC_WRITE_SURFACE=1 pytest tests/repo/test_surface.py. What may change when stands in
`docs/reference/compatibility.md`. A release keeps its list as `surface-1.0.0.txt`: what was
promised there, the next minor releases keep.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import io
import json
import os
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import DOCUMENTS
from public_names import REFERENCE, public_members, thing_of
from sources import CHECKOUT, PACKAGES

import bfc
import bfc_pytest
from bfc.plans import plan
from bfc.trace import Trace
from bfc_tools.cli import commands, main
from bfc_tools.cli.endings import Exit
from bfc_tools.study import budgets

FILE = Path(__file__).with_name("surface.txt")
#: What each release has promised, by its version. Before the first there is none.
RELEASED = {
    tuple(map(int, path.stem.partition("-")[2].split("."))): path.read_text().splitlines()
    for path in sorted(FILE.parent.glob("surface-*.txt"))
}
VERSION = tuple(int(number) for number in bfc.__version__.split("."))
#: Variables of the environment that bfc sets for its own processes.
OWN_USE = {"BFC_RUN_FIRST"}
#: The commands whose JSON can be asked for here: predictions need PyTorch, and their keys stand on
#: a page (tests/predicting/test_pages.py).
WITH_JSON = (
    "replay t.npz --device simulated:1GiB --passes 1",
    "advise t.npz --device 64MiB --jobs 1",
    "diff t.npz t.npz",
    "plan t.npz -o p.npz",
    "museum",
)
#: Parameters whose defaults move to newer originals.
MOVING = ("torch", "tensorflow")
#: Names of the driver's calls, which depend on the run.
BY_RUN = "driver_calls_by_kind"
NAMES = re.compile(r"^ *\.\. auto(?:class|exception|function):: (bfc[\w.]+)$", re.MULTILINE)


def parameters(thing: Any) -> str:
    """Names and defaults: types become wider, and are not promised."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    bare = [
        one.replace(annotation=inspect.Parameter.empty, default=_plain(one.default))
        for name, one in found.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(inspect.Signature(bare))


class _Named:
    """A default of which only the kind is shown: the environment differs between machines."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind.__name__}>"


def _plain(default: Any) -> Any:
    is_plain = isinstance(default, bool | int | float | str | tuple | types.NoneType)
    if is_plain or default is inspect.Parameter.empty:
        return default
    return _Named(type(default))


def of_python() -> Iterator[str]:
    for name in sorted(set(NAMES.findall(REFERENCE))):
        thing = thing_of(name)
        yield name + parameters(thing)
        for member in public_members(thing) if isinstance(thing, type) else ():
            value = inspect.getattr_static(thing, member)
            is_called = callable(getattr(thing, member)) and not isinstance(value, property)
            yield f"{name}.{member}{parameters(getattr(thing, member)) if is_called else ''}"


def of_commands() -> Iterator[str]:
    for name, parser in commands()[1].items():
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            words = "|".join(action.option_strings) or str(action.metavar or action.dest)
            default = action.default
            shown = "" if default in (None, False, argparse.SUPPRESS) else f" = {default}"
            yield f"bfc {name} {words}{shown}"
        codes = re.search(r"^exit code: (.*?)(?:\n\n|\Z)", parser.epilog or "", re.M | re.S)
        if codes is not None:
            yield f"bfc {name} exits with {' '.join(codes[1].split())}"


def of_formats(folder: Path) -> Iterator[str]:
    numbers = {name: [0] for name in ("time_us", "owner", "stack", "pool")}
    Trace([0], [0], [512], **numbers, owners=[""], stacks=[(0, 0)], pools=[(0, 0)], meta={}).save(
        folder / "trace.npz"
    )
    with np.load(folder / "trace.npz") as file:
        yield f"columns of traces: {', '.join(sorted(file))}"
    yield f"format of plans: {plan.VERSION}"
    yield f"format of {budgets.FILE}: {budgets.FORMAT}"


def of_c() -> Iterator[str]:
    """The version of the table in C, and its fields in their order."""
    header = (CHECKOUT / "bfc/include/bfc_allocator.h").read_text()
    version = re.search(r"#define BFC_ALLOCATOR_VERSION (\w+)", header)
    table = re.search(r"typedef struct bfc_allocator \{(.*?)\n\}", header, re.DOTALL)
    assert version is not None
    assert table is not None
    yield f"table in C: {version[1]}"
    code = re.sub(r"/\*.*?\*/", "", table[1], flags=re.DOTALL)
    for number, field in enumerate(filter(str.strip, code.split(";"))):
        yield f"table in C, field {number}: {' '.join(field.split())}"


def of_outputs() -> Iterator[str]:
    """The keys of what commands print with `--json`. Keys below a list are those of its rows."""
    ops, sizes = [0, 0, 1, 1] * 3, [2 << 20, 1 << 20, 0, 0] * 3
    Trace(ops, [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5], sizes).save("t.npz")
    for words in WITH_JSON:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([*words.split(), "--json"]) == 0
        name = words.partition(" ")[0]
        yield from (f"bfc {name} --json has {key}" for key in _keys(json.loads(printed.getvalue())))


def _keys(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, list) and value:
        yield from _keys(value[0], f"{above}[]")
    elif isinstance(value, dict) and not above.endswith(BY_RUN):
        for name, below in value.items():
            yield f"{above}.{name}".lstrip(".")
            yield from _keys(below, f"{above}.{name}")


def of_the_environment() -> Iterator[str]:
    for name in sorted(variables() - OWN_USE):
        yield f"variable of the environment: {name}"


def variables() -> set[str]:
    """Those that the packages read, as texts in Python."""
    code = "".join(
        path.read_text()
        for package in PACKAGES
        for path in package.rglob("*.py*")
        if path.suffix in (".py", ".pyx")
    )
    return set(re.findall(r'"(BFC_[A-Z_]+)"(?!\()', code))


def of_the_installation() -> Iterator[str]:
    """What other programs find by its name: commands, plugins, extras, and what pytest gets."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    yield from (f"command: {name}" for name in project["scripts"])
    for group, points in project["entry-points"].items():
        yield from (f"entry point of {group}: {name}" for name in points)
    yield from (f"extra: {name}" for name in project["optional-dependencies"])
    fixtures = re.findall(r"^@pytest\.fixture\ndef (\w+)", inspect.getsource(bfc_pytest), re.M)
    yield from (f"fixture of pytest: {name}" for name in fixtures)
    yield f"option of pytest: {budgets.WRITE}"
    yield from (f"exit code {code.value}: {code.name.lower()}" for code in Exit)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    of_files = [*of_formats(tmp_path), *of_c(), *of_outputs()]
    around = [*of_the_environment(), *of_the_installation()]
    return [*of_python(), *of_commands(), *of_files, *around]


def test_nothing_of_it_changes_unseen(lines) -> None:
    if "BFC_WRITE_SURFACE" in os.environ:
        FILE.write_text("\n".join(lines) + "\n")
    change = difflib.unified_diff(FILE.read_text().splitlines(), lines, "kept", "now", n=0)
    assert list(change) == [], "BFC_WRITE_SURFACE=1 writes it, if the change is meant"


def test_it_has_nothing_that_is_not_promised() -> None:
    """No name with an underscore before it, no text for people, and no time."""
    named = [line.partition("(")[0] for line in FILE.read_text().splitlines()]
    private = re.compile(r"^bfc\.(\w+\.)*_(?!_)")
    assert [name for name in named if private.match(name)] == []


def test_every_variable_of_the_environment_is_documented() -> None:
    documented = {
        name for path in DOCUMENTS for name in re.findall(r"\bBFC_[A-Z_]+\b", path.read_text())
    }
    assert variables() - OWN_USE <= documented


def _signature(line: str) -> tuple[str, dict[str, str] | None]:
    """A name, and its parameters with their defaults; None for what has no parameters."""
    found = re.fullmatch(r"(bfc[\w.]*)(\(.*\))", line)
    if found is None:
        return line, None
    code = re.sub(r"<(\w+)>", r"'\1'", found[2])
    (function,) = ast.parse(f"def f{code}: pass").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    names = {
        one.arg: ast.dump(two) if two else "" for one, two in zip(plain, defaults, strict=True)
    }
    for one, two in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        names[one.arg] = f"by name, {ast.dump(two) if two else ''}"
    return found[1], names


def broken(before: list[str], now: list[str]) -> list[str]:
    """What was promised and is not kept. A new line breaks nothing; nor does a parameter with a
    default that comes after the others, or by name alone; nor a code beside those of a command."""
    present = dict(map(_signature, now))
    codes = {name: set(re.findall(r"\b\d+\b", line)) for name, line in _exits(now)}
    faults = []
    for line in before:
        name, wanted = _signature(line)
        if " exits with " in line:
            (command, _), *_ = _exits([line])
            kept = set(re.findall(r"\b\d+\b", line)) <= codes.get(command, set())
        elif wanted is None:
            kept = name in present
        else:
            kept = _serves(wanted, present.get(name))
        faults += [] if kept else [line]
    return faults


def _exits(lines: list[str]) -> list[tuple[str, str]]:
    return [(line.partition(" exits with ")[0], line) for line in lines if " exits with " in line]


def _serves(wanted: dict[str, str], has: dict[str, str] | None) -> bool:
    """Whether every call that served still does."""
    if has is None or wanted.keys() - has.keys():
        return False
    if any(has[name] != one for name, one in wanted.items() if name not in MOVING):
        return False
    places = [
        [name for name in one if not one[name].startswith("by name")] for one in (wanted, has)
    ]
    more = [one for name, one in has.items() if name not in wanted]
    return places[1][: len(places[0])] == places[0] and "" not in more and "by name, " not in more


def test_what_a_release_has_promised_is_kept(lines) -> None:
    """By all later ones with its first number."""
    faults = {
        version: broken(promised, lines)
        for version, promised in RELEASED.items()
        if version[0] == VERSION[0]
    }
    assert not any(faults.values()), faults


def test_a_release_that_has_a_date_has_its_list() -> None:
    changelog = (CHECKOUT / "CHANGELOG.md").read_text()
    dated = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert sorted(tuple(map(int, one.split("."))) for one in dated) == sorted(RELEASED)


KEPT = [
    "bfc.f(a, b=1, *, c=2, torch='2.15')",
    "bfc.C",
    "bfc run --x = 3",
    "bfc run exits with 0 good, 2 bad.",
]


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        (KEPT[0], "bfc.f(a, b=1, d=None, *, c=2, torch='2.15', e=())", True),
        (KEPT[0], "bfc.f(a, b=1, *, c=2, torch='2.17')", True),
        (KEPT[0], "bfc.f(a, b=2, *, c=2, torch='2.15')", False),
        (KEPT[0], "bfc.f(a, d=None, b=1, *, c=2, torch='2.15')", False),
        (KEPT[0], "bfc.f(a, b=1, *, c=2, torch='2.15', e)", False),
        (KEPT[0], "bfc.f(a, b=1, *, c=2)", False),
        (KEPT[1], "bfc.D", False),
        (KEPT[2], "bfc run --x = 4", False),
        (KEPT[3], "bfc run exits with 0 well, 2 bad, 3 worse.", True),
        (KEPT[3], "bfc run exits with 0 good, 3 bad.", False),
    ],
)
def test_a_broken_promise_is_found_out(old: str, new: str, is_kept: bool) -> None:
    now = [new if line == old else line for line in KEPT]
    assert broken(KEPT, [*now, "bfc.more"]) == ([] if is_kept else [old])
