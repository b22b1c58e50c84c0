"""No class of the package has exactly one subclass: such a pair is one class in two files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sources import IMPORT, READ, assert_none, code_lines, is_ours, listed, module_name

#: Classes that are made themselves, and of which one other differs: a subclass is no half of them.
KEPT = {
    "bfc.errors.DeviceUnavailableError",  # caught by name; one error says more
    "bfc._core.PoolPages",  # what a pool asks of a layer above it
    "bfc.allocators._chunk_allocator.ChunkAllocator",  # the steps of a request lie between the two
    "bfc.buffers._buffer.Buffer",  # a view of a buffer
    "bfc.suballocators.host.HostSubAllocator",
    "bfc.suballocators.opencl.OpenCLSubAllocator",
    "bfc_slow_models.tensorflow_model.Model",  # with one end; the other has two
    "bfc_slow_models.torch_device.Subject",  # the model, and in tests/helpers an allocator of ours
}
CLASS = re.compile(r"^\s*(?:cdef\s+)?class\s+(\w+)\s*(?:\(([^)]*)\))?", re.MULTILINE)


class Class(NamedTuple):
    """A class and its bases, as its file names them."""

    module: str
    name: str
    bases: tuple[str, ...]


def classes_of(path: Path) -> Iterator[Class]:
    module, text = module_name(path), path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield Class(module, node.name, tuple(map(ast.unparse, node.bases)))
        return
    for found in CLASS.finditer("\n".join(code_lines(text))):
        yield Class(module, found[1], tuple(name for name, _ in listed(found[2] or "")))


def imported_by(path: Path) -> dict[str, str]:
    """What the names that a file imports stand for, as dotted names."""
    found = {}
    for match in filter(None, map(IMPORT.match, code_lines(path.read_text()))):
        if match["modules"]:
            found |= {alias: name for name, alias in listed(match["modules"])}
        else:
            found |= {alias: f"{match['source']}.{n}" for n, alias in listed(match["names"])}
    return found


def one_subclass(paths: list[Path]) -> dict[str, str]:
    """Classes with exactly one subclass, and which that is, as dotted names."""
    found = {path: list(classes_of(path)) for path in paths}
    defined = {f"{one.module}.{one.name}" for classes in found.values() for one in classes}
    homes: dict[str, set[str]] = defaultdict(set)
    for dotted in defined:
        homes[dotted.rpartition(".")[2]].add(dotted)

    def home_of(base: str, module: str, imported: dict[str, str]) -> str | None:
        """The class that a base is; None if it is not of the package."""
        first, dot, rest = base.partition("[")[0].partition(".")
        dotted = imported.get(first, f"{module}.{first}") + dot + rest
        if dotted in defined:
            return dotted
        if first not in imported or not is_ours(dotted):
            return None
        if dotted.startswith("bfc.libraries."):  # another library's
            return None
        # A folder may pass on what one of its modules defines.
        folder, _, name = dotted.rpartition(".")
        passed_on = [one for one in homes[name] if one.startswith(f"{folder}.")]
        passed_on = passed_on or [*homes[name]]
        return passed_on[0] if len(passed_on) == 1 else None

    derived: dict[str, set[str]] = defaultdict(set)
    for path, classes in found.items():
        imported = imported_by(path)
        for one in classes:
            for base in one.bases:
                home = home_of(base, one.module, imported)
                if home is not None:
                    derived[home].add(f"{one.module}.{one.name}")
    return {base: names.pop() for base, names in derived.items() if len(names) == 1}


def test_no_class_has_exactly_one_subclass() -> None:
    assert_none(
        f"{base} has one subclass, {name}"
        for base, name in sorted(one_subclass(READ).items())
        if base not in KEPT
    )


def test_each_class_that_is_kept_has_one_subclass_still() -> None:
    assert sorted(KEPT - set(one_subclass(READ))) == []


def test_the_one_subclass_is_found_in_python_and_compiled_code(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sources.CHECKOUT", tmp_path)
    texts = {
        "bfc/one.py": "class A:\n    pass\nclass B(A, int):\n    pass\nclass Many:\n    pass\n",
        "bfc/two.pxd": "from bfc import one\ncdef class C:\n    pass\ncdef class D(C):\n    pass\n",
        "bfc/two.pyx": "from bfc.one import Many as M\n"
        "cdef class D(C):\n    pass\nclass E(M):\n    pass\nclass F(M[int]):\n    pass\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = one_subclass([tmp_path / name for name in texts])
    assert found == {"bfc.one.A": "bfc.one.B", "bfc.two.C": "bfc.two.D"}
