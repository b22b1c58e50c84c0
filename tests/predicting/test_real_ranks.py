"""Every rank of a program, predicted and run: processes of gloo compute the same on the CPU, and
have tensors of as many bytes, made and freed in the same order.

What a GPU's kernels work in is no tensor, and left out. So is what lies on the host there, and
cannot be told apart where all is on the host: numbers of a few bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from births import SMALL
from fresh_commands import called

from bfc.trace.trace import ALLOCATE, FREE
from bfc_tools.predicting import asked as asking
from bfc_tools.predicting.kinds import WORKSPACES
from bfc_tools.predicting.ranks import Ranks
from bfc_tools.predicting.tries import Tries
from bfc_tools.predicting.world import World

BEGIN = """
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

on = os.environ.get("ON", "cuda")
dist.init_process_group("nccl" if on == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def train(model, rows, width):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.randn(rows, width, device=on)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
FSDP = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh(on, (world,))
model = nn.Sequential(*[Block(250) for _ in range(3)]).to(on)
for block in model:
    fully_shard(block, mesh=mesh)
train(fully_shard(model, mesh=mesh), 32, 250)
"""


class Recorded(asking.Asked):
    """A program whose figures have the bytes of each tensor, made and freed."""

    def answer(self) -> dict[str, Any]:
        ran = self.run()
        figures = asking.figures(ran, asking.verdict_of(ran, self.script), "", None)
        memory = ran.prediction._memory
        sizes = zip(memory.op, memory.id, memory.size, strict=True)
        return figures | {
            "sizes": [
                size if op == ALLOCATE else -size
                for op, number, size in sizes
                if op in (ALLOCATE, FREE) and memory.kinds[number] != WORKSPACES and size > SMALL
            ]
        }


def predicted(script: str, world: int) -> list[tuple[str, list[int]]]:
    found = Ranks(Recorded(script), World(world), lambda rank, tried: None)
    with Tries(2) as tries:
        found.run(tries)
    return [(one.error, one.figures.get("sizes", [])) for _, one in sorted(found.found.items())]


def real(script: Path, world: int) -> list[list[int]]:
    births = Path(__file__).parents[1] / "helpers" / "births.py"
    outputs = [script.with_name(f"{rank}.json") for rank in range(world)]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "ON": "cpu"}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    wrap = script.with_name("one.py")
    wrap.write_text(
        "import os, subprocess, sys\n"
        f"script, folder = {str(script)!r}, {str(script.parent)!r}\n"
        "output = f\"{folder}/{os.environ['RANK']}.json\"\n"
        f"sys.exit(subprocess.call([sys.executable, {str(births)!r}, script, output]))\n"
    )
    done = subprocess.run(
        [sys.executable, *launch, str(wrap)],
        env=os.environ | store,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(output.read_text()) for output in outputs]


def without_copies_of_gloo(sizes: list[int], world: int) -> list[int]:
    """Without the copy that gloo scatters from, which NCCL does not make: `world` times what each
    process gets, freed at once."""
    left = list(sizes)
    for at in range(len(left) - 3, -1, -1):
        whole = left[at] * world
        if left[at] > 0 and left[at + 1 : at + 3] == [whole, -whole]:
            del left[at + 1 : at + 3]
    return left


def until_the_last_is_made(sizes: list[int]) -> list[int]:
    """What is freed when the program ends is freed in another order."""
    return sizes[: max(at for at, size in enumerate(sizes) if size > 0) + 1]


@pytest.mark.long
def test_every_rank_makes_and_frees_what_a_real_one_does(tmp_path: Path) -> None:
    world = 2
    script = tmp_path / "train.py"
    script.write_text(BEGIN + FSDP)
    theirs = real(script, world)
    ours = called(predicted, str(script), world)
    assert [error for error, _ in ours] == [""] * world
    for (_, mine), real_one in zip(ours, theirs, strict=True):
        tensors = without_copies_of_gloo(real_one, world)
        assert until_the_last_is_made(mine) == until_the_last_is_made(tensors)
