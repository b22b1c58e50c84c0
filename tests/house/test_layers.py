"""Imports run downward only, by the floors that each folder's docstring lists, and no function or
file grows past the house limits."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from floors import PACKAGE as ROOT
from floors import floors_of

OF_C = (".hpp", ".h", ".cpp")
SUFFIXES = (".py", ".pyx", ".pxd", ".pyi", *OF_C)
LONGEST_FUNCTION, MOST_CODE_IN_A_FILE = 60, 750

FILES = sorted(path for path in ROOT.rglob("*") if path.suffix in SUFFIXES)
READ = [path for path in FILES if path.suffix in (".py", ".pyx", ".pxd")]
FOLDERS = sorted({path.parent for path in FILES})

#: What uses `bfc` as a user does.
USERS = {"cli", "testing", "__main__"}

IMPORT = re.compile(
    r"^(?P<indent>\s*)(?:from\s+(?P<source>[\w.]+)\s+c?import\s+(?P<names>.+)|c?import\s+(?P<modules>.+))$"
)
HEADER = re.compile(r'^(?:\s*#include|cdef extern from) "([^"]+\.h(?:pp)?)"', re.MULTILINE)
TYPING = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", re.MULTILINE)


def file_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def numbered(folder: Path) -> dict[str, int]:
    """The floor of each entry of a folder, by its name: without an ending, but for C and C++."""
    return {
        name if name.endswith(OF_C) else name.rstrip("/").split(".")[0]: number
        for number, names in enumerate(floors_of(folder))
        for name in names
    }


FLOORS = {folder: numbered(folder) for folder in FOLDERS}


def entries_of(folder: Path) -> set[str]:
    """What there is in a folder, by the same names."""
    found = {
        path.name if path.suffix in OF_C else path.stem
        for path in folder.iterdir()
        if path in FOLDERS or path in FILES
    }
    return found - {"__init__", "__init__.py"}


def code_lines(text: str) -> list[str]:
    """The lines of code: no comments, no long texts, nothing for type checkers alone, and what
    stands in brackets on one line."""
    text = re.sub(r'(?s)("""|\'\'\').*?\1', '""', TYPING.sub("", text))
    text = re.sub(r"#.*", "", text)
    return re.sub(
        r"\(([^()]*)\)", lambda found: "(" + found[1].replace("\n", " ") + ")", text
    ).splitlines()


def named_modules(found: re.Match) -> list[str]:
    """The modules of ours that an import names, as dotted paths."""
    if found["modules"]:
        names = [part.split(" as ")[0].strip() for part in found["modules"].split(",")]
        return [name for name in names if name.split(".")[0] == "bfc"]
    if found["source"].split(".")[0] != "bfc":
        return []
    names = [part.split(" as ")[0].strip() for part in found["names"].strip("() ").split(",")]
    inside = [
        f"{found['source']}.{name}" for name in names if is_module(f"{found['source']}.{name}")
    ]
    return inside or [found["source"]]


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split(".")[1:])
    return path.is_dir() or any(
        path.with_suffix(suffix).exists() for suffix in (".py", ".pyx", ".pxd")
    )


def path_of(dotted: str) -> Path:
    """Where a module stands, without an ending; a folder for its `__init__`."""
    return ROOT.joinpath(*dotted.split(".")[1:])


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
    """Whether a file may import another: where their ways part, the other stands on a lower floor.

    The `__init__` of a folder stands above all in it, and who imports the folder imports that.
    """
    source = source if source.suffix in OF_C else source.with_suffix("")
    source = source.parent if source.name == "__init__" else source
    if source == target or source in target.parents:
        return True
    if target in source.parents:
        return target == ROOT and source.relative_to(ROOT).parts[0] in USERS
    folder = next(parent for parent in source.parents if parent in target.parents)
    floors = FLOORS[folder]
    mine, theirs = source.relative_to(folder).parts[0], target.relative_to(folder).parts[0]
    return floors[theirs] < floors[mine]


@pytest.mark.parametrize("folder", FOLDERS, ids=file_name)
def test_the_docstring_of_a_folder_names_what_is_in_it(folder: Path) -> None:
    assert set(FLOORS[folder]) == entries_of(folder)


def test_no_import_is_relative_or_of_everything() -> None:
    odd = re.compile(r"^\s*(from\s+\.|from\s+\S+\s+c?import\s+\*|include\s)")
    for path in READ:
        assert [line for line in code_lines(path.read_text()) if odd.match(line)] == [], file_name(
            path
        )


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".pyi"], ids=file_name)
def test_imports_point_downwards(path: Path) -> None:
    wrong = [file_name(target) for target in imports_of(path) if not is_below(target, path)]
    assert wrong == [], f"{file_name(path)} imports {wrong}"


def rank_of(module: str) -> list[int]:
    """What a module of ours sorts by, the lowest floor first: its place in the list of its folder,
    behind that of the folder in the one above."""
    places, folder = [], ROOT
    for part in module.split(".")[1:]:
        names = [name.rstrip("/").split(".")[0] for row in floors_of(folder) for name in row]
        places.append(names.index(part))
        folder /= part
        if not folder.is_dir():
            break
    return places


def place_of(line: str) -> tuple[Any, ...]:
    """Where an import stands in compiled code: Python's own modules, C's, ours that are cimported,
    by floors, and ours that are imported."""
    match = IMPORT.match(line)
    module = match["source"] or match["modules"].split(",")[0].split(" as ")[0]
    compiled = re.search(r"\bcimport\b", line) is not None
    if module.partition(".")[0] != "bfc":
        return int(compiled), match["source"] is not None, module
    return (2, rank_of(module)) if compiled else (3, match["source"] is not None, module)


def first_imports(text: str) -> list[str]:
    lines = (line for line in code_lines(text) if line and line != '""')
    return list(takewhile(IMPORT.match, lines))


COMPILED = [path for path in READ if path.suffix != ".py"]


@pytest.mark.parametrize("path", COMPILED, ids=file_name)
def test_imports_of_compiled_code_stand_in_order(path: Path) -> None:
    """As Ruff sorts those of Python, but cimports of ours, which show what lies below a file."""
    found = first_imports(path.read_text())
    assert found == sorted(found, key=place_of)


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
        ("allocators/_allocator.pxd", "allocators/_tags"),
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


def test_forks_are_hooked_into_in_one_place_and_by_the_locks() -> None:
    hook = re.compile(r"\b(pthread_atfork|register_at_fork)\((?!void)")
    sources = [path for path in FILES if "testing" not in path.parts]
    hooked = {file_name(path) for path in sources if hook.search(path.read_text())}
    apart = "integrations/torch_opencl/runtime.hpp"  # the extension links to nothing of ours
    assert hooked == {"interpreter/_forks.pyx", "native/lock.hpp", apart}


FUNCTION = re.compile(r"^(\s*)(?:async\s+)?(?:def|cp?def)\s(?!class\b)[^=]*?\w+\s*\(")


def functions_of(text: str) -> list[tuple[str, int]]:
    """(first line, number of lines) of every function with a body, Python's or Cython's.

    Docstrings are not counted: a function may be documented at any length.
    """
    lines = without_docstrings(text).splitlines()
    found = []
    for start, line in enumerate(lines):
        match = FUNCTION.match(line)
        if not match:
            continue
        body = signature_end(lines, start)
        if body is not None:
            found.append((line.strip(), last_line(lines, body, len(match[1])) - start + 1))
    return found


DOCSTRING = re.compile(r'(?ms)^ *[rR]?""".*?"""[ ]*\n')


def without_docstrings(text: str) -> str:
    return DOCSTRING.sub("", text)


def lines_of_code(path: Path) -> int:
    """The lines that are neither docstring, nor comment, nor blank."""
    text = without_docstrings(path.read_text())
    if path.suffix in (".hpp", ".h", ".cpp"):
        text = re.sub(r"(?s)/\*.*?\*/", "", text)
        comment = "//"
    else:
        comment = "#"
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith(comment) for line in lines)


def signature_end(lines: list[str], start: int) -> int | None:
    """The line that a signature ends on, None where no body follows: a declaration."""
    depth = 0
    for number in range(start, min(start + 20, len(lines))):
        code = lines[number].split("#")[0].rstrip()
        depth += code.count("(") - code.count(")")
        if depth == 0:
            return number if code.endswith(":") else None
    return None


def last_line(lines: list[str], body: int, indent: int) -> int:
    last = body
    for number in range(body + 1, len(lines)):
        line = lines[number]
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            last = number
    return last


@pytest.mark.parametrize("path", READ, ids=file_name)
def test_no_function_is_longer_than_60_lines(path: Path) -> None:
    long = [
        (name, lines) for name, lines in functions_of(path.read_text()) if lines > LONGEST_FUNCTION
    ]
    assert long == []


def test_the_reader_of_functions_sees_them_all() -> None:
    found = dict(functions_of((ROOT / "_core.pyx").read_text()))
    assert any("allocate_chunk" in name for name in found)
    assert any("play_loop" in name and lines > 20 for name, lines in found.items())
    assert functions_of("cdef int f(int x,\n           int y) except -1\n") == []
    assert functions_of("def f(\n    x,\n):\n    a\n\n    b\nc\n") == [("def f(", 6)]


@pytest.mark.parametrize("path", FILES, ids=file_name)
def test_no_file_has_more_than_750_lines_of_code(path: Path) -> None:
    assert lines_of_code(path) <= MOST_CODE_IN_A_FILE


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path: Path) -> None:
    python, header = tmp_path / "some.py", tmp_path / "some.h"
    python.write_text('"""One.\n\nTwo.\n"""\n\n# why\nx = """text\nof two"""  # and why\n')
    header.write_text("// why\n\n/* and\n   why */\nint x; // here\n")
    assert (lines_of_code(python), lines_of_code(header)) == (2, 1)
    assert functions_of('def f():\n    """One.\n\n    Two.\n    """\n    a\n') == [("def f():", 2)]


LIST_COMPREHENSION = re.compile(r"\[[^\[\]]*\sfor\s[^\[\]]*\sin\s[^\[\]]*\]")
SIMPLE_BRACKETS = re.compile(r"\[(?![^\[\]]*\sfor\s)[^\[\]]*\]")


def list_comprehensions(text: str) -> list[str]:
    text = re.sub(r'(?s)("""|\'\'\').*?\1', "", text)
    text = re.sub(r"#.*", "", text)
    while SIMPLE_BRACKETS.search(text):
        text = SIMPLE_BRACKETS.sub("()", text)
    return LIST_COMPREHENSION.findall(text)


@pytest.mark.parametrize("path", COMPILED, ids=file_name)
def test_compiled_code_has_no_list_comprehension(path: Path) -> None:
    """Cython 3.3.1 frees an item twice where the list cannot grow. Write a loop, or map()."""
    assert list_comprehensions(path.read_text()) == []


def test_the_reader_of_comprehensions_sees_them_all() -> None:
    assert list_comprehensions("x = [f(n) for n in m]") == ["[f(n) for n in m]"]
    assert list_comprehensions("x = [f(n[0]) for n in m[1]]") == ["[f(n()) for n in m()]"]
    assert list_comprehensions("x = [\n    f(n)\n    for n in m]") != []
    assert list_comprehensions("for n in a[0], b[1]:\n    pass  # [n for n in m]") == []
