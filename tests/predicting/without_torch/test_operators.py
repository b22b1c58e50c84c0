"""The records of operators: what is known of each stands in one place, with where it is from."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from bfc_tools.cli import main
from bfc_tools.predicting import rules
from bfc_tools.predicting.about import about
from bfc_tools.predicting.rules import operators
from bfc_tools.predicting.rules.operators import AROUND, OPERATORS, Fact, file, spec_of

#: A file of PyTorch's, or of another project that is named.
FILE = re.compile(r"(aten/src/ATen|torch|c10)/[\w/]+\.\w+|[\w-]+/[\w-]+: [\w/.]+\.\w+")
BLAS = file("ATen/native/cuda/Blas.cpp", read="2.15.0")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, operators.Spec]:
    """An empty one."""
    made: dict[str, operators.Spec] = {}
    monkeypatch.setattr(operators, "OPERATORS", made)
    return made


def facts() -> Iterator[tuple[str, Fact]]:
    for spec in OPERATORS.values():
        yield from ((spec.name, one) for one in spec.facts)
    yield from ((function.__name__, one) for function, one in AROUND.items())


def test_each_fact_says_where_it_is_from() -> None:
    assert [name for name, one in facts() if not (one.sources or one.seen)] == []
    paths = {source.path for _, one in facts() for source in one.sources}
    assert [path for path in sorted(paths) if not FILE.fullmatch(path)] == []
    assert len(paths) > 100


#: What is looked for in one file: what an operator takes, what it returns, and what is done with
#: tensors that are laid out otherwise.
SUBJECTS = (
    ("after", "before", "between"),
    ("kernel", "composition"),
    ("answer",),
    ("sparse",),
    ("compressed",),
)


def functions_of(spec: operators.Spec, fields: tuple[str, ...]) -> Iterator[object]:
    for field in fields:
        value = getattr(spec, field)
        yield from value if isinstance(value, list) else [value] * (value is not None)


def test_what_an_operator_takes_or_returns_stands_in_one_file() -> None:
    apart = {
        (spec.name, fields): files
        for spec in OPERATORS.values()
        for fields in SUBJECTS
        if len(files := {one.__module__ for one in functions_of(spec, fields)}) > 1
    }
    assert apart == {}
    taking = [spec for spec in OPERATORS.values() if [*functions_of(spec, SUBJECTS[0])]]
    assert len(taking) > 100


def test_a_rule_without_a_source_is_refused(registry: dict[str, operators.Spec]) -> None:
    with pytest.raises(ValueError, match=r"say where that was read \(source=file"):

        @operators.rule("aten::mm")
        def nothing(call: object) -> Iterator[operators.Workspace]:
            yield from ()

    assert registry == {}


@pytest.mark.parametrize("release", ["", "2", "main", "v2.15.0", "2.15.0a0"])
def test_a_source_without_a_release_is_refused(release: str) -> None:
    with pytest.raises(ValueError, match=r"Blas\.cpp: read='.*' is no release, such as 2\.15\.0"):
        file("ATen/native/cuda/Blas.cpp", read=release)
    assert file("ATen/native/cuda/Blas.cpp", read="5da7b8ec2a180189").read == "5da7b8ec2a180189"


def test_what_is_known_already_is_refused(registry: dict[str, operators.Spec]) -> None:
    for kind in (operators.kernel, operators.rule):
        kind("aten::mm", source=BLAS)(print)
        with pytest.raises(ValueError, match="aten::mm is registered twice"):
            kind("aten::mm", source=BLAS)(print)
    operators.mark("composed", "aten::mm", source=BLAS)
    with pytest.raises(ValueError, match="registered twice: is computed by others"):
        operators.mark("composed", "aten::mm", source=BLAS)
    assert [*registry] == ["aten::mm"]


def test_an_overload_has_what_all_have_and_its_own(registry: dict[str, operators.Spec]) -> None:
    operators.rule("aten::mm", source=BLAS)(print)
    operators.kernel("aten::mm", source=BLAS)(len)
    operators.rule("aten::mm.out", source=BLAS)(repr)
    operators.kernel("aten::mm.out", source=BLAS)(abs)
    both, one = spec_of("aten::mm", "out"), spec_of("aten::mm", "")
    assert (both.after, both.kernel) == ([print, repr], abs)
    assert (one.after, one.kernel) == ([print], len)
    assert registry["aten::mm"].after == [print]


def test_an_operator_without_a_record_is_known_of_nothing() -> None:
    assert spec_of("aten::no_such_operator", "").facts == []


def test_a_record_is_printed_with_what_is_not_known() -> None:
    found = about("topk")
    assert found.startswith("aten::topk\n  takes memory after its results: A copy of what is not")
    for line in (
        "    read in aten/src/ATen/native/cuda/TensorTopK.cu, as of 2.6.0\n",
        "    seen: an H100 with PyTorch 2.11 and later\n",
        "    stands in bfc_tools/predicting/rules/sorting.py, topk\n",
        "not known:\n",
    ):
        assert line in found
    assert "aten::mm.dtype_out\n" in about("aten::mm")
    assert about("aten::convolution").count("It is estimated: of 36,735 passes") == 1
    read = about("aten::native_dropout")
    assert "whether its kernel for CUDA takes memory beside its results: none is counted" in read


def test_names_that_are_no_operator_are_told_those_like_them() -> None:
    with pytest.raises(
        ValueError, match=r"no operator aten::topkk is known; like it are aten::top"
    ):
        about("aten::topkk")
    with pytest.raises(ValueError, match=r"no operator xyzzy is known. Write it as in aten::mm"):
        about("xyzzy")


def test_what_is_not_known_at_all_is_told_of_other_libraries() -> None:
    assert rules.unknowable.unknowable("torchao::mm") is not None
    assert rules.unknowable.unknowable("aten::mm") is None


def test_the_command_prints_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--about", "aten::topk"]) == 0
    assert capsys.readouterr().out == f"{about('aten::topk')}\n"
    assert main(["predict", "--about", "aten::topkk"]) == 2
    assert "like it are aten::topk" in capsys.readouterr().err
    assert main(["predict", "--about", "aten::topk", "train.py"]) == 2
    assert "runs no script" in capsys.readouterr().err
