"""All cases, found by their files, and run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TypeVar

from bfc_tools.museum import cases, given_up
from bfc_tools.museum.case import Case, GivenUp

T = TypeVar("T", Case, GivenUp)


@cache
def all_cases() -> Mapping[str, Case]:
    """The cases by their names, such as "pytorch#193400", in the order of the names."""
    return _found(cases, "CASE", Case)


@cache
def all_given_up() -> Mapping[str, GivenUp]:
    """The threads that could not be reproduced, by the same names."""
    return _found(given_up, "GIVEN_UP", GivenUp)


def chosen(name: str) -> Mapping[str, Case]:
    """The cases that a name stands for: one case, or all of a thread, in any of the forms
    "pytorch#193400", "pytorch/pytorch#193400" and the address of the thread's page.

    Raises
    ------
    ValueError
        If there is none.
    """
    wanted = name.strip().lower()
    found = {
        key: case
        for key, case in all_cases().items()
        if wanted in (key.lower(), case.source.lower(), case.source.split("/")[-1].lower())
        or wanted.rstrip("/").endswith(tuple(page.lower() for page in _pages(case.source)))
    }
    if not found:
        raise ValueError(f"there is no case {name!r} in the museum: `bfc museum` lists them")
    return found


def page_of(source: str) -> str:
    """The address of a thread's page."""
    return f"https://{_pages(source)[0]}"


def _pages(source: str) -> list[str]:
    thread, _, number = source.partition("#")
    return [f"github.com/{thread}/{kind}/{number}" for kind in ("issues", "pull")]


def _found(folder: ModuleType, name: str, kind: type[T]) -> dict[str, T]:
    made: dict[str, T] = {}
    for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda it: it.name):
        one = getattr(importlib.import_module(f"{folder.__name__}.{module.name}"), name)
        assert isinstance(one, kind)
        made[_name_of(module.name, one.source)] = one
    return made


def _name_of(module: str, source: str) -> str:
    """ "pytorch#193400"; "pytorch#193400b" for the module pytorch_193400_b."""
    letter = module.rpartition("_")[2]
    return source.split("/")[-1] + (letter if len(letter) == 1 and letter.isalpha() else "")
