"""Imports run downward only, by the layers that each folder's docstring lists."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from layers import layers_of
from sources import (
    BESIDE,
    CHECKOUT,
    COMPILED,
    FILES,
    IMPORT,
    OF_C,
    READ,
    assert_none,
    code_lines,
    file_name,
    is_module,
    is_ours,
    listed,
)
from sources import PACKAGE as ROOT

FOLDERS = sorted({path.parent for path in FILES})

#: What uses `bfc` as a user does.
USERS = {("testing",), ("__main__",), ("study", "cli"), ("study", "museum")}  # seen from bfc

HEADER = re.compile(r'^(?:\s*#include|cdef extern from) "([^"]+\.h(?:pp)?)"', re.MULTILINE)


def seen_from_bfc(path: Path) -> Path:
    """A package beside bfc stands on the layer of the module through which users reach it."""
    name, *rest = path.relative_to(CHECKOUT).parts
    return CHECKOUT.joinpath(*BESIDE.get(name, name).split("."), *rest)


def numbered(folder: Path) -> dict[str, int]:
    """The layer of each entry of a folder, by its name: without an ending, but for C and C++."""
    return {
        name if name.endswith(OF_C) else name.rstrip("/").split(".")[0]: number
        for number, names in enumerate(layers_of(folder))
        for name in names
    }


LAYERS = {seen_from_bfc(folder): numbered(folder) for folder in FOLDERS}


def entries_of(folder: Path) -> set[str]:
    """What there is in a folder, by the same names."""
    found = {
        path.name if path.suffix in OF_C else path.stem
        for path in folder.iterdir()
        if path in FOLDERS or path in FILES
    }
    return found - {"__init__", "__init__.py"}


def named_modules(found: re.Match) -> list[str]:
    """The modules of ours that an import names, as dotted paths."""
    if found["modules"]:
        return [name for name, _ in listed(found["modules"]) if is_ours(name)]
    if not is_ours(found["source"]):
        return []
    names = [f"{found['source']}.{name}" for name, _ in listed(found["names"])]
    return list(filter(is_module, names)) or [found["source"]]


def path_of(dotted: str) -> Path:
    """Where a module stands, without an ending; a folder for its `__init__`."""
    return CHECKOUT.joinpath(*dotted.split("."))


def header_of(name: str, path: Path) -> Path:
    """The header of ours that a file includes. Who includes the room's own names it alone."""
    places = [path.parent / name, ROOT / "include" / name]
    return next((place for place in places if place.exists()), ROOT / "native" / name)


def imports_of(path: Path) -> list[Path]:
    """What a file imports of ours, and the headers that it includes, as paths without an
    ending, but for C and C++."""
    found = [header_of(name, path) for name in HEADER.findall(path.read_text())]
    if path.suffix in OF_C:
        return found
    found = [header for header in found if header.exists()]
    for line in code_lines(path.read_text()):
        match = IMPORT.match(line)
        if match:
            found += map(path_of, named_modules(match))
    return found


def is_below(target: Path, source: Path) -> bool:
    """Whether a file may import another: where their ways part, the other stands on a lower layer.

    The `__init__` of a folder stands above all in it, and who imports the folder imports that.
    """
    source, target = seen_from_bfc(source), seen_from_bfc(target)
    source = source if source.suffix in OF_C else source.with_suffix("")
    source = source.parent if source.name == "__init__" else source
    if source == target or source in target.parents:
        return True
    if target in source.parents:
        parts = source.relative_to(ROOT).parts
        return target == ROOT and not USERS.isdisjoint((parts[:1], parts[:2]))
    folder = next(parent for parent in source.parents if parent in target.parents)
    layers = LAYERS[folder]
    mine, theirs = source.relative_to(folder).parts[0], target.relative_to(folder).parts[0]
    return layers[theirs] < layers[mine]


def test_the_docstring_of_a_folder_names_what_is_in_it() -> None:
    entries = {folder: entries_of(folder) for folder in FOLDERS}
    assert_none(
        f"{file_name(folder)}: {name} is {'not listed' if name in entries[folder] else 'not there'}"
        for folder in FOLDERS
        for name in sorted(entries[folder] ^ set(LAYERS[seen_from_bfc(folder)]))
    )


def test_no_import_is_relative_or_of_everything() -> None:
    odd = re.compile(r"^\s*(from\s+\.|from\s+\S+\s+c?import\s+\*|include\s)")
    assert_none(
        f"{file_name(path)}: {line.strip()}"
        for path in READ
        for line in code_lines(path.read_text())
        if odd.match(line)
    )


def test_imports_point_downwards() -> None:
    assert_none(
        f"{file_name(path)} imports {file_name(target)}"
        for path in FILES
        if path.suffix != ".pyi"
        for target in imports_of(path)
        if not is_below(target, path)
    )


def rank_of(module: str) -> list[int]:
    """What a module of ours sorts by, the lowest layer first: its place in the list of its folder,
    behind that of the folder in the one above."""
    places, folder = [], ROOT
    for part in module.split(".")[1:]:
        names = [name.rstrip("/").split(".")[0] for row in layers_of(folder) for name in row]
        places.append(names.index(part))
        folder /= part
        if not folder.is_dir():
            break
    return places


def place_of(line: str) -> tuple[Any, ...]:
    """Where an import stands in compiled code: Python's own modules, C's, ours that are cimported,
    by layers, and ours that are imported."""
    match = IMPORT.match(line)
    module = match["source"] or match["modules"].split(",")[0].split(" as ")[0]
    compiled = re.search(r"\bcimport\b", line) is not None
    if module.partition(".")[0] != "bfc":
        return int(compiled), match["source"] is not None, module
    return (2, rank_of(module)) if compiled else (3, match["source"] is not None, module)


def first_imports(text: str) -> list[str]:
    lines = (line for line in code_lines(text) if line and line != '""')
    return list(takewhile(IMPORT.match, lines))


def test_imports_of_compiled_code_stand_in_order() -> None:
    """As Ruff sorts those of Python, but cimports of ours, which show what lies below a file."""
    found = {path: first_imports(path.read_text()) for path in COMPILED}
    assert_none(
        f"{file_name(path)}: {line} stands above {next_line}"
        for path, lines in found.items()
        for line, next_line in pairwise(lines)
        if place_of(next_line) < place_of(line)
    )


def test_the_order_of_imports_is_seen() -> None:
    text = '"""Some."""\n\nimport gc\nfrom time import sleep\n\ncimport cython\n\ncdef int x\n'
    assert first_imports(text) == ["import gc", "from time import sleep", "cimport cython"]
    low, high = "from bfc._core cimport Pool", "from bfc.allocators._lock cimport (Lock, Shown)"
    assert place_of("import sys") < place_of("cimport cython") < place_of(low) < place_of(high)
    assert place_of(high) < place_of("from bfc import cuda") < place_of("from bfc.units import x")


def test_the_reader_of_imports_sees_them_all() -> None:
    seen = {(file_name(path), file_name(target)) for path in READ for target in imports_of(path)}
    assert {
        ("allocators/_allocator.pyx", "_core"),
        ("allocators/_chunk_allocator.pxd", "allocators/_tags"),
        ("buffers/_exchange.pyx", "native/dlpack.h"),
        ("snapshots/snapshot.py", "snapshots/text"),
        ("__init__.py", "trace"),
    } <= seen
    assert ("snapshots/text.py", "snapshots/snapshot") not in seen, "it is for type checkers alone"


def test_an_import_that_points_upwards_is_seen() -> None:
    assert is_below(ROOT / "units", ROOT / "errors.py")
    assert not is_below(ROOT / "errors", ROOT / "units.py")
    assert not is_below(ROOT / "snapshots/snapshot", ROOT / "snapshots/text.py")
    assert not is_below(ROOT / "drivers/cuda/_driver", ROOT / "drivers/opencl/platform.py")
    assert not is_below(ROOT, ROOT / "trace/trace.py")
    tools = CHECKOUT / "bfc_tools"
    assert is_below(ROOT / "trace/trace", tools / "study/diff.py")
    assert not is_below(tools / "study/diff", ROOT / "trace/trace.py")
    assert is_below(ROOT, tools / "cli/diff.py")
    assert not is_below(ROOT, tools / "study/diff.py")


def test_forks_are_hooked_into_in_one_place_and_by_locks_and_turns() -> None:
    hook = re.compile(r"\b(pthread_atfork|register_at_fork)\((?!void)")
    sources = [path for path in FILES if not {"testing", "bfc_cuda_emulator"} & {*path.parts}]
    hooked = {file_name(path) for path in sources if hook.search(path.read_text())}
    apart = "bfc_torch_opencl/runtime.hpp"  # the extension links to nothing of ours
    locked = {"native/lock.hpp", "native/turns.hpp"}
    assert hooked == {"interpreter/_process.pyx", *locked, apart}
