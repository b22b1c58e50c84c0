"""The docstrings of the compiled modules, put into their stubs, where editors look for them.

Run it after a docstring in a .pyx has changed: `make stubs`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import bfc

ROOT = Path(bfc.__file__).parent
STUBS = sorted(ROOT.rglob("*.pyi"))
#: Special methods that are slots of the type: those of Python itself, with docstrings of Python's.
SLOTS = (types.WrapperDescriptorType, types.BuiltinMethodType)
#: What Cython gives every class, so that none can be pickled.
UNPICKLABLE = ("__reduce__", "__setstate__", "__reduce_cython__", "__setstate_cython__")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def module_of(path: Path) -> types.ModuleType:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return importlib.import_module(name)


def documented(path: Path, tree: ast.Module) -> Iterator[tuple[Documented, str | None]]:
    """Each class, function and property of a stub, and its docstring in the compiled module."""
    module = module_of(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            compiled = vars(module)[node.name]
            yield node, docstring(node.name, compiled)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield member, docstring(member.name, vars(compiled).get(member.name))


def docstring(name: str, compiled: object) -> str | None:
    """Its own, without the signature that Cython writes above it."""
    text = getattr(compiled, "__doc__", None)
    if compiled is None or text is None:  # None itself has a docstring, from Python 3.13 on
        return None
    if name in UNPICKLABLE or (isinstance(compiled, SLOTS) and name.startswith("__")):
        return None
    first, _, rest = text.partition("\n")
    if re.match(rf"(\w+\.)*{name}(\(.*\)|: '[^']+')", first):
        text = rest
    return inspect.cleandoc(text) or None


def with_docstrings(path: Path) -> str:
    """The stub's text, of which the formatter has yet to make a neat one."""
    tree = ast.parse(path.read_text())
    if not tree.body:
        return path.read_text()
    for node, text in documented(path, tree):
        if ast.get_docstring(node) is not None:
            del node.body[0]
        if text is not None:
            margin = " " * (node.col_offset + 4)
            lines = textwrap.indent(text, margin).lstrip() + ("\n" + margin) * ("\n" in text)
            node.body = [
                ast.Expr(ast.Constant(lines)),
                *(item for item in node.body if not is_ellipsis(item)),
            ]
        if not node.body:
            node.body = [ast.Expr(ast.Constant(...))]
    return ast.unparse(ast.fix_missing_locations(tree))


def is_ellipsis(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and node.value.value is ...
    )


def main() -> None:
    for path in STUBS:
        path.write_text(with_docstrings(path))
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--fix", "--quiet"], ["format", "--quiet"]):
        subprocess.run([*ruff, *command, *map(str, STUBS)], check=True)


if __name__ == "__main__":
    main()
