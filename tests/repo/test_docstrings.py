"""Public docstrings are in NumPy style, and list what the signature has: no more, no less."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from sources import BESIDE, assert_none

import bfc
import bfc.testing
from setup_stubs import with_docstrings

ROOT = Path(bfc.__file__).parent
SECTIONS = ["Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "Examples"]
TITLE = re.compile(r"^(\w+)\n-+\n", re.MULTILINE)
RAISED = re.compile(r"^\s*raise (\w+Error)\(", re.MULTILINE)
#: What users reach, beside the names of `bfc` and `bfc.testing`.
MODULES = [
    *("bfc.errors", "bfc.streams", "bfc.units", "bfc.suballocators.base"),
    *(f"bfc.integrations.{name}" for name in ("cupy", "numba", "cuda_core", "rmm", "torch")),
    *("bfc.integrations.prometheus", "bfc.integrations.pyopencl", "bfc.study"),
]
#: Functions of those modules that only bfc calls.
OWN_USE = {
    *("never_set_up", "out_of_host_memory", "out_of_memory"),
    *("is_queue", "as_int", "in_columns", "is_count", "resolve_limit"),
    *("check_members", "check_mapping_members", "checked_memory_info"),
    *("serve", "lookup", "lookups", "drivers"),
}


class Entry(NamedTuple):
    """What a section lists: `name : type`, or one of them alone, and the text below."""

    name: str
    kind: str
    text: str


class Docstring:
    """The parts of a docstring."""

    def __init__(self, text: str) -> None:
        self.text = inspect.cleandoc(text)
        head, *rest = TITLE.split(self.text)
        self.summary, _, self.more = head.partition("\n")
        self.titles = rest[::2]
        self.bodies = dict(zip(self.titles, rest[1::2], strict=True))

    def entries(self, title: str) -> list[Entry]:
        found = []
        for block in re.split(r"\n(?=\S)", self.bodies.get(title, "").strip("\n")):
            head, _, text = block.partition("\n")
            name, _, kind = head.partition(" : ")
            if head:
                found.append(Entry(name, kind, textwrap.dedent(text).strip()))
        return found

    def names(self, title: str) -> list[str]:
        return [entry.name for entry in self.entries(title)]


Node = ast.FunctionDef | ast.ClassDef


class Public(NamedTuple):
    """A class, a function, a method or a property, as its source or its stub has it."""

    module: str
    path: tuple[str, ...]
    node: Node
    bases: tuple[type, ...] = ()  # of the class that has it

    @property
    def name(self) -> str:
        return ".".join((self.module, *self.path))

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def decorators(self) -> str:
        return " ".join(map(ast.unparse, self.node.decorator_list))


# What is public -------------------------------------------------------------------------------


@cache
def file_of(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    files = [path.with_suffix(".pyi"), path.with_suffix(".py"), path / "__init__.py"]
    return next(file for file in files if file.exists())


@cache
def tree_of(module: str) -> ast.Module:
    file = file_of(module)
    return ast.parse(with_docstrings(file) if file.suffix == ".pyi" else file.read_text())


def node_of(module: str, *path: str) -> Node | None:
    node: ast.AST | None = tree_of(module)
    for name in path:
        found = [item for item in getattr(node, "body", ()) if getattr(item, "name", "") == name]
        node = found[0] if found else None
    return node if isinstance(node, Node) else None


def things() -> Iterator[object]:
    for package in (bfc, bfc.testing):
        for thing in (getattr(package, name) for name in package.__all__):
            yield from things_of(thing) if isinstance(thing, types.ModuleType) else [thing]
    for name in MODULES:
        yield from things_of(importlib.import_module(name))


def things_of(module: types.ModuleType) -> Iterator[object]:
    """What a module, or a package with its modules, defines for users."""
    for name in getattr(module, "__all__", vars(module)):
        home = getattr(getattr(module, name), "__module__", None) or ""
        inside, _, rest = home.partition(f"{module.__name__}.")
        is_own = home == module.__name__ or (not inside and not rest.startswith("_"))
        is_own = is_own and not name.startswith("_") and name not in OWN_USE
        if is_own or hasattr(module, "__all__"):
            yield getattr(module, name)


def is_ours(thing: object) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] in ("bfc", *BESIDE)


def definitions(thing: object) -> Iterator[Public]:
    """A function; or a class, its bases, and their members."""
    for kind in reversed(thing.__mro__) if inspect.isclass(thing) else [thing]:
        node = node_of(kind.__module__, kind.__name__) if is_ours(kind) else None
        if node is None or kind.__name__.startswith("_"):
            continue
        yield Public(kind.__module__, (kind.__name__,), node)
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                path = (kind.__name__, item.name)
                yield Public(kind.__module__, path, item, kind.__mro__[1:])


def is_test(one: Public) -> bool:
    """Whether it is a test, or a step of Hypothesis, whose name says it all."""
    is_step = re.search(r"\b(rule|initialize|invariant)\(", one.decorators)
    return one.path[-1].startswith("test_") or is_step is not None


PUBLIC = {
    one.name: one
    for thing in things()
    if is_ours(thing)
    for one in definitions(thing)
    if not is_test(one)
}


# What a docstring must say --------------------------------------------------------------------


def is_property(one: Public) -> bool:
    return re.search(r"\b(cached_)?property\b", one.decorators) is not None


def is_documented_by_a_base(one: Public) -> bool:
    return any(getattr(base, one.path[-1], None) is not None for base in one.bases)


def arguments(node: ast.FunctionDef) -> list[str]:
    """The parameters in their order, as a docstring writes them."""
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def parameters(one: Public) -> list[str]:
    if isinstance(one.node, ast.FunctionDef):
        return arguments(one.node)
    init = node_of(one.module, *one.path, "__init__")
    is_made_by_users = init is not None and ast.unparse(init.returns or init) != "NoReturn"
    return arguments(init) if is_made_by_users else []


def fields(one: Public) -> list[str]:
    """The fields of a dataclass or a named tuple."""
    is_record = "dataclass" in one.decorators or any(
        ast.unparse(base) == "NamedTuple" for base in one.node.bases
    )
    marked = [item for item in one.node.body if isinstance(item, ast.AnnAssign)]
    return [item.target.id for item in marked] if is_record else []


def returns(node: ast.FunctionDef) -> bool:
    return ast.unparse(node.returns or ast.Constant(None)) not in ("None", "NoReturn", "Never")


def errors_raised(one: Public) -> set[str]:
    """The errors that its own body raises by name."""
    path = one.path if isinstance(one.node, ast.FunctionDef) else (*one.path, "__init__")
    file = file_of(one.module)
    source = file.with_suffix(".pyx") if file.suffix == ".pyi" else file
    return set(RAISED.findall(body_of(source.read_text(), path)))


def body_of(text: str, path: tuple[str, ...]) -> str:
    """The text of a definition, in Python or in Cython, without docstrings."""
    for name in path:
        definition = (
            rf"^( *)(?:cdef |cpdef )?(?:class|def|object) {name}\b.*\n((?:\1[ )].*\n|\s*\n)*)"
        )
        found = re.search(definition, text, re.MULTILINE)
        text = found[2] if found else ""
    return re.sub(r'(?s)""".*?"""', "", text)


def faults(one: Public) -> list[str]:
    """What is wrong with a docstring."""
    if not one.docstring:
        return [] if is_documented_by_a_base(one) or is_attribute(one) else ["there is none"]
    read = Docstring(one.docstring)
    found = list(faults_of_form(read))
    if isinstance(one.node, ast.ClassDef):
        if fields(one) and read.names("Attributes") != fields(one):
            found.append(f"has the attributes {read.names('Attributes')}, not {fields(one)}")
    elif not is_property(one) and returns(one.node) == {"Returns", "Yields"}.isdisjoint(
        read.titles
    ):
        found.append("does not say what it returns" if returns(one.node) else "returns nothing")
    if not is_property(one) and read.names("Parameters") != parameters(one):
        found.append(f"lists {read.names('Parameters')}, and takes {parameters(one)}")
    missing = errors_raised(one) - set(read.names("Raises"))
    return found + [f"raises {name}, and does not say when" for name in sorted(missing)]


def is_attribute(one: Public) -> bool:
    """Whether it is a field of a compiled class, which cannot have a docstring of its own."""
    owner = node_of(one.module, *one.path[:-1])
    above = [base for base in one.bases if is_ours(base)]
    owners = [owner, *(node_of(base.__module__, base.__name__) for base in above)]
    listed = [Docstring(ast.get_docstring(it) or "").names("Attributes") for it in owners if it]
    return is_property(one) and any(one.path[-1] in names for names in listed)


def faults_of_form(read: Docstring) -> Iterator[str]:
    if not read.summary.endswith((".", "?")) or read.more[:1] not in ("", "\n"):
        yield f"the summary is not one line: {read.summary!r}"
    if read.titles != [title for title in SECTIONS if title in read.titles]:
        yield f"the sections are {read.titles}"
    for entry in read.entries("Parameters") + read.entries("Attributes"):
        if not entry.kind or not entry.text:
            yield f"{entry.name} lacks its type or its meaning"
    for entry in read.entries("Returns") + read.entries("Yields"):
        if not entry.text:
            yield f"{entry.name} lacks its meaning"
    for entry in read.entries("Raises"):
        if not entry.text.startswith("If ") or not entry.name.endswith("Error"):
            yield f"{entry.name}: an error, and below it 'If ...'"
    if ">>>" in read.text and "Examples" not in read.titles:
        yield "the example has no heading"


def test_a_docstring_says_what_the_signature_says():
    assert_none(f"{name}: {fault}" for name, one in PUBLIC.items() for fault in faults(one))


# That the reader sees -------------------------------------------------------------------------


def test_what_users_call_is_looked_at():
    names = {one.path for one in PUBLIC.values()}
    expected = {
        ("Allocator", "allocate_raw"),
        ("Buffer", "view"),
        ("copy",),
        ("use",),
        ("SubAllocator", "alloc"),
        ("OutOfMemoryError",),
        ("CachingSettings", "apply"),
        ("Trace", "replay"),
        ("DeviceAllocator", "mem"),
        ("Twins", "check"),
        ("is_pinned",),
        ("mem_pool",),
    }
    assert expected <= names
    assert len(names) > 250


GOOD = '''
def f(a: int, *, b: int = 0) -> int:
    """Add.

    Parameters
    ----------
    a : int
        One.
    b : int, optional
        Another.

    Returns
    -------
    int
        The sum.

    Raises
    ------
    ValueError
        If it is too large.
    """
    raise ValueError("too large")
'''


@pytest.mark.parametrize(
    ("found", "replaced", "fault"),
    [
        ("", "", []),
        ("    b : int, optional\n        Another.\n", "", ["lists ['a'], and takes ['a', 'b']"]),
        ("    b : int, optional", "    c : int", ["lists ['a', 'c'], and takes ['a', 'b']"]),
        ("    a : int\n", "    a\n", ["a lacks its type or its meaning"]),
        ("Returns\n    -------", "Notes\n    -----", None),
        ("-> int", "-> None", ["returns nothing"]),
        ("If it is", "When it is", ["ValueError: an error, and below it 'If ...'"]),
        ("    ValueError\n", "    TypeError\n", ["raises ValueError, and does not say when"]),
        ('"""Add.\n', '"""Add\n    up.\n', ["the summary is not one line: 'Add'"]),
    ],
)
def test_what_is_missing_is_found(
    found: str, replaced: str, fault: list[str] | None, monkeypatch: pytest.MonkeyPatch
):
    text = GOOD.replace(found, replaced, 1)
    one = Public("some", ("f",), ast.parse(text).body[0])
    raised = set(RAISED.findall(body_of(text, ("f",))))
    assert raised == {"ValueError"}
    monkeypatch.setitem(globals(), "errors_raised", lambda _one: raised)
    assert faults(one) == fault if fault is not None else faults(one)


def test_the_body_of_a_compiled_method_is_found():
    text = """
cdef class A(B):
    def f(self):
        raise KeyError(1)

    def g(self,
          x):
        raise OSError(2)
"""
    assert RAISED.findall(body_of(text, ("A", "g"))) == ["OSError"]
