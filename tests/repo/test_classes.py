"""How many methods each class defines, and how many fields it has.

Methods are what has a body in the class: `def`, `cdef`, properties, special methods. What a base
class defines counts there. Fields are what a compiled class declares, and what a class in Python
annotates or assigns to `self`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from compiled_classes import compiled_classes
from sources import READ, assert_none, module_name

MOST_METHODS = 60
MOST_FIELDS = 20

#: (methods, fields) of the classes that have more of one of them; 0: no more than they may. Lower
#: it with what goes: no other class belongs here, and no higher number.
ABOVE = {
    "bfc_tools.study.logs.refusal.LoggedRanOut": (0, 23),  # a message, as it was read
}


def python_classes(text: str) -> Iterator[tuple[str, set[str], set[str]]]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        functions = [
            one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        fields = {
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
        fields |= {
            one.attr
            for one in stored
            if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
        }
        yield node.name, {one.name for one in functions}, fields


def count_members(paths: list[Path]) -> dict[str, tuple[int, int]]:
    """(methods, fields) by class. A compiled one may stand in two files."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in paths:
        read = python_classes if path.suffix == ".py" else compiled_classes
        for name, methods, fields in read(path.read_text()):
            entry = found[f"{module_name(path)}.{name}"]
            entry[0].update(methods)
            entry[1].update(fields)
    return {name: (len(methods), len(fields)) for name, (methods, fields) in found.items()}


def test_no_class_has_more_than_60_methods_or_20_fields() -> None:
    above = {
        name: (methods if methods > MOST_METHODS else 0, fields if fields > MOST_FIELDS else 0)
        for name, (methods, fields) in sorted(count_members(READ).items())
        if methods > MOST_METHODS or fields > MOST_FIELDS
    }
    for name, (methods, fields) in above.items():
        print(f"{name}: {methods} methods, {fields} fields")
    assert_none(
        f"{name} has {above.get(name, 'no more than it may')}, and the list says {ABOVE.get(name)}"
        for name in sorted({*above} | {*ABOVE})
        if above.get(name) != ABOVE.get(name)
    )


def test_the_reader_of_classes_sees_methods_and_fields() -> None:
    declared = """
cdef struct Row:
    int number
cdef class A(B):
    cdef readonly object one, two   # with a comment
    cdef cmap[int, vector[int]] three
    cdef Row* four
    cdef int only_declared(self) except -1
    cdef inline int counted(self) noexcept:
        return 1
"""
    defined = """
cdef class A(B):
    @property
    def name(self):
        cdef int local
        return 1

    @name.setter
    def name(self, value):
        pass

    cdef int long(self, int a,
                  int b) except -1:
        def inner(): pass
        return 0

cdef int outside(A self):
    return 0
"""
    assert list(compiled_classes(declared)) == [("A", {"counted"}, {"one", "two", "three", "four"})]
    assert list(compiled_classes(defined)) == [("A", {"name", "long"}, set())]
    text = "class A:\n  b: int\n  async def f(self):\n    self.c = self.d.e = 1\n"
    assert list(python_classes(text)) == [("A", {"f"}, {"b", "c"})]
