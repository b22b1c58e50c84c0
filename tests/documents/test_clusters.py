"""The page on containers and clusters: what it tells others to run are commands of bfc."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from documents import BLOCK, ROOT

from bfc_tools.cli import commands

BLOCKS = BLOCK.findall((ROOT / "docs" / "how-to" / "clusters.md").read_text())


def written() -> list[list[str]]:
    """The words of each command of bfc in a block, of a shell, an image or a list of YAML."""
    found = []
    for _, code in BLOCKS:
        found += [
            shlex.split(words) for words in re.findall(r"\bbfc ((?:predict|run) [^&\n]*)", code)
        ]
        found += [re.split(r",\s*", words) for words in re.findall(r"\[bfc, (.*?)\]", code)]
    return found


def test_the_page_has_commands_for_each_scheduler() -> None:
    assert [kind for kind, _ in BLOCKS] == ["dockerfile", "sh", "sh", "yaml", "py"]
    assert len(written()) == 4


@pytest.mark.parametrize("words", written(), ids=" ".join)
def test_each_is_a_command_with_options_that_there_are(words: list[str]) -> None:
    name, *rest = words
    known = {option for action in commands()[1][name]._actions for option in action.option_strings}
    assert {word for word in rest if word.startswith("--")} <= known
    assert rest[-1] == "--no-advice" or rest[-1].endswith(".py")


def test_the_scripts_are_scripts_of_a_shell() -> None:
    for kind, code in BLOCKS:
        if kind == "sh":
            subprocess.run(["sh", "-n", "-c", code], check=True)
