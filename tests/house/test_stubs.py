"""The stubs of the compiled modules say what is compiled: the same names, kinds and parameters."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub_docstrings import ROOT, SLOTS, STUBS, UNPICKLABLE, documented, module_of

import bfc

COMPILED = sorted(path.with_suffix(".pyi") for path in ROOT.rglob("*.pyx"))


def classes_of(path: Path) -> Iterator[tuple[ast.ClassDef, type]]:
    module = module_of(path)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node, getattr(module, node.name)


def is_public(name: str) -> bool:
    return not name.startswith("_")


def parameters(function: object) -> list[tuple[str, str, object]]:
    """The name, kind and default of each, without the annotations. Nobody names `self`, so its kind
    does not matter."""
    return [
        (found.name, found.kind.description if found.name != "self" else "", found.default)
        for found in inspect.signature(function).parameters.values()
    ]


def written(node: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """The parameters of a stub's function."""
    space: dict[str, object] = {}
    exec(f"from __future__ import annotations\n{ast.unparse(plain(node))}", space)
    return parameters(space[node.name])


def plain(node: ast.FunctionDef) -> ast.FunctionDef:
    return ast.FunctionDef(node.name, node.args, node.body, [], None, None, lineno=0)


def made_with(source: str, name: str) -> list[tuple[str, object]] | None:
    """The names and defaults of a class's `__init__`, or else `__cinit__`: nothing shows them when
    it runs. None if it takes anything, as one does that leaves the arguments to a subclass."""
    body = source[source.index(f"cdef class {name}") :]
    body = body[: body.find("\ncdef class ", 1)] if "\ncdef class " in body[1:] else body
    found = re.search(r"def __init__\((.*?)\):", body, re.DOTALL) or re.search(
        r"def __cinit__\((.*?)\):", body, re.DOTALL
    )
    assert found is not None, name
    if "*args" in found[1]:
        return None
    # From each of `dtype`, `Buffer base not None` and `shape=None` what stands last.
    arguments = re.findall(r"(\w+(?:=[^,]+)?)(?: not None)?\s*(?:,|$)", found[1])
    space: dict[str, object] = {}
    exec(f"def __init__({', '.join(arguments)}): ...", space)
    return [(name, default) for name, _kind, default in parameters(space["__init__"])]


def is_property(node: ast.FunctionDef) -> bool:
    return [ast.unparse(decorator) for decorator in node.decorator_list] == ["property"]


def members(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    assert all(isinstance(item, ast.FunctionDef | ast.Expr) for item in node.body)
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def test_every_compiled_module_has_a_stub():
    assert STUBS == COMPILED


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_public_names_of_its_module(path: Path):
    module = module_of(path)
    body = ast.parse(path.read_text()).body
    stubbed = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stubbed |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    own = {
        name
        for name, value in vars(module).items()
        if is_public(name)
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    }
    assert stubbed == own


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_bases_and_public_members_of_its_classes(path: Path):
    for node, kind in classes_of(path):
        bases = [ast.unparse(base) for base in node.bases] or ["object"]
        assert bases == [base.__name__ for base in kind.__bases__]
        stubbed = {name for name in members(node) if is_public(name)}
        assert stubbed == {name for name in vars(kind) if is_public(name)}, kind


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_special_methods_of_its_classes(path: Path):
    for node, kind in classes_of(path):
        stubbed = {name for name in members(node) if not is_public(name)}
        if sys.version_info < (3, 12):
            stubbed.discard("__buffer__")  # Python names the slot from 3.12 on
        assert [name for name in stubbed if not hasattr(kind, name)] == []
        assert "__init__" in stubbed or "__init__" not in vars(kind), kind
        special = {
            name
            for name, value in vars(kind).items()
            if name.startswith("__") and callable(value) and not isinstance(value, SLOTS)
        }
        assert special - set(UNPICKLABLE) <= stubbed, kind


def is_slot(name: str, compiled: object) -> bool:
    """Whether it is a special method of Python's, and no method of ours."""
    return name in UNPICKLABLE or (name.startswith("__") and isinstance(compiled, SLOTS))


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_kinds_and_parameters_of_what_it_names(path: Path):
    module = module_of(path)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            assert written(node) == parameters(getattr(module, node.name)), node.name
    for node, kind in classes_of(path):
        for name, member in members(node).items():
            compiled = vars(kind).get(name)
            assert is_property(member) == isinstance(compiled, types.GetSetDescriptorType), name
            if name == "__init__":
                made = made_with(path.with_suffix(".pyx").read_text(), node.name)
                told = [(name, value) for name, _, value in written(member)]
                assert made in (told, None), node.name
            elif not (is_property(member) or compiled is None or is_slot(name, compiled)):
                assert written(member) == parameters(compiled), name


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_docstrings_of_its_module(path: Path):
    for node, text in documented(path, ast.parse(path.read_text())):
        assert ast.get_docstring(node) == text, f"{node.name}: run `make stubs`"


PUBLIC = [
    kind
    for kind in (getattr(bfc, name) for name in bfc.__all__)
    if inspect.isclass(kind) and not issubclass(kind, Exception)
]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_the_signature_of_a_class_can_be_read(kind: type):
    assert "self" not in inspect.signature(kind).parameters


MADE = (bfc.BFCAllocator, bfc.CachingAllocator, bfc.PinnedAllocator, bfc.BufferView, bfc.use_stream)


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_signature_has_the_positional_parameters_of_the_constructor(kind: type):
    found = inspect.signature(kind).parameters.values()
    count = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in found)
    assert count
    with pytest.raises(TypeError, match=rf"takes (exactly|at most) {count} positional"):
        kind(*[None] * (count + 1))


def test_a_class_derived_from_a_compiled_one_has_its_own_signature():
    class Derived(bfc.BFCAllocator):
        pass

    class Other(bfc.BFCAllocator):
        def __init__(self, size: int):
            super().__init__(bfc.SimulatedSubAllocator(size))

    assert inspect.signature(Derived) == inspect.signature(bfc.BFCAllocator)
    assert list(inspect.signature(Other).parameters) == ["size"]
