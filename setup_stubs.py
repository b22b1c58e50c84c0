"""The docstrings of the compiled modules, put into the stubs of a wheel, where editors look.

The checkout's stubs have none: the docstrings stand in the .pyx. setup.py runs this with the folder
that a wheel is made from. It reads the stubs of the checkout, and writes those of that folder.

    python setup_stubs.py build/cpython-311-x86_64-linux-gnu-01234567/lib
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent / "bfc"
STUBS = sorted(ROOT.rglob("*.pyi"))
#: Special methods that are slots of the type: those of Python itself, with docstrings of Python's.
SLOTS = (types.WrapperDescriptorType, types.BuiltinMethodType)
#: What Cython gives every class, so that none can be pickled.
UNPICKLABLE = ("__reduce__", "__setstate__", "__reduce_cython__", "__setstate_cython__")
Documented = ast.ClassDef | ast.FunctionDef


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
    """The text of a stub, with the docstrings of its module."""
    stub = path.read_text()
    lines = stub.splitlines()
    found = list(documented(path, ast.parse(stub)))
    for node, text in sorted(found, key=lambda pair: -pair[0].lineno):
        if text is None:
            continue
        first, margin = node.body[0], " " * (node.col_offset + 4)
        written = textwrap.indent(text.replace("\\", "\\\\"), margin).strip()
        end = f"\n{margin}" if "\n" in written else ""
        added = [f'{margin}"""{written}{end}"""']
        if isinstance(first, ast.Expr):  # the three dots
            before = lines[first.lineno - 1][: first.col_offset].rstrip()
            lines[first.lineno - 1 : first.lineno] = [*filter(None, [before]), *added]
        else:
            decorated = getattr(first, "decorator_list", None) or [first]
            lines[decorated[0].lineno - 1 : decorated[0].lineno - 1] = [*added, ""]
    return "\n".join(lines) + "\n" * bool(lines)


def main() -> None:
    """Imports the modules from the folder given, and writes their stubs there."""
    sys.path.insert(0, sys.argv[1])
    for stub in STUBS:
        made = Path(sys.argv[1], stub.relative_to(ROOT.parent))
        made.write_text(with_docstrings(stub))


if __name__ == "__main__":
    main()
