"""What `bfc predict --save` keeps: a report of the file says what the prediction says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.study import ran_out
from bfc_tools.browser.data import data_of
from bfc_tools.browser.kinds import KINDS, OF_PREDICTIONS
from bfc_tools.cli import main

MIB = 1 << 20
NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

model = nn.Sequential(nn.Embedding(1000, 256), *(Block() for _ in range(3))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    words = torch.randint(0, 1000, (8, 64), device="cuda")
    optimizer.zero_grad()
    model(words).square().mean().backward()
    optimizer.step()
"""
OUT = """
import torch
MIB = 1 << 20
def take(n): return torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
"""
#: By the cause that is said: 30 MiB are free in each of three segments of 100 MiB, and so on.
RAN_OUT = {
    "pieces": """
whole, kept = [take(100) for _ in range(3)], []
for at in range(3):
    whole[at] = None
    kept.append(take(70))
last = take(80)
""",
    "capacity": "kept = [take(30) for _ in range(10)]\nlast = take(80)\n",
    "request": "kept = take(30)\nlast = take(900)\n",
    "limit": """
torch.cuda.set_per_process_memory_fraction(0.3)
kept = take(60)
last = take(80)
""",
}


def saved(
    folder: Path, capsys: pytest.CaptureFixture[str], program: str, *options: str
) -> tuple[dict[str, Any], bfc.Trace]:
    (folder / "train.py").write_text(program)
    file = str(folder / "run.npz")
    main(["predict", str(folder / "train.py"), *options, "--save", file, "--json"])
    return json.loads(capsys.readouterr().out), bfc.Trace.load(file)


def test_a_report_has_the_figures_and_the_kinds_of_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said, trace = saved(tmp_path, capsys, NET, "--device", "h100")
    page = data_of([("run", trace)])
    peak = said["peak_requested"]
    assert (page["peak_live"], page["peak_reserved"]) == (peak, said["peak_reserved"])
    assert page["kinds_said"] == peak, "some of it is guessed"
    wanted: dict[str, int] = {}
    for kind, nbytes in said["peak"]["by_kind"].items():
        name = KINDS[OF_PREDICTIONS[kind]]
        wanted[name] = wanted.get(name, 0) + nbytes
    by_kind = {KINDS[kind]: nbytes for kind, nbytes, _ in page["views"]["peak"]["by_kind"]}
    assert by_kind == wanted
    assert wanted.keys() >= {"weights", "gradients", "optimizer state", "activations"}
    by_owner = {page["owners"][at]: nbytes for at, nbytes, _ in page["views"]["peak"]["by_owner"]}
    layers = [f"Sequential.{number}.up" for number in (1, 2, 3)]
    of_layers = sum(said["peak"]["by_module"][layer] for layer in layers)
    assert by_owner["Sequential.*.up"] == of_layers
    assert not by_owner.keys() & set(layers)


@pytest.mark.parametrize("cause", RAN_OUT)
def test_a_run_that_ran_out_says_so_as_the_prediction_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str
):
    options = "--device", "330MiB", "--oom", "--no-advice"
    said, trace = saved(tmp_path, capsys, OUT + RAN_OUT[cause], *options)
    (refused,), found = said["refused"], ran_out(trace)
    assert found is not None
    assert found.cause == cause
    assert {
        key: getattr(found, key) for key in ("event", "nbytes", "line", "live", "reserved")
    } == {key: refused[key] for key in ("event", "nbytes", "line", "live", "reserved")}
    assert found.free_on_device == refused["free"]
    assert found.line == "train.py:4 in take"
    (shown,) = data_of([("run", trace)])["ran_out"]
    assert shown["sentence"].startswith(f"It ran out of memory: {found.nbytes // MIB}.00 MiB")
