"""What several predictions answer in words, with figures that were made up for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.axes import Axis
from bfc_tools.predicting.cheapest import Cheapest
from bfc_tools.predicting.devices import DEVICES
from bfc_tools.predicting.largest import Largest, learn
from bfc_tools.predicting.search import Search
from bfc_tools.predicting.serves import Load, Serves
from bfc_tools.predicting.tries import Tried, all_of
from bfc_tools.predicting.whatif import WhatIf

MIB = 1 << 20


def figures(reserved: int, limit: int, fits: bool) -> dict[str, Any]:
    return {
        "fits": fits,
        "fits_at_most": fits,
        "limit": limit,
        "peak_requested": reserved,
        "peak_reserved": reserved,
        "peak_reserved_range": (reserved, reserved),
        "peak_reserved_after_repeats": None,
        "device": {"name": "a GPU", "memory": limit, "usable": limit},
        "hint": "",
    }


class MadeUp:
    """Answers at once: a batch reserves 10 MiB for each row, and one that needs a quarter more than
    there is fits, if only just. After `most` tries it is gone."""

    width = 2

    def __init__(self, needs: int = 0, most: int = 1000) -> None:
        self.needs, self.left = needs, most
        self.asked: list[Asked] = []

    def outcomes(self, questions: Mapping[Any, Asked]) -> Iterator[tuple[Any, Tried]]:
        for key, asked in questions.items():
            self.asked.append(asked)
            if not self.left:
                raise RuntimeError("the cluster is gone")
            self.left -= 1
            limit = DEVICES[asked.device].usable if asked.device in DEVICES else 100 * MIB
            needs = self.needs or 10 * MIB * int(asked.arguments[-1])
            yield key, Tried(figures(needs, limit, needs < 1.25 * limit))


def test_a_gpu_on_which_it_fits_only_just_is_named_with_the_next() -> None:
    found = Cheapest(Asked("train.py"), lambda name, tried: None)
    found.run(MadeUp(12 << 30))
    smallest, roomy = (row for row in found.rows if row.device in ("rtx2080ti", "rtx5080"))
    assert smallest.fits
    assert smallest.spare < 0 < roomy.spare
    assert re.fullmatch(
        r"The smallest GPU that it fits on is rtx2080ti, if only just: with more room it would "
        r"reserve 12.00 GiB of 10.25 GiB. The smallest with room to spare is t4: it reserves "
        r"12.00 GiB of 14.24 GiB, which leaves 16%.",
        found.answer,
    )
    assert not re.search(r"-\d+%", str(found))
    assert str(found).count("only just") == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("1..64", "The largest batch that fits on a GPU is 12, if only just: with more room it"),
        ("1..12", "All of batch 1..12 fit on a GPU, if only just: with more room 12 would reserve"),
        ("1..9", "All of batch 1..9 fit on a GPU: 9 reserves 90.00 MiB."),
    ],
)
def test_a_value_that_fits_only_just_is_said(values: str, said: str) -> None:
    found = Search(
        Asked("train.py", device="100MiB"), [Axis.parse(f"batch={values}")], lambda one, tried: None
    )
    found.run(MadeUp())
    assert found.answer.startswith(said)


class Unsure(MadeUp):
    """A program may need so many times as much as is counted; if that is 0, nobody knows."""

    def __init__(self, times: float, needs: int = 0) -> None:
        super().__init__(needs)
        self.times = times

    def outcomes(self, questions: Mapping[Any, Asked]) -> Iterator[tuple[Any, Tried]]:
        for key, tried in super().outcomes(questions):
            most = self.times * tried.needs <= tried.figures["limit"] if self.times else None
            yield key, Tried(tried.figures | {"fits_at_most": most and bool(tried.fits)})


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (2, "with the most that batch 9 may need it would not fit. 5, which was tried, would."),
        (0, "no upper bound is known of what batch 9 may need."),
    ],
)
def test_the_largest_is_said_to_be_so_as_counted(times: float, said: str) -> None:
    axes = [Axis.parse("batch=1,5,9")]
    found = Search(Asked("train.py", device="100MiB"), axes, lambda one, tried: None)
    found.run(Unsure(times))
    assert found.answer.endswith(f": 9 reserves 90.00 MiB. That is as counted: {said}")


def test_a_larger_value_that_is_known_better_is_not_named() -> None:
    found = Largest("batch", [4, 5, 6], limit=100)
    for at, most in enumerate((None, None, True)):
        told = figures(at, 100, at != 1) | {"fits_at_most": most}
        learn(found, at, Tried(told))
    assert (found.value, found.tries[-1].fits_at_most) == (4, True)
    assert found.answer.endswith("no upper bound is known of what batch 4 may need.")


@pytest.mark.parametrize(("times", "sure"), [(2, "rtx5090"), (1.1, "t4")])
def test_the_smallest_gpu_is_said_to_be_so_as_counted(times: float, sure: str) -> None:
    """Where it fits only just, and where there is room to spare."""
    found = Cheapest(Asked("train.py"), lambda name, tried: None)
    found.run(Unsure(times, needs=12 << 30))
    said = f"with the most that it may need it would not fit. It would on {sure}."
    assert found.answer.endswith(f" That is as counted: {said}")


@pytest.mark.parametrize(
    ("answers", "all_are"),
    [((True, True), True), ((True, None), None), ((None, False, True), False), ((), True)],
)
def test_all_are_true_unless_one_is_not(answers: tuple[Any, ...], all_are: bool | None) -> None:
    assert all_of(answers) is all_are


@pytest.mark.parametrize(("because", "at_most"), [([], "at most "), (["x"], "")])
def test_what_is_served_is_said_as_counted(because: list[str], at_most: str) -> None:
    found = Serves(Asked("serve"), Load(256, 2), lambda load, tried: None)
    more = {"fits_at_most": not because, "reserved_bounds": {"because": because}}
    found.base = Tried(figures(9 * MIB, 100 * MIB, True) | more | {"not_counted": []})
    said, _, doubt = found.answer.partition(" That is as counted: with the most ")
    assert said.endswith(f"on a GPU: it reserves {at_most}9.00 MiB.")
    assert bool(doubt) == bool(because)
    assert f"9.00 MiB {at_most or 'as counted'}".strip() in str(found)


class Changed:
    """Answers what a program reserves with each change, in MiB of 100 that there are, with so many
    operators: two changes come before the program as it is. A request is refused where a quarter
    more than there is would be reserved. After `most` tries it is gone."""

    width = 2
    needs: ClassVar[dict[str, tuple[int, int]]] = {
        "": (130, 100),
        "offload": (60, 150),
        "for_loop": (110, 120),
        "max_split_size_mb:20,garbage_collection_threshold:0.8": (105, 100),
    }

    def __init__(self, most: int = 1000) -> None:
        self.left = most

    #: What else is known of the program as it is.
    more: ClassVar[dict[str, Any]] = {}

    def outcomes(self, questions: Mapping[Any, Asked]) -> Iterator[tuple[Any, Tried]]:
        for key in sorted(questions, key=[*list(questions)[1:3], *questions].index):
            if not self.left:
                raise RuntimeError("the cluster is gone")
            self.left -= 1
            needs, operators = self.needs.get(key, (130, 100))
            change = {"name": key, "times": 1, "line": f"{key}()", "where": [], "reason": ""}
            told = figures(needs * MIB, 100 * MIB, needs < 125)
            changes = [change] if key and ":" not in key else []
            told |= {"operators": operators, "changes": changes, "answer": "No."}
            told |= {} if key else self.more
            yield key, Tried(told)


def test_a_change_with_which_it_fits_only_just_is_named_with_the_next() -> None:
    found = WhatIf(Asked("train.py"), lambda name, tried: None)
    found.run(Changed())
    assert found.answer == (
        "No. It fits with for_loop, if only just: with more room it would reserve 110.00 MiB. With "
        "room to spare it fits with offload: it reserves 60.00 MiB."
    )
    (row,) = (line for line in str(found).splitlines() if "only just" in line and "%" in line)
    assert re.fullmatch(r"for_loop .* yes .* 110.00 MiB .* \+20%  only just", row)
    assert [one["name"] for one in found.to_dict()["changes"] if one["only_just"]] == ["for_loop"]


@pytest.mark.parametrize("needs", [110, 90])
def test_a_program_that_fits_only_just_as_it_is(monkeypatch, needs: int) -> None:
    monkeypatch.setitem(Changed.needs, "", (needs, 100))
    found = WhatIf(Asked("train.py"), lambda name, tried: None)
    found.run(Changed())
    (row,) = (line for line in str(found).splitlines() if line.startswith("(as it is)"))
    assert row.endswith("only just") == (needs > 100)


def test_what_is_known_by_arithmetic_is_marked(monkeypatch) -> None:
    """States of 32 MiB: 8 bits leave a quarter, and four bytes for each 256; two GPUs a half."""
    monkeypatch.setitem(Changed.more, "peak", {"by_kind": {"optimizer state": 32 * MIB}})
    found = WhatIf(Asked("train.py"), lambda name, tried: None)
    found.run(Changed())
    rows = {row.name: row for row in found.rows if not row.tried}
    assert {name: row.saved / MIB for name, row in rows.items()} == {
        "states in 8 bits": 23.875,
        "states on 2 GPUs": 16,
    }
    assert all(row.fits is None and row.reserved == 130 * MIB - row.saved for row in rows.values())
    assert str(found).count("# by arithmetic, and not tried") == 2
    assert "a fused or chunked loss: the loss is the program's own code" in str(found)


def test_settings_that_are_advised_are_tried(monkeypatch) -> None:
    name = "max_split_size_mb:20,garbage_collection_threshold:0.8"
    advised = {"policy": "caching", "settings": name}
    monkeypatch.setitem(Changed.more, "advice", {"best": 0, "rows": [advised]})
    found = WhatIf(Asked("train.py"), lambda name, tried: None)
    found.run(Changed())
    (row,) = (row for row in found.rows if row.name == name)
    assert (row.fits, row.tried, row.saved) == (True, True, 25 * MIB)
    assert f"It fits with {name}, if only just" in found.answer
    assert f"  {name}: export PYTORCH_CUDA_ALLOC_CONF={name}" in str(found).splitlines()


def test_changes_are_told_that_were_tried_before_all_was_gone() -> None:
    """Once it is known what the program needs as it is, from which the others are told."""
    found = WhatIf(Asked("train.py"), lambda name, tried: None)
    with pytest.raises(RuntimeError, match="gone"):
        found.run(Changed(most=2))
    assert not found.is_known
    with pytest.raises(RuntimeError, match="gone"):
        found.run(Changed(most=5))
    assert found.answer.startswith("Not finished. Of what was tried: No. It fits with offload")
    assert [row.name for row in found.rows] == ["checkpoint", "bf16", "half_batch", "offload"]


def test_gpus_are_told_that_were_tried_before_all_was_gone() -> None:
    found = Cheapest(Asked("train.py"), lambda name, tried: None)
    with pytest.raises(RuntimeError, match="gone"):
        found.run(MadeUp(1 << 30, most=3))
    assert found.answer.startswith("Not finished. Of what was tried: The smallest GPU that it fits")
    assert len(found.rows) == 3


def test_no_question_is_asked_twice() -> None:
    """The tries that show how a script takes a second argument are those of the first row, too."""
    runs = MadeUp()
    axes = [Axis.parse("batch=1..64"), Axis.parse("length=3,5")]
    told: list[Any] = []
    found = Search(
        Asked("train.py", device="100MiB"), axes, lambda values, tried: told.append(values)
    )
    found.run(runs)
    assert len(runs.asked) == len(set(runs.asked)) < len(told)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_tries_are_told_that_came_before_all_was_gone(most: int) -> None:
    """Also those with which it was found out how the script takes its argument."""
    found = Search(
        Asked("train.py", device="100MiB"), [Axis.parse("batch=1..64")], lambda one, tried: None
    )
    with pytest.raises(RuntimeError, match="gone"):
        found.run(MadeUp(most=most))
    assert found.is_known
    assert len(found.to_dict()["tries"]) == most
    assert found.answer.startswith("Not finished: batch ")
