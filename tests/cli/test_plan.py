"""`bfc plan`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from repeated_runs import some_run

import bfc
from bfc_tools.cli import main

TRACES = Path(__file__).parents[2] / "bench" / "traces"
REPEATS = str(TRACES / "gpt2m_adam.npz")
DOES_NOT = str(TRACES / "gpu_lm_small.npz")


def test_a_run_that_repeats_is_planned(tmp_path: Path, capsys):
    target = tmp_path / "plan.npz"
    assert main(["plan", REPEATS, "-o", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{target}: <bfc.Plan, ")
    assert lines[1].split() == ["kind", "iterations", "events", "each", "alike"]
    assert lines[2].split()[:2] == ["train", "4"]
    assert lines[3].endswith("to 20249, found from their structure")
    assert lines[4].split()[:1] == ["head"]
    assert lines[5].startswith("train body")
    assert "3 of 3 recorded agree" in lines[5]
    assert "1.0000 of the most that was live" in lines[-3]
    assert lines[-2].startswith("caching (PyTorch 2.15) reserved ")
    assert ": the plan saves " in lines[-2]
    assert lines[-1].startswith("tried on the recording, ")
    plan = bfc.Plan.load(target)
    assert plan.kinds == ("train",)
    assert plan.span == plan.bound


def test_a_run_that_does_not_repeat_is_laid_out_once(capsys):
    assert main(["plan", DOES_NOT, "--fallback", "bfc"]) == 0
    out = capsys.readouterr().out
    assert "no iterations: no order of requests comes again" in out
    assert "an allocator declines it: no iteration comes again" in out
    assert "bfc reserved" in out


def test_a_version_can_be_chosen(capsys):
    assert main(["plan", DOES_NOT, "--torch", "2.11"]) == 0
    assert "caching (PyTorch 2.11) reserved " in capsys.readouterr().out


def test_marks_may_be_in_a_file(tmp_path: Path, capsys):
    run = some_run(random.Random(4))
    run.trace.save(tmp_path / "run.npz")
    (tmp_path / "marks.json").write_text(json.dumps(run.marks))
    words = ["plan", str(tmp_path / "run.npz"), "--marks", str(tmp_path / "marks.json")]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks)
    assert (said["span"], said["online"]) == (plan.span, plan.online)
    assert [part["slots"] for part in said["parts"]] == [len(part) for part in plan.parts]
    assert main([*words, "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["role"] for row in rows] == [part.role for part in plan.parts]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("{", "it is not JSON"), ("7", "it is not a list of marks"), ("[-4]", "marks rise")],
)
def test_wrong_marks_are_refused_in_one_line(tmp_path: Path, capsys, text: str, fault: str):
    (tmp_path / "marks.json").write_text(text)
    assert main(["plan", DOES_NOT, "--marks", str(tmp_path / "marks.json")]) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1


def test_an_empty_run_is_refused_in_one_line(tmp_path: Path, capsys):
    bfc.Trace([], [], []).save(tmp_path / "empty.npz")
    assert main(["plan", str(tmp_path / "empty.npz")]) == 2
    assert "empty.npz: the run asks for no memory" in capsys.readouterr().err


def test_a_kind_does_not_move_the_cursor(tmp_path: Path, capsys):
    marks = [[0, "a\x1b[2J"], [2, "a\x1b[2J"], [4, "a\x1b[2J"]]
    run = bfc.Trace([0, 1] * 3, [0, 0] * 3, [32 << 20, 0] * 3, meta={"marks": marks})
    run.save(tmp_path / "run.npz")
    assert main(["plan", str(tmp_path / "run.npz")]) == 0
    out = capsys.readouterr().out
    assert "'a\\x1b[2J' body" in out
    assert "\x1b" not in out
