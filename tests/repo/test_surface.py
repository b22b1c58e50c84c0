"""What a release promises to keep, as a list: names, parameters, defaults, commands and formats.

A change of it is a decision, which a reviewer sees in `surface.txt` beside this file. To write it
anew: BFC_WRITE_SURFACE=1 pytest tests/repo/test_surface.py. What may change when stands in
`docs/reference/compatibility.md`.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from public_names import REFERENCE, public_members, thing_of
from sources import CHECKOUT

from bfc.plans import plan
from bfc.trace import Trace
from bfc_tools.cli import commands

FILE = Path(__file__).with_name("surface.txt")
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
    header = (CHECKOUT / "bfc/include/bfc_allocator.h").read_text()
    version = re.search(r"#define BFC_ALLOCATOR_VERSION (\w+)", header)
    assert version is not None
    yield f"table in C: {version[1]}"


def test_nothing_of_it_changes_unseen(tmp_path) -> None:
    lines = [*of_python(), *of_commands(), *of_formats(tmp_path)]
    if "BFC_WRITE_SURFACE" in os.environ:
        FILE.write_text("\n".join(lines) + "\n")
    change = difflib.unified_diff(FILE.read_text().splitlines(), lines, "kept", "now", n=0)
    assert list(change) == [], "BFC_WRITE_SURFACE=1 writes it, if the change is meant"
