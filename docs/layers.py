"""The layers of a folder, as the list in its docstring has them: for the drawing of the layers, and
for the test that holds that list to what is there and to what imports what."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "bfc"
#: A line of the list: the entries of one layer, and what they are.
LAYER = re.compile(r"^ *(\*\.py|_?\w[\w.]*/?(?:, _?\w[\w.]*/?)*)(?:  .*)?$", re.MULTILINE)
#: The entry of a folder whose files nothing lists, and none of which imports another.
ALL_FILES = "*.py"


def layers_of(folder: Path) -> list[list[str]]:
    """The entries of a folder, the lowest layer first; none where its docstring has no list."""
    text = (folder / "__init__.py").read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    _, _, listed = docstring.rpartition("In order:\n")
    files = sorted(path.name for path in folder.glob(ALL_FILES) if path.name != "__init__.py")
    return [files if line == ALL_FILES else line.split(", ") for line in LAYER.findall(listed)]
