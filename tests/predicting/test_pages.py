"""Pages about predictions, run as they are written."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from documents import BLOCK, DOCUMENTS, ROOT, commands, not_printed
from fresh_commands import _main, called, command

from bfc_tools.cli import main

HOW_TO = ROOT / "docs" / "how-to"
IN_CI = (HOW_TO / "continuous-integration.md").read_text()
TRAIN = """
import sys, torch
model = torch.nn.Linear(1024, WIDTH).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a training that has grown since a branch `main`."""
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for width, branch in ((1024, "main"), (8192, "wider")):
        (tmp_path / "train.py").write_text(TRAIN.replace("WIDTH", str(width)))
        if branch == "main":
            subprocess.run([*git, "init", "-q", "-b", branch], check=True)
        else:
            subprocess.run([*git, "checkout", "-q", "-b", branch], check=True)
        subprocess.run([*git, "add", "train.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", branch], check=True)
    return tmp_path


def run_sh(code: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(sys.executable).parent)
    return subprocess.run(
        ["bash", "-e", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "BASE": "main"},
    )


BUDGET, GROWTH = (code for kind, code in BLOCK.findall(IN_CI) if kind == "sh")
(TESTS,) = (code for kind, code in BLOCK.findall(IN_CI) if kind == "py")
(GROWN,) = (code for kind, code in BLOCK.findall(IN_CI) if kind == "text")


def test_the_gate_with_a_budget(repository: Path) -> None:
    ran = run_sh(BUDGET)
    assert ran.returncode == 0, ran.stderr
    assert "with a budget of 60.00 GiB" in ran.stdout.splitlines()[0]
    _, *words = shlex.split(BUDGET)
    code, _, err = command(*("60MiB" if word == "a100" else word for word in words))
    assert code == 1, f"nor does the GPU suffice: {err}"
    code, out, _ = command(*("60MiB" if word == "60GiB" else word for word in words), "--json")
    found = json.loads(out)
    assert (code, found["fits"], found["fits_gpu"]) == (3, False, True)
    assert found["budget"] == found["limit"] == 60 << 20


def _pytest(words: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        pytest.main(words)
    return out.getvalue()


def test_the_tests_with_budgets(tmp_path: Path) -> None:
    file = tmp_path / "test_theirs.py"
    words = ["-q", "-p", "no:cacheprovider", str(file)]
    file.write_text(TESTS)
    assert "3 passed" in called(_pytest, [*words, "--bfc-write-budgets"])
    assert "3 passed" in called(_pytest, words)
    file.write_text(TESTS.replace("Linear(1024, 1024)", "Linear(1024, 8192)"))
    printed = called(_pytest, words)
    assert [line for line in GROWN.splitlines() if line.strip() not in printed] == []


def test_the_gate_on_growth(repository: Path) -> None:
    ran = run_sh(GROWTH)
    assert ran.returncode == 0, ran.stderr
    assert "Linear" in ran.stdout
    compare = GROWTH.splitlines()[-1]
    assert run_sh(compare.replace("256MiB", "16MiB")).returncode == 1


def test_the_page_has_every_key_of_the_json(repository: Path, capsys) -> None:
    assert main(["predict", "train.py", "--json"]) == 0
    table = IN_CI.partition("## The keys of the JSON")[2]
    cells = "".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(json.loads(capsys.readouterr().out))


def test_a_cell_of_the_page_on_notebooks() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()

    (cell,) = (
        code for kind, code in BLOCK.findall((HOW_TO / "notebooks.md").read_text()) if kind == "py"
    )
    names = {"Net": lambda: torch.nn.Linear(64, 64), "step": step}
    exec(compile(cell, "notebooks.md", "exec"), names)
    assert "It fits on NVIDIA H100 80GB HBM3" in names["run"]._repr_html_()


WHAT_THEN = (HOW_TO / "what-then.md").read_text()
#: The command of each question of that page, and how its answer begins.
QUESTIONS = dict(
    zip(
        re.findall(r"^\| [^|]+\? \| `bfc (predict train\.py[^`]*)` \|$", WHAT_THEN, re.MULTILINE),
        [
            "It fits on a GPU of 24.00 GiB: ",
            "The largest batch-size that fits on a GPU of 24.00 GiB is ",
            "The largest batch-size x length that fit on a GPU of 24.00 GiB: ",
            "It fits on a GPU of 24.00 GiB: ",
            "It fits on a GPU of 24.00 GiB: ",
            "The smallest GPU that it fits on is ",
        ],
        strict=True,
    )
)
ASKED = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--length", type=int, default=512)
options = parser.parse_args()
model = torch.nn.Sequential(*(
    torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in range(4)
)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(options.batch_size, options.length, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(one, marks=pytest.mark.long if one.count("--largest") > 1 else [])
        for one in QUESTIONS
    ],
)
def test_each_question_of_the_page_has_a_command_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ASKED)
    code, out, err = called(_among_few, shlex.split(words))
    assert code == 0, err
    assert out.startswith(QUESTIONS[words])
    assert ("What holds the memory at the peak" in out) == ("--what-if" in words)
    assert ("checkpoint of *" in out) == ("--with" in words)


def _among_few(words: list[str]) -> tuple[int, str, str]:
    """Where only a few GPUs are known."""
    from bfc_tools.predicting import cheapest

    cheapest.DEVICES = {one: cheapest.DEVICES[one] for one in ("t4", "h200")}  # type: ignore[misc]
    return _main(words)


SHOWN: dict[str, dict[str, list[str]]] = {}  # by command, then by document
for _document in DOCUMENTS:
    for _command, _lines in commands(_document, "predict"):
        SHOWN.setdefault(_command, {})[_document.name] = _lines


FIRST, *OTHERS = SHOWN


@pytest.mark.parametrize(
    "command", [FIRST, *(pytest.param(command, marks=pytest.mark.long) for command in OTHERS)]
)
def test_a_prediction_of_a_document_prints_what_stands_below_it(command: str) -> None:
    """The figures of the first screen of the README among them."""
    words = shlex.split(command)
    ran = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode in (0, 1), ran.stderr
    missing = {name: not_printed(lines, ran.stdout) for name, lines in SHOWN[command].items()}
    assert not any(missing.values()), missing


def test_the_documents_show_predictions() -> None:
    assert {"README.md", "predict.md"} <= set().union(*SHOWN.values())
