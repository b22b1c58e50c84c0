"""What documents link to, and what the walk through the code names, is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from documents import BLOCK, DOCUMENTS, ROOT
from sources import PACKAGES, READ, assert_none

from bfc_tools.predicting.releases import NEWEST, OLDEST


def test_every_link_of_a_document_leads_somewhere():
    assert_none(
        f"{path.name}: {link}"
        for path in (*DOCUMENTS, ROOT / "CONTRIBUTING.md")
        for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text())
        if not (path.parent / link).exists()
    )


def test_every_link_of_a_document_has_words():
    assert [path.name for path in DOCUMENTS if "[](" in path.read_text()] == []


def test_the_readme_has_no_link_that_an_index_page_would_break():
    assert re.findall(r"\]\((?!http)[^)]+\)", (ROOT / "README.md").read_text()) == []


SOURCES = {path: path.read_text() for path in READ}


def bodies_of(name: str) -> str:
    """What stands in the classes of a name, in sources and declarations."""
    block = re.compile(rf"^( *)(?:cdef )?(?:cpp)?class {name}\b.*\n((?:\1 .*\n|\n)*)", re.MULTILINE)
    return "".join(match[2] for text in SOURCES.values() for match in block.finditer(text))


def is_defined(name: str) -> bool:
    """Whether the package has a function, a class, a constant or a field of a name, or a member of
    a class where the name has a dot."""
    if re.fullmatch(r"\w+\.(pyx|pxd|py|hpp)", name):
        return any(found for package in PACKAGES for found in package.rglob(name))
    owner, _, last = name.rpartition(".")
    texts = [bodies_of(owner)] if owner else list(SOURCES.values())
    a_function = re.compile(
        rf"^ *(?:(?:async )?def|cdef|cpdef|cbool)\b[^=\n(#]*\b{last}\(", re.MULTILINE
    )
    a_kind = re.compile(rf"^ *(?:cdef )?(?:cpp)?(?:class|struct|enum) {last}\b", re.MULTILINE)
    if any(a_function.search(text) or a_kind.search(text) for text in texts):
        return True
    a_field = re.compile(
        rf"^ +(?:cdef )?[\w\[\]*., ]*\b{last}\b(?: = \w+)? *(?:#.*)?$", re.MULTILINE
    )
    declared = [text for path, text in SOURCES.items() if path.suffix == ".pxd"]
    return any(a_field.search(text) for text in ([bodies_of(owner)] if owner else declared))


def test_what_the_walk_names_is_called_so():
    prose = BLOCK.sub("", (ROOT / "docs" / "walk.md").read_text())
    names = set(re.findall(r"`([\w.]+)`", prose))
    assert len(names) > 40
    assert [name for name in sorted(names) if not is_defined(name)] == []


def test_a_name_that_the_package_lacks_is_found_out():
    assert is_defined("BFCAllocator.set_request")
    assert is_defined("Bins.pop_best_fit")
    assert is_defined("pending")
    assert not is_defined("BFCAllocator.request")
    assert not is_defined("request")
    assert not is_defined("_no_such_file.pyx")


#: Of PyTorch and of readers: files with these names are not here.
OTHERS_FILES = {"behaviour", "compare-two-runs.md"}


def test_the_files_targets_and_benchmarks_that_documents_name_are_there():
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    files = [Path(name).parts for name in listed.stdout.splitlines()]
    ends = {"/".join(parts[at:]) for parts in files for at in range(len(parts))}
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing = []
    for path in (*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"):
        prose = BLOCK.sub("", path.read_text())
        named = re.findall(r"`([\w./-]+\.(?:pyx|pxd|pyi?|hpp|h|cpp|c|js|md|toml))`", prose)
        named += [f"bench/{name}.py" for name in re.findall(r"`python -m bench\.(\w+)", prose)]
        if not OTHERS_FILES & {path.name, path.parent.name}:
            missing += [f"{path.name}: {name}" for name in named if name not in ends]
        made = re.findall(r"`make ([a-z0-9-]+)", prose)
        missing += [f"{path.name}: make {name}" for name in made if name not in targets]
    assert_none(missing)


VERSIONS = (ROOT / "docs" / "reference" / "versions.md").read_text()


def test_the_page_on_versions_has_the_bounds_of_the_project_file():
    project = (ROOT / "pyproject.toml").read_text()
    bounds = re.findall(r"`([\w-]+[<>=]=?[^`]+)`", VERSIONS)
    assert len(bounds) > 10
    assert [bound for bound in bounds if not re.search(rf'"{re.escape(bound)}["; ]', project)] == []
    pythons = set(re.findall(r"Python :: (3\.\d+)", project))
    (supported,) = re.findall(r"CPython ([^|]+) \|", VERSIONS)
    assert set(re.findall(r"3\.\d+", supported)) == pythons


def _usual_torch() -> str:
    text = (ROOT / ".ci" / "constraints.txt").read_text()
    (found,) = re.findall(r"^torch==(.*)", text, re.MULTILINE)
    return found


def test_the_figures_of_each_release_are_of_the_pytorch_that_tests_run_with():
    """With another one tests/predicting/test_each_release.py is skipped."""
    minor = ".".join(_usual_torch().split(".")[:2])
    head, *_ = (ROOT / "bench" / "predicted.tsv").read_text().splitlines()
    assert head.endswith(f"\tby PyTorch {minor}"), "make predicted"


def test_the_page_on_versions_has_the_pytorches_that_are_tried():
    makefile = (ROOT / "Makefile").read_text()
    (tried,) = re.findall(r"^TORCHES := (.*)", makefile, re.MULTILINE)
    (named,) = re.findall(r"`make test-predict-versions` with ([^|]*) \|", VERSIONS)
    assert re.findall(r"[\d.]+\d", named) == tried.split()
    usual = _usual_torch()
    for target in ("test-predict", "test-torch"):
        assert f"`make {target}` with {usual}" in VERSIONS
    assert f"{OLDEST.name} to {NEWEST.name}, for CPUs" in VERSIONS
