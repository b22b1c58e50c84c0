"""The numbered cases of expandable segments, on PyTorch's compiled allocators and on the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from caching_subject import CommonPeer, Ours
from expandable_cases import CASES
from expandable_script import Case, Runner, parse_cases, parsed, written

from bfc.pytorch.rules import VERSIONS
from bfc_slow_models.torch_model import TorchModel

DOCUMENT = Path(__file__).parents[2] / "docs" / "behaviour" / "pytorch.md"
#: Who takes the cases, and whether as upstream does where ours does otherwise.
SUBJECTS: dict[str, tuple[Callable[..., Any], bool]] = {
    "original": (CommonPeer, True),
    "model": (TorchModel, True),
    "model that rolls back": (partial(TorchModel, rolls_back=True), False),
    "ours": (Ours, False),
}
#: Of a failed unmapping the model knows what upstream does alone.
NOT_MODELLED = [("37", "model that rolls back")]
#: Ranges that are too small, and scopes that gate: `test_pytorch_versions.py` has those of 2.15.
OF_2_11 = ("19", "21", "22", "46")
TAKEN = [
    pytest.param(
        case,
        *SUBJECTS[name],
        version,
        marks=[pytest.mark.peers] if name == "original" else [],
        id=f"EX-{case.number} {name} {version}",
    )
    for case in CASES
    for name in SUBJECTS
    for version in VERSIONS
    if (case.number, name) not in NOT_MODELLED and (version == "2.11" or case.number not in OF_2_11)
]


@pytest.mark.parametrize(("case", "make", "upstream", "torch"), TAKEN)
def test_a_numbered_case(case: Case, make: Callable[..., Any], upstream: bool, torch: str) -> None:
    subject = make(torch=torch, **case.options)
    try:
        Runner(subject, upstream).run(case)
    finally:
        subject.close()


def test_all_cases_of_the_document_but_those_left_out_are_there() -> None:
    """Those need kinds of handles, peers, other processes, two devices, or an allocator of a pool's
    own."""
    left_out = ["31", "32", "33", "38", "39", "40", "41", "44", "45"]
    told = re.findall(r"^\| EX-(\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(told) > 50
    assert [number for number in told if number not in left_out] == [case.number for case in CASES]


# The runner itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512", 512), ("600K", 600 << 10), ("1M+512", (1 << 20) + 512), ("0", 0)]
)
def test_a_size_is_read_as_it_is_written(text: str, nbytes: int) -> None:
    assert (parsed(text), written(nbytes)) == (nbytes, text)


@pytest.mark.parametrize(
    "wrong",
    [
        "alloc c 2M -> R0+20M",
        "alloc c 2M -> oom",
        "alloc c 2M -> not R0+34M",
        "calls c20 m(R0) a(R0,20M)",
        "blocks R0 20M[2M:A 18M:-]",
        "stats reserved=20M",
        "trace segment_map(R0,20M)",
        "free a -> driver",
        "empty -> driver",
    ],
)
def test_a_step_that_is_not_as_told_is_an_error(wrong: str) -> None:
    steps = ["alloc a 4M -> R0", "alloc b 30M -> R0+4M", wrong]
    (case,) = parse_cases("\n    ".join(["EX-1: a wrong case", *steps]))
    with pytest.raises(AssertionError, match=f"EX-1, {re.escape(wrong)}"):
        Runner(TorchModel(**case.options), upstream=True).run(case)
