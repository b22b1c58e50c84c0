"""No function is longer than a reader can hold in mind."""

from __future__ import annotations

import re

from sources import PACKAGE, READ, assert_none, file_name

LONGEST_FUNCTION = 60

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


def test_no_function_is_longer_than_60_lines() -> None:
    assert_none(
        f"{file_name(path)}: {name} has {lines} lines"
        for path in READ
        for name, lines in functions_of(path.read_text())
        if lines > LONGEST_FUNCTION
    )


def test_the_reader_of_functions_sees_them_all() -> None:
    found = dict(functions_of((PACKAGE / "_core.pyx").read_text()))
    assert any("allocate_chunk" in name for name in found)
    assert any("play_loop" in name and lines > 20 for name, lines in found.items())
    assert functions_of("cdef int f(int x,\n           int y) except -1\n") == []
    assert functions_of("def f(\n    x,\n):\n    a\n\n    b\nc\n") == [("def f(", 6)]
    assert functions_of('def f():\n    """One.\n\n    Two.\n    """\n    a\n') == [("def f():", 2)]
