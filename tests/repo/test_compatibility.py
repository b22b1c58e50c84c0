"""The page on compatibility: each of its lines names a test, and these are some of them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
from documents import ROOT
from sources import PACKAGES, assert_none

import bfc
from bfc.pytorch.rules import NEWEST, VERSIONS

PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAJOR = bfc.__version__.partition(".")[0]


def rows() -> list[tuple[str, str]]:
    """What each line of the tables promises, and what it says that holds it."""
    found = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    return [row for row in found if row[1] != "held by"]


def test_every_line_names_a_test_that_is_there() -> None:
    assert len(rows()) > 25
    faults = []
    for promised, held in rows():
        named = re.fullmatch(r"`([\w/]+\.py)`: `(test_\w+)`", held)
        file = ROOT / "tests" / named[1] if named else None
        if named is None or file is None or f"def {named[2]}(" not in file.read_text():
            faults.append(f"{promised}: {held}")
    assert_none(faults)


def test_everything_on_it_is_a_line_of_a_table() -> None:
    """But for its first lines, and one sentence before or behind a table."""
    prose = [line for line in PAGE.splitlines() if line and not line.startswith(("|", "#"))]
    assert len(prose) == 5, prose


WARNED = re.compile(r"((?:\"[^\"]*\"\s*)+),\s*(?:category=)?DeprecationWarning")


def told(text: str) -> Iterator[str]:
    """The texts of the deprecations in some code."""
    for found in WARNED.finditer(text):
        yield "".join(re.findall(r'"([^"]*)"', found[1]))


def says_enough(warning: str) -> bool:
    """Since when, and what to use; without a version, it says what a library that it stands for
    says of its own names."""
    found = re.fullmatch(r"\w+ is deprecated(?: since bfc (\d+)\.\d+)?: use \w.*", warning)
    return found is not None and found[1] in (None, MAJOR)


def test_a_deprecated_name_says_since_when_and_what_to_use() -> None:
    """And one of an older major release is gone."""
    sources = [
        path for package in PACKAGES for path in package.rglob("*.py*") if path.suffix != ".pyc"
    ]
    texts = {path: path.read_text(errors="replace") for path in sources if path.is_file()}
    assert_none(
        f"{path.name}: {warning}"
        for path, text in texts.items()
        for warning in told(text)
        if not says_enough(warning)
    )
    assert all(len(list(told(it))) == it.count("DeprecationWarning") for it in texts.values())
    assert list(told('warn("a is " "b", DeprecationWarning, stacklevel=2)')) == ["a is b"]
    assert says_enough(f"f is deprecated since bfc {MAJOR}.2: use g")
    assert not says_enough("f is deprecated since bfc 99.2: use g")
    assert not says_enough("f is deprecated")


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    listed = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    assert next(name for name in listed if name != "Unreleased") == bfc.__version__


def test_the_originals_have_names_that_stay() -> None:
    assert {"2.11", "2.15"} <= set(VERSIONS)
    assert bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 MiB")).torch == NEWEST
    for name in ("2.21", "2.23"):
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"), tensorflow=name).close()
    with pytest.raises(ValueError, match=r"2\.21"):
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"), tensorflow="2.20")


def test_wheels_are_for_the_pythons_that_are_supported() -> None:
    named = {
        word.rpartition(" ")[2]
        for word in PROJECT["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", word)
    }
    wheels = PROJECT["tool"]["cibuildwheel"]["build"]
    built = {f"3.{word[3:-2]}" for word in wheels if "t-" not in word}
    (made,) = re.findall(r"packages\.py (python3.*)", (ROOT / "Makefile").read_text())
    *usual, without_gil = made.split()
    assert named == built == {word.removeprefix("python") for word in usual}
    assert without_gil == "$(FREETHREADED)/bin/python3.13t"
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert min(named) == "3.11"
    assert [word for word in wheels if "t-" in word] == ["cp313t-*"]  # where the GIL may be off


def test_no_tensorflow_is_needed() -> None:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    assert [one for group in groups for one in group if one.startswith("tensorflow")] == []
    assert "import tensorflow" not in inspect.getsource(bfc)


def test_wheels_are_for_linux_with_glibc() -> None:
    systems = [one for one in PROJECT["project"]["classifiers"] if one.startswith("Operating")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert PROJECT["tool"]["cibuildwheel"]["skip"] == ["*-musllinux*"]
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "os: [ubuntu-latest, ubuntu-24.04-arm]" in workflow


def test_it_is_imported_without_a_warning() -> None:
    """And so is all that its names bring."""
    code = "import bfc, bfc.study, bfc.testing; [getattr(bfc, name) for name in bfc.__all__]"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)
