"""The README, the documents and the docstrings, run as they are written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pocl
import pytest
from documents import BLOCK, DOCUMENTS, ROOT, run_in_a_process
from own_interpreter import run as run_alone

import bfc
from bfc import study, testing
from bfc.cli import main
from bfc.cli.miniature import record
from bfc.testing import cuda_emulator as emulator

#: These run where distributed and torch are installed: tests/dask and tests/torch_opencl have them.
RUN_ELSEWHERE = ("dask.md", "tensors-on-opencl.md")
RUN = [path for path in DOCUMENTS if path.name not in RUN_ELSEWHERE]


@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_document_runs_and_prints_what_stands_below_it(path: Path) -> None:
    """In a process of its own. A page that needs CUDA loads the emulated driver itself, so that a
    reader without a GPU can try it; on a GPU (BFC_TEST_GPU=1) that is left out."""
    if "numba" in path.read_text():
        pytest.importorskip("numba")
        pytest.importorskip("cuda.core")
    if "pyopencl" in path.read_text() and not pocl.devices():
        pytest.skip(str(bfc.opencl.is_available()))
    ran = run_in_a_process(path, "import pocl; pocl.devices()")
    assert (ran.returncode, ran.stderr) == (0, "")


SHELL = re.compile(
    r"^\$ (bfc (?:advise|replay|--version)[^#\n]*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE
)
SHOWN = [
    (path, command.split(), output.splitlines())
    for path in DOCUMENTS
    for command, output in SHELL.findall(path.read_text())
    if output
]


def without_times(line: str) -> str:
    """A row of the table without the nanoseconds, and with one blank between its columns."""
    return re.sub(r"(%|-) +\d+\.\d\b", r"\1 ns", " ".join(line.split()))


@pytest.mark.parametrize(
    ("path", "command", "shown"), SHOWN, ids=lambda value: getattr(value, "name", None)
)
def test_a_command_of_a_document_prints_what_stands_below_it(
    path: Path, command: list[str], shown: list[str]
) -> None:
    """Every line that is shown; "..." stands for lines that are left out. Only what `bfc advise`
    says while it works goes elsewhere."""
    ran = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    printed = [without_times(line) for line in ran.stdout.splitlines()]
    wanted = [without_times(line) for line in shown if line != "..."]
    assert re.sub(r"bfc advise: .*\n", "", ran.stderr) == ""
    assert [line for line in wanted if line not in printed] == []


def test_the_first_screen_of_the_readme_runs_far_from_a_checkout(tmp_path, monkeypatch):
    """What it installs is there, and another recording in the place of the training's."""
    first_screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    memory = types.SimpleNamespace(
        _record_memory_history=lambda: None, _dump_snapshot=lambda name: record(Path(name))
    )
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(memory=memory))
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, code in BLOCK.findall(first_screen):
        if kind == "py":
            exec(code, {"torch": torch})
            continue
        for name, *words in (shlex.split(line[2:], comments=True) for line in code.splitlines()):
            if name == "bfc":
                assert main(words) == 0
                ran.append(words[0])
    assert ran == ["demo", "advise", "report"]
    assert (tmp_path / "snapshot.html").exists()


def test_the_documents_show_what_commands_print():
    assert {path.name for path, _, _ in SHOWN} >= {"README.md", "first-hour.md"}


#: These import torch, which is not here, and have no examples.
WITH_TORCH = {
    f"bfc.integrations.torch_opencl.{name}"
    for name in ("copies", "device_module", "kernels", "places", "runtime")
}
FOUND = {module.name for module in pkgutil.walk_packages(bfc.__path__, "bfc.")}
MODULES = ["bfc", *sorted(FOUND - WITH_TORCH)]


def test_modules_that_are_not_tried_have_no_examples() -> None:
    assert WITH_TORCH <= FOUND
    for name in WITH_TORCH:
        path = ROOT / f"{name.replace('.', '/')}.py"
        assert ">>>" not in path.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run(name: str):
    if "emulator" in name:  # which change the one machine of a process
        run = f"import doctest, {name}; print(doctest.testmod({name}).failed)"
        assert emulator.script(run).stdout == "0\n"
        return
    if name == "bfc.integrations":  # an emulated driver in this process would count as a GPU
        run_alone(f"import doctest, {name}; assert doctest.testmod({name}).failed == 0")
        return
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_examples_are_found_in_compiled_modules_too():
    from bfc.allocators import _allocator

    assert len([test for test in doctest.DocTestFinder().find(_allocator) if test.examples]) >= 5


def test_every_link_of_a_document_leads_somewhere():
    for path in DOCUMENTS:
        for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        assert "[](" not in path.read_text(), f"{path.name}: a link without words"


def test_the_readme_has_no_link_that_an_index_page_would_break():
    assert re.findall(r"\]\((?!http)[^)]+\)", (ROOT / "README.md").read_text()) == []


REFERENCE = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
MODULES_OF_USERS = ("cuda", "opencl", "pinned", "integrations", "testing")


def public_names() -> list[str]:
    """Every name that the reference must have, with the module that a user takes it from: what
    `bfc` has too is described there alone."""
    names = [f"bfc.{name}" for name in bfc.__all__ if name not in MODULES_OF_USERS]
    of_testing = [
        name
        for name in testing.__all__
        if name != "cuda_emulator" and getattr(testing, name) is not getattr(bfc, name, None)
    ]
    names += [f"bfc.study.{name}" for name in study.__all__]
    return names + [f"bfc.testing.{name}" for name in of_testing]


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_stands_in_the_reference(name: str) -> None:
    assert re.findall(rf"^ *\.\. auto\w+:: {re.escape(name)}$", REFERENCE, re.MULTILINE) == [
        f".. auto{kind_of(name)}:: {name}"
    ]


def kind_of(name: str) -> str:
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module), last)
    if not isinstance(thing, type):
        return "function"
    return "exception" if issubclass(thing, BaseException) else "class"


def is_described(owner: type, name: str) -> bool:
    """Whether it has a docstring, or stands among the attributes of a class that the reference
    shows, or by itself there."""
    for member in (vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)):
        is_value = isinstance(member, types.MemberDescriptorType) or not hasattr(member, "__get__")
        if not is_value and (getattr(member, "__doc__", None) or "").strip():
            return True
    shown = [
        kind
        for kind in owner.__mro__
        if re.search(rf":: bfc\.(\w+\.)*{kind.__name__}$", REFERENCE, re.MULTILINE)
    ]
    listed = re.compile(rf"^ *(\w+, )*{name}(, \w+)* : ", re.MULTILINE)
    by_hand = f"   .. attribute:: {name}\n" in REFERENCE
    return by_hand or any(listed.search(kind.__doc__ or "") for kind in shown)


#: Those whose members are for pytest and Hypothesis to call.
RUN_BY_OTHERS = ("bfc.testing.AllocatorMachine", "bfc.testing.SubAllocatorContract")
CLASSES = [name for name in public_names() if kind_of(name) == "class"]


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in RUN_BY_OTHERS])
def test_every_public_member_stands_in_the_reference(name: str) -> None:
    module, _, last = name.rpartition(".")
    owner = getattr(importlib.import_module(module), last)
    ours = [kind for kind in owner.__mro__ if kind.__module__.startswith("bfc.")]
    members = {member for kind in ours for member in vars(kind) if not member.startswith("_")}
    assert [member for member in sorted(members) if not is_described(owner, member)] == []


@pytest.mark.parametrize("module", MODULES_OF_USERS)
def test_every_module_of_users_stands_in_the_reference(module: str) -> None:
    assert f":: bfc.{module}." in REFERENCE


@pytest.mark.parametrize("name", bfc.__all__)
def test_every_public_name_says_what_it_is(name: str):
    assert (getattr(bfc, name).__doc__ or "").strip()


def test_every_public_method_of_an_allocator_says_what_it_does():
    policies = (bfc.BFCAllocator, bfc.CachingAllocator, bfc.MemPool, bfc.CachingSettings)
    for owner in (*policies, bfc.Buffer, bfc.Trace, bfc.Snapshot, bfc.SharedCounter):
        for name in dir(owner):
            member = getattr(owner, name)
            if not name.startswith("_") and callable(member):
                assert (member.__doc__ or "").strip(), f"{owner.__name__}.{name}"


SOURCES = {
    path: path.read_text()
    for path in sorted((ROOT / "bfc").rglob("*"))
    if path.suffix in (".py", ".pyx", ".pxd")
}


def bodies_of(name: str) -> str:
    """What stands in the classes of a name, in sources and declarations."""
    block = re.compile(rf"^( *)(?:cdef )?(?:cpp)?class {name}\b.*\n((?:\1 .*\n|\n)*)", re.MULTILINE)
    return "".join(match[2] for text in SOURCES.values() for match in block.finditer(text))


def is_defined(name: str) -> bool:
    """Whether the package has a function, a class, a constant or a field of a name, or a member of
    a class where the name has a dot."""
    if re.fullmatch(r"\w+\.(pyx|pxd|py|hpp)", name):
        return any((ROOT / "bfc").rglob(name))
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
    assert is_defined("orphans")
    assert not is_defined("BFCAllocator.request")
    assert not is_defined("request")
    assert not is_defined("_no_such_file.pyx")


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
    folders = [ROOT / name for name in ("bfc", "tests", "bench", "docs", "examples")]
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


@pytest.mark.parametrize("original", BEHAVIOUR)
def test_the_sections_that_a_document_of_behaviour_names_are_in_it(original: str):
    named = set(re.findall(r"\((\d+\.\d{1,2})\)", BEHAVIOUR[original]))
    assert len(named) >= 4
    assert named <= places(original)


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
