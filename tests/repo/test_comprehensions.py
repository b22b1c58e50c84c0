"""Compiled code has no list comprehension, which Cython compiles wrongly."""

from __future__ import annotations

import re

from sources import COMPILED, assert_none, file_name

LIST_COMPREHENSION = re.compile(r"\[[^\[\]]*\sfor\s[^\[\]]*\sin\s[^\[\]]*\]")
SIMPLE_BRACKETS = re.compile(r"\[(?![^\[\]]*\sfor\s)[^\[\]]*\]")


def list_comprehensions(text: str) -> list[str]:
    text = re.sub(r'(?s)("""|\'\'\').*?\1', "", text)
    text = re.sub(r"#.*", "", text)
    while SIMPLE_BRACKETS.search(text):
        text = SIMPLE_BRACKETS.sub("()", text)
    return LIST_COMPREHENSION.findall(text)


def test_compiled_code_has_no_list_comprehension() -> None:
    """Cython 3.3.1 frees an item twice where the list cannot grow. Write a loop, or map()."""
    assert_none(
        f"{file_name(path)}: {found}"
        for path in COMPILED
        for found in list_comprehensions(path.read_text())
    )


def test_the_reader_of_comprehensions_sees_them_all() -> None:
    assert list_comprehensions("x = [f(n) for n in m]") == ["[f(n) for n in m]"]
    assert list_comprehensions("x = [f(n[0]) for n in m[1]]") == ["[f(n()) for n in m()]"]
    assert list_comprehensions("x = [\n    f(n)\n    for n in m]") != []
    assert list_comprehensions("for n in a[0], b[1]:\n    pass  # [n for n in m]") == []
