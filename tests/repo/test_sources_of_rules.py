"""Whatever says where a rule was read says in which release, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import CHECKOUT, assert_none

from bfc_tools.predicting.rules.operators import RELEASE

RULES = CHECKOUT / "bfc_tools" / "predicting"


def without_release(text: str) -> Iterator[int]:
    """The lines of calls of `file` that give no release, nor a commit, as it stands."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "file"
        ):
            given = [one.value for one in node.keywords if one.arg == "read"]
            values = [one.value for one in given if isinstance(one, ast.Constant)]
            if not (values and isinstance(values[0], str) and RELEASE.fullmatch(values[0])):
                yield node.lineno


def test_each_source_of_a_rule_has_a_release() -> None:
    texts = {path: path.read_text("utf-8") for path in sorted(RULES.rglob("*.py"))}
    named = sum(text.count(" read=") for text in texts.values())
    assert named > 150
    assert_none(
        f"{path.relative_to(CHECKOUT)}:{line}: file(..., read=) says in which release"
        for path, text in texts.items()
        for line in without_release(text)
    )


def test_a_source_without_a_release_is_seen() -> None:
    assert list(without_release('file("a.cpp")\nfile("a.cpp", "f", read="2.15.0")\n')) == [1]
    assert list(without_release('file("a.cpp", read="")\nfile("a.cpp", read=RELEASE)\n')) == [1, 2]
    assert list(without_release('file("a.cpp", read="5da7b8ec2a180189a97404e8")\n')) == []
