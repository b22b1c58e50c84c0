"""What is asked of an object of a compiled class is there.

Cython takes a name that the class does not declare for an attribute of Python, and looks it up when
the line runs: where a mistyped name is a compiler's error in C++, it is an AttributeError here, in
the middle of what holds a lock.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from Cython.Compiler import Main, Pipeline
from Cython.Compiler.ParseTreeTransforms import AnalyseExpressionsTransform
from Cython.Compiler.Scanning import FileSourceDescriptor
from Cython.Compiler.Visitor import TreeVisitor
from sources import CHECKOUT, COMPILED, assert_none, file_name, module_name

#: A name that Cython found at a line: the class of the object, and the name.
Found = tuple[int, type, str]


class Lookups(TreeVisitor):
    """Notes each name that an object of a compiled class is asked for as Python asks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Found] = []

    def __call__(self, tree: Any) -> Any:
        self.visit(tree)
        return tree

    def visit_Node(self, node: Any) -> None:  # noqa: N802  (the visitor calls it so)
        self.visitchildren(node)

    def visit_AttributeNode(self, node: Any) -> None:  # noqa: N802
        self.visitchildren(node)
        of = node.obj.type
        if of is not None and of.is_extension_type and not of.is_builtin_type and node.is_py_attr:
            home = import_module(of.scope.parent_scope.qualified_name)
            self.found.append((node.pos[1], getattr(home, of.name), node.attribute))


@pytest.fixture(scope="module")
def context() -> Main.Context:
    """One for all modules: each would read the declarations of all others again."""
    text = (CHECKOUT / "setup.py").read_text()
    (directives,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "DIRECTIVES"
    )
    options = Main.CompilationOptions(cplus=True, compiler_directives=directives)
    return Main.Context.from_options(options)


def lookups(context: Main.Context, path: Path, name: str) -> list[Found]:
    """The names that a module looks up, by Cython's own compiler up to where it knows all types."""
    source = Main.CompilationSource(FileSourceDescriptor(str(path)), name, str(CHECKOUT))
    result = Main.create_default_resultobj(source, context.options)
    steps = Pipeline.create_pyx_pipeline(context, context.options, result)
    kinds = [type(step) for step in steps]
    noted = Lookups()
    upto = steps[: kinds.index(AnalyseExpressionsTransform) + 1]
    error, _ = Pipeline.run_pipeline([*upto, noted], source)
    assert error is None, error
    return noted.found


def missing(found: list[Found]) -> Iterator[tuple[int, str]]:
    for line, of, name in found:
        if not hasattr(of, name):
            yield line, f"{of.__name__}.{name}"


def test_every_name_is_one_of_the_class(
    context: Main.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared, or a method or property of Python's. `(<object> self).name` says that a subclass
    has it."""
    monkeypatch.chdir(CHECKOUT)  # where Cython looks for what a module cimports
    assert_none(
        f"{file_name(path)}:{line}: {name} is neither declared nor defined"
        for path in COMPILED
        if path.suffix == ".pyx"
        for line, name in missing(lookups(context, path, module_name(path)))
    )


def test_a_mistyped_name_is_found(
    context: Main.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(CHECKOUT)
    planted = tmp_path / "planted.pyx"
    planted.write_text(
        "from bfc.allocators._allocator cimport Allocator\n\n"
        "def look(Allocator pool, object other):\n"
        "    pool.lock.acquire()\n"
        "    pool.polol.check()\n"
        "    other.polol.check(pool.stats())\n"
        "    pool.held = False\n"
        "    pool.lock.release()\n"
    )
    found = list(missing(lookups(context, planted, "planted")))
    assert found == [(5, "Allocator.polol"), (7, "Allocator.held")]
