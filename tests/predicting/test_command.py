"""`bfc predict`: what it prints, when it stops, and what it says of what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bfc
from bfc.cli import main

TRAIN = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--device", default="cuda")
arguments = parser.parse_args()
print("epochs", arguments.epochs, arguments.device)
model = torch.nn.Linear(1024, 1024).to(arguments.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(1_000_000):
    model(torch.randn(8, 1024, device=arguments.device)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write


def test_a_training_is_stopped_and_told(script, capsys, tmp_path) -> None:
    words = ["predict", script(TRAIN), "--epochs", "3", "--device", "24GiB", "--save", "t.npz"]
    assert main([*words, "--", "--device", "cuda:0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("It fits on a GPU of 24.00 GiB: it reserves at most ")
    assert "stopped after 2 steps" in out
    assert "optimizer state" in out
    assert "CUDA context" in out
    assert "epochs 3 cuda:0" in err
    trace = bfc.Trace.load(tmp_path / "t.npz")
    assert "Linear" in trace.owners
    assert any(frame.filename.endswith("train.py") for frame in trace.frames)


def test_a_device_of_the_scripts_is_left_to_it(script, capsys) -> None:
    assert main(["predict", script(TRAIN), "--device", "cuda", "--json", "--steps", "1"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "epochs 1 cuda\n" in err
    assert (found["fits"], found["steps"], found["stopped"]) == (True, 1, True)
    assert found["peak_reserved"] >= found["peak_allocated"] >= found["peak_requested"]
    assert found["device"]["name"] == "NVIDIA H100 80GB HBM3"


def test_what_does_not_fit_is_refused(script, capsys) -> None:
    text = "import torch\na = torch.empty(3 << 30, dtype=torch.uint8, device='cuda')\n"
    assert main(["predict", "--device", "2GiB", "--no-advice", script(text)]) == 1
    assert capsys.readouterr().out.startswith("It does not fit on a GPU of 2.00 GiB")
    assert (
        main(["predict", "--device", "2GiB", "--no-advice", "--oom", script(f"{text}x = 1")]) == 1
    )
    _out, err = capsys.readouterr()
    assert "CUDA out of memory" in err


def test_a_script_that_raises_is_told_with_the_figures_until_then(script, capsys) -> None:
    text = "import torch\nx = torch.ones(1 << 20, device='cuda')\nopen('nothing-there.bin')\n"
    assert main(["predict", script(text)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Until it failed: It fits on")
    assert "live       4.00 MiB" in out
    assert 'File "train.py", line 3' in err
    assert "runpy" not in err
    assert "train.py raised FileNotFoundError" in err
    assert "needs that file here, too" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "nothing.py"], "no such script: nothing.py"),
        (["predict"], "which script?"),
        (["predict", "train.py", "--device", "h1000"], "no GPU named 'h1000'"),
        (["predict", "train.py", "--settings", "no_such_key:1"], "no_such_key"),
        (["predict", "train.py", "--steps", "-1"], "--steps is 0"),
        (["predict", "train.py", "--save", "model.pt"], "an .npz trace, not model.pt"),
    ],
)
def test_a_wrong_call_is_told(script, capsys, words, said) -> None:
    script("import torch\ntorch.ones(1, device='cuda')\n")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_script_without_work_on_the_gpu_is_told(script, capsys) -> None:
    assert main(["predict", script("import torch\ntorch.ones(3)\n")]) == 2
    assert "allocated nothing on the GPU" in capsys.readouterr().err


def test_it_waits_for_the_snapshot_that_the_script_writes(script, capsys) -> None:
    text = TRAIN.replace("range(1_000_000)", "range(4)") + (
        "    if _ == 2: torch.cuda.memory._record_memory_history()\n"
        "torch.cuda.memory._dump_snapshot('s.pickle')\n"
    )
    assert main(["predict", script(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["stopped"], found["snapshots"]) == (4, False, ["s.pickle"])
    assert len(bfc.Trace.from_torch("s.pickle")) > 5
