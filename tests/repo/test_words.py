"""Phrases that a reader has to translate stay out of the package and its documents."""

from __future__ import annotations

import re

from sources import CHECKOUT, PACKAGES, assert_none

SOURCES = (".py", ".pyx", ".pxd", ".pyi", ".hpp", ".h", ".c", ".md", ".rst")
FOLDERS = [*PACKAGES, CHECKOUT / "docs"]
FILES = sorted(
    path
    for path in (
        CHECKOUT / "README.md",
        *(path for folder in FOLDERS for path in folder.rglob("*")),
    )
    if path.suffix in SOURCES
)
#: What was written once, and what to write instead.
PHRASES = {
    r"\b(that|which|what|it|they) (is|are) none\b": "say what is wrong: 'if `nbytes` is negative'",
    r"\bfor what is no\b": "'if it is not a ...'",
    r"\bwhat is no\b": "'what is not a ...', 'something that is not a ...'",
    r"\bis none that\b": "say what cannot be done with it",
    r"\bknown by its address\b": "'indexed by address', 'an address of ...'",
    r"\bkeeps less than it can\b": "'stores few numbers and derives the others'",
    r"\bwhoever comes by\b": "'the caller'",
    r"\bwas then, but\b": "'unchanged, except ...'",
    r"\bNot where the host\b": "'False for host memory'",
    r"\bnobody (will know|would know|knows) (of )?(the|its|it)\b": "'it would be lost'",
    r"\bthe limit has its say\b": "'if the limit allows it'",
    r"\bit is anybody's guess\b": "'it would be mispredicted'",
    r"\bfreed it is\b": "'it is freed'",
    r"\bseldomer\b": "'less often'",
    r"\bput back, or stay\b": "'the larger of the old and the new'",
}


def found_in(text: str) -> list[str]:
    """The phrases of a text, whose lines may break anywhere in one."""
    words = re.sub(r"\s*\n[\s#/*:]*", " ", text)
    return [
        f"{found[0]!r}: {instead}"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase, words)
    ]


def test_no_phrase_needs_a_translation():
    assert_none(
        f"{path.relative_to(CHECKOUT)}: {found}"
        for path in FILES
        for found in found_in(path.read_text())
    )


def test_a_phrase_is_found_across_lines():
    assert found_in("Raises ValueError for a size that is\n    # none.") != []
    assert found_in("where there is none") == []
