"""Imports run downward only, and no function or file grows past the house limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "bfc"

#: The rank of every file of bfc/: by its own name, or by its folder's. An import may point to a
#: lower rank, or to another file of the same folder below the top one.
RANKS = {
    "native": 0,
    "errors": 0,
    "units": 0,
    "streams": 0,
    "files": 0,
    "interpreter": 0.5,
    "pytorch": 1,
    "report": 1.5,
    "drivers": 1,
    "_core": 1,
    "suballocators": 2,
    "cuda": 2,
    "buffers": 3,
    "allocators": 6,
    "policies": 7,
    "pinned": 6.5,
    "opencl": 9,
    "trace": 9,
    "copying": 9,
    "integrations": 9,
    "__init__": 10,
    "cli": 11,  # uses bfc as a user does
    "testing": 11,  # uses bfc as a user does
    "__main__": 12,
}
#: Imports within one rank that the table allows.
SIDEWAYS = {
    ("pytorch", "report"),
    ("pytorch", "trace"),
    ("errors", "units"),
}
#: Imports inside functions that may point anywhere: (file's entry, target's entry).
LAZY = {
    ("errors", "report"),
    ("pytorch", "report"),
    ("pytorch", "trace"),
}

SUFFIXES = (".py", ".pyx", ".pxd", ".hpp", ".h", ".pyi", ".cpp")
LONGEST_FUNCTION, MOST_CODE_IN_A_FILE = 60, 750

FILES = sorted(path for path in ROOT.rglob("*") if path.suffix in SUFFIXES)
READ = [path for path in FILES if path.suffix in (".py", ".pyx", ".pxd")]
IMPORT = re.compile(
    r"^(?P<indent>\s*)(?:from\s+(?P<source>[\w.]+)\s+c?import\s+(?P<names>.+)|c?import\s+(?P<modules>.+))$"
)
INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def file_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def entry_of(path: Path) -> str:
    """The line of the table that a file stands in."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def code_lines(text: str) -> list[str]:
    """The lines of code: no comments, no long texts, and what stands in brackets on one line."""
    text = re.sub(r'(?s)("""|\'\'\').*?\1', '""', text)
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


def entry_of_module(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(the target's entry, whether it stands in a function) for each import of ours in a file."""
    found = []
    for line in code_lines(path.read_text()):
        match = IMPORT.match(line)
        if match:
            found += [
                (entry_of_module(name), bool(match["indent"])) for name in named_modules(match)
            ]
    return found


def is_allowed(source: str, target: str, lazy: bool) -> bool:
    if source == target or (source, target) in SIDEWAYS or (lazy and (source, target) in LAZY):
        return True
    return RANKS[target] < RANKS[source]


def test_every_file_stands_in_the_table() -> None:
    assert [file_name(path) for path in FILES if entry_of(path) not in RANKS] == []


def test_no_import_is_relative_or_of_everything() -> None:
    odd = re.compile(r"^\s*(from\s+\.|from\s+\S+\s+c?import\s+\*|include\s)")
    for path in READ:
        assert [line for line in code_lines(path.read_text()) if odd.match(line)] == [], file_name(
            path
        )


@pytest.mark.parametrize("path", READ, ids=file_name)
def test_imports_point_downwards(path: Path) -> None:
    source = entry_of(path)
    wrong = [target for target, lazy in imports_of(path) if not is_allowed(source, target, lazy)]
    assert wrong == [], f"{file_name(path)} imports {wrong}"


@pytest.mark.parametrize("path", READ, ids=file_name)
def test_a_header_is_included_from_above(path: Path) -> None:
    named = re.findall(r'cdef extern from "([^"]+\.h(?:pp)?)"', path.read_text())
    for header in named + INCLUDE.findall(path.read_text()):
        if (ROOT / "native" / header).exists():
            assert is_allowed(entry_of(path), "native", False), header


def test_the_reader_of_imports_sees_them_all() -> None:
    seen = {(entry_of(path), target) for path in READ for target, _ in imports_of(path)}
    assert {("allocators", "_core"), ("allocators", "suballocators"), ("buffers", "errors")} <= seen
    assert {
        ("errors", "units"),
        ("policies", "report"),
        ("trace", "allocators"),
        ("__init__", "trace"),
    } <= seen
    assert not is_allowed("units", "errors", False)
    assert not is_allowed("report", "trace", True)


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
    assert any("merge_timestamped" in name and lines > 20 for name, lines in found.items())
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


@pytest.mark.parametrize("path", [path for path in READ if path.suffix != ".py"], ids=file_name)
def test_compiled_code_has_no_list_comprehension(path: Path) -> None:
    """Cython 3.3.1 frees an item twice where the list cannot grow. Write a loop, or map()."""
    assert list_comprehensions(path.read_text()) == []


def test_the_reader_of_comprehensions_sees_them_all() -> None:
    assert list_comprehensions("x = [f(n) for n in m]") == ["[f(n) for n in m]"]
    assert list_comprehensions("x = [f(n[0]) for n in m[1]]") == ["[f(n()) for n in m()]"]
    assert list_comprehensions("x = [\n    f(n)\n    for n in m]") != []
    assert list_comprehensions("for n in a[0], b[1]:\n    pass  # [n for n in m]") == []
