"""The stubs of the compiled modules say what is compiled: the same names, kinds and parameters."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from sources import CHECKOUT, FILES, assert_none

import bfc
from setup_stubs import SLOTS, STUBS, UNPICKLABLE, documented, module_of, with_docstrings


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
    begins = re.search(rf"cdef class {name}\b", source)
    assert begins is not None, name
    body = source[begins.start() :]
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
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def test_each_stub_is_imported_by_what_is_typed():
    """mypy says which stub is missing, and nothing else would say which is not needed."""
    typed = [path for path in FILES if path.suffix in (".py", ".pyi")]
    typed += sorted((CHECKOUT / "tests").rglob("*.py"))
    text = "\n".join(path.read_text() for path in typed)
    unused = {path.stem for path in STUBS if not re.search(rf"import.*\b{path.stem}\b", text)}
    unused -= set(re.findall(r"from [\w.]+\.(\w+) import", text))
    assert unused == set()


def own_names(path: Path) -> set[str]:
    """The public names that a module defines."""
    module = module_of(path)
    return {
        name
        for name, value in vars(module).items()
        if is_public(name)
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    }


def faults_of_names(path: Path) -> Iterator[str]:
    body = ast.parse(path.read_text()).body
    stubbed = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stubbed |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    yield from difference(path.stem, stubbed, own_names(path))


def difference(place: str, stubbed: Collection[str], compiled: Collection[str]) -> Iterator[str]:
    for name in sorted({*stubbed} ^ {*compiled}):
        yield f"{place}: {name} is only {'in the stub' if name in stubbed else 'compiled'}"


def test_a_stub_has_the_public_names_of_its_module():
    assert_none(fault for path in STUBS for fault in faults_of_names(path))


ALL_CLASSES = [(path, node, kind) for path in STUBS for node, kind in classes_of(path)]


def faults_of_members(path: Path, node: ast.ClassDef, kind: type) -> Iterator[str]:
    place = f"{path.stem}.{node.name}"
    yield from (
        f"{place}: {item.lineno} is no method and no property"
        for item in node.body
        if not isinstance(item, ast.FunctionDef | ast.Expr)
    )
    bases = [ast.unparse(base) for base in node.bases] or ["object"]
    if bases != [base.__name__ for base in kind.__bases__]:
        yield f"{place} has the bases {kind.__bases__}"
    stubbed = {name for name in members(node) if is_public(name)}
    yield from difference(place, stubbed, {name for name in vars(kind) if is_public(name)})


def test_a_stub_has_the_bases_and_public_members_of_its_classes():
    assert_none(fault for found in ALL_CLASSES for fault in faults_of_members(*found))


def faults_of_special_methods(path: Path, node: ast.ClassDef, kind: type) -> Iterator[str]:
    place = f"{path.stem}.{node.name}"
    stubbed = {name for name in members(node) if not is_public(name)}
    if sys.version_info < (3, 12):
        stubbed.discard("__buffer__")  # Python names the slot from 3.12 on
    special = {
        name
        for name, value in vars(kind).items()
        if name.startswith("__") and callable(value) and not isinstance(value, SLOTS)
    }
    special |= {"__init__"} & set(vars(kind))
    for name in sorted(special - set(UNPICKLABLE) - stubbed):
        yield f"{place}: {name} is only compiled"
    for name in sorted(stubbed):
        if not hasattr(kind, name):
            yield f"{place}: {name} is only in the stub"


def test_a_stub_has_the_special_methods_of_its_classes():
    assert_none(fault for found in ALL_CLASSES for fault in faults_of_special_methods(*found))


def is_slot(name: str, compiled: object) -> bool:
    """Whether it is a special method of Python's, and no method of ours."""
    return name in UNPICKLABLE or (name.startswith("__") and isinstance(compiled, SLOTS))


def faults_of_functions(path: Path) -> Iterator[str]:
    module = module_of(path)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and written(node) != parameters(
            getattr(module, node.name)
        ):
            yield f"{path.stem}.{node.name}: {written(node)}"


def faults_of_methods(path: Path, node: ast.ClassDef, kind: type) -> Iterator[str]:
    for name, member in members(node).items():
        place = f"{path.stem}.{node.name}.{name}"
        compiled = vars(kind).get(name)
        if is_property(member) != isinstance(compiled, types.GetSetDescriptorType):
            yield f"{place} is {compiled}"
        elif name == "__init__":
            made = made_with(path.with_suffix(".pyx").read_text(), node.name)
            told = [(name, value) for name, _, value in written(member)]
            if made not in (told, None):
                yield f"{place}: {told}, compiled {made}"
        elif is_property(member) or compiled is None or is_slot(name, compiled):
            continue
        elif written(member) != parameters(compiled):
            yield f"{place}: {written(member)}, compiled {parameters(compiled)}"


def test_a_stub_has_the_kinds_and_parameters_of_what_it_names():
    assert_none(fault for path in STUBS for fault in faults_of_functions(path))
    assert_none(fault for found in ALL_CLASSES for fault in faults_of_methods(*found))


def test_a_stub_has_no_docstring_and_that_of_a_wheel_has_those_of_its_module():
    assert_none(
        f"{path.stem}.{node.name}"
        for path in STUBS
        for node, _ in documented(path, ast.parse(path.read_text()))
        if ast.get_docstring(node) is not None
    )
    assert_none(
        f"{path.stem}.{node.name}"
        for path in STUBS
        for node, text in documented(path, ast.parse(with_docstrings(path)))
        if ast.get_docstring(node) != text
    )


def test_with_docstrings_a_stub_says_the_same():
    def bare(text: str) -> str:
        return re.sub(r"Expr\(value=Constant\(value=(?:Ellipsis|'.*?'|\".*?\")\)\)(, )?", "", text)

    assert_none(
        path.stem
        for path in STUBS
        if bare(ast.dump(ast.parse(path.read_text())))
        != bare(ast.dump(ast.parse(with_docstrings(path))))
    )


PUBLIC = [
    kind
    for kind in (getattr(bfc, name) for name in bfc.__all__)
    if inspect.isclass(kind) and not issubclass(kind, Exception)
]


def test_the_signature_of_a_class_can_be_read():
    assert [kind for kind in PUBLIC if "self" in inspect.signature(kind).parameters] == []


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
