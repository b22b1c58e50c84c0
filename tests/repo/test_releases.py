"""What sets releases of PyTorch apart stands in one table, for predictions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import CHECKOUT, assert_none, file_name

PREDICTING = CHECKOUT / "bfc_tools" / "predicting"
#: The table, and the module that refuses a PyTorch whose internals nobody has looked at.
ALLOWED = {PREDICTING / "releases.py", PREDICTING / "guard.py"}


def _is_version(node: ast.expr) -> bool:
    """Whether an expression is a version of PyTorch: (2, 13), "2.13" or what holds it."""
    if isinstance(node, ast.Tuple):
        numbers = [one.value for one in node.elts if isinstance(one, ast.Constant)]
        return len(numbers) == len(node.elts) > 1 and numbers[0] == 2
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("2.")
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("torch_version", "__version__")


def comparisons(text: str) -> Iterator[int]:
    """The lines that compare versions of PyTorch."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and any(map(_is_version, (node.left, *node.comparators))):
            yield node.lineno


def _files() -> list[Path]:
    return [path for path in PREDICTING.rglob("*.py") if path not in ALLOWED]


def test_no_other_file_compares_versions_of_pytorch() -> None:
    """Add a field to `TorchRelease`, and ask `call.release` for it."""
    assert_none(
        f"{file_name(path)}:{line}" for path in _files() for line in comparisons(path.read_text())
    )


def test_the_reader_of_comparisons_sees_them() -> None:
    assert list(comparisons("if call.torch_version < (2, 12):\n    pass")) == [1]
    assert list(comparisons("x = torch.__version__ >= '2.9'\ny = cc >= (8, 0)")) == [1]
    assert list(comparisons("x = (2, 11) <= one.version")) == [1]
