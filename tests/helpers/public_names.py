"""The public names: what the reference shows, and the members of its classes."""

from __future__ import annotations

import importlib
from typing import Any

from documents import ROOT
from sources import is_ours

REFERENCE = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))


def thing_of(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def public_members(owner: type) -> list[str]:
    ours = [kind for kind in owner.__mro__ if is_ours(kind.__module__)]
    return sorted({name for kind in ours for name in vars(kind) if not name.startswith("_")})
