"""What sources and documents cite of the two originals' behaviour is written there."""

from __future__ import annotations

import re
from pathlib import Path

from documents import ROOT
from sources import PACKAGES

BEHAVIOUR = {
    "TensorFlow": (ROOT / "docs" / "behaviour" / "tensorflow.md").read_text(),
    "PyTorch": (ROOT / "docs" / "behaviour" / "pytorch.md").read_text(),
}
PLACE = r"(?:(?:CC|EX)-\d+[a-c]?|\d+\.\d+|\d+[a-g]?)"
#: "PyTorch's behaviour, 5.3 and 5.5", "PyTorch's behaviour, case 34b",
#: "PyTorch's behaviour, EX-12", "TensorFlow's behaviour, CC-39".
CITED = re.compile(
    r"(TensorFlow|PyTorch)'s behaviour(?:\]\([^)]*\))?, (cases? )?"
    rf"({PLACE}(?:(?: and | to |, ){PLACE})*)"
)


def places(original: str) -> set[str]:
    """What can be cited of a document: its sections, and "case 34b", "CC-30" or "EX-12"."""
    text = BEHAVIOUR[original]
    sections = re.findall(r"^##+ (\d+(?:\.\d+)?)", text, re.MULTILINE)
    cases = re.findall(r"^\| ((?:CC|EX)-\d+[a-c]?|\d+[a-g]?) \|", text, re.MULTILINE)
    return {*sections, *(case if "-" in case else f"case {case}" for case in cases)}


def citations(text: str) -> list[tuple[str, str]]:
    """Whose behaviour is cited and where, also over the end of a line and of a comment's line."""
    flat = re.sub(r"\s*\n[ \t]*(?:#:?|//|\*)?[ \t]*", " ", text)
    return [
        (original, f"case {place}" if case and "-" not in place else place)
        for original, case, listed in CITED.findall(flat)
        for place in re.findall(PLACE, listed)
    ]


def written() -> dict[Path, str]:
    """All that is written in the repository, but for traces and the like."""
    kinds = (".py", ".pyi", ".pyx", ".pxd", ".hpp", ".h", ".c", ".cpp", ".md")
    folders = [*PACKAGES, *(ROOT / name for name in ("tests", "bench", "docs", "examples"))]
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    paths += [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {path: path.read_text() for path in paths if path.suffix in kinds and path.is_file()}


def test_what_is_cited_of_the_behaviour_is_there():
    cited = {
        (path, *citation)
        for path, text in written().items()
        if path != Path(__file__)
        for citation in citations(text)
    }
    assert len(cited) > 50
    assert [one for one in cited if one[2] not in places(one[1])] == []


def test_the_numbers_of_cases_in_tests_are_those_of_the_documents():
    tests = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    cases = re.findall(r"test_cc_(\d+[a-c]?)_", tests)
    rows = re.findall(r"test_rows?_(\d+[a-g]?)_", tests)
    assert len(set(cases)) > 50
    assert len(set(rows)) > 70
    assert {f"CC-{number}" for number in cases} <= places("TensorFlow")
    assert {f"case {number}" for number in rows} <= places("PyTorch")


def test_the_sections_that_a_document_of_behaviour_names_are_in_it():
    for original, text in BEHAVIOUR.items():
        named = set(re.findall(r"\((\d+\.\d{1,2})\)", text))
        assert len(named) >= 4
        assert named - places(original) == set()


def test_citations_are_found_and_wrong_ones_found_out():
    text = """
    #: (TensorFlow's behaviour,
    #: 2.5) and PyTorch's behaviour, cases 34b and 999; [PyTorch's
    behaviour](pytorch.md), 4. TensorFlow's behaviour, CC-39 and 2.99, step 7
    """
    found = citations(text)
    assert found == [
        *[("TensorFlow", "2.5"), ("PyTorch", "case 34b"), ("PyTorch", "case 999")],
        *[("PyTorch", "4"), ("TensorFlow", "CC-39"), ("TensorFlow", "2.99")],
    ]
    assert [place for original, place in found if place not in places(original)] == [
        "case 999",
        "2.99",
    ]


def test_no_document_is_cited_that_is_not_there():
    pattern = re.compile(r"\b[Ss]pec " + r"(?:\d|CC-)")
    assert [path for path, text in written().items() if pattern.search(text)] == []
