"""Every rank of a program, predicted and run: real processes of gloo compute the same on the CPU.

Both make storages of the same bytes in the same order, and free them at the same places. What a
collective was given is only made at the same place: a thread of gloo's holds it for a while, and
lets it go at no fixed moment. What a GPU's kernels work in is no tensor, and left out. So is what
lies on the host there, and cannot be told apart where all is on the host: numbers of a few bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from beside_births import births_of, compare
from fresh_commands import called

from bfc_tools.predicting import asked as asking
from bfc_tools.predicting.ranks import Ranks
from bfc_tools.predicting.tries import Tries
from bfc_tools.predicting.world import World

BEGIN = """
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

on = os.environ.get("ON", "cuda")
dist.init_process_group("nccl" if on == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if on == "cuda":
    torch.cuda.set_device(rank)
here = torch.device(on, rank) if on == "cuda" else torch.device(on)
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


GATHERED = FSDP.replace("block, mesh=mesh", "block, mesh=mesh, reshard_after_forward=False")
HYBRID = FSDP.replace("(world,)", '(2, world // 2), mesh_dim_names=("replicate", "shard")')
DDP = """
from torch.nn.parallel import DistributedDataParallel
train(DistributedDataParallel(nn.Sequential(*[Block(250) for _ in range(3)]).to(on)), 32, 250)
"""
TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh(on, (world,))
model = nn.Sequential(*[Block(256) for _ in range(3)]).to(on)
for block in model:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(model, 32, 256)
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
stage = PipelineStage(nn.Sequential(*[Block(250) for _ in range(2)]).to(on), rank, world, here)
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, of: (y - of).square().mean())
optimizer = torch.optim.AdamW(stage.submod.parameters(), foreach=False)
for _ in range(2):
    if rank == 0:
        schedule.step(torch.randn(32, 250, device=on))
    elif rank == world - 1:
        schedule.step(target=torch.randn(32, 250, device=on))
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
"""
FLAT = """
from torch.distributed.fsdp import FullyShardedDataParallel
def whole(model):
    return FullyShardedDataParallel(model, device_id=here)
train(whole(nn.Sequential(*[whole(Block(250).to(on)) for _ in range(3)])), 32, 250)
"""
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Sequential(*[Block(250) for _ in range(3)]).to(on))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, foreach=False)
for _ in range(2):
    model(torch.randn(32, 250, device=on)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: Of 2 experts on each rank, two for each row. They are so chosen that each has as many rows, which
#: is what is predicted where nobody knows.
CHOICES = """
experts, width, top = 2 * world, 128, 2

def route(x, gate):
    even = torch.arange(len(x), device=on)[:, None] * top + torch.arange(top, device=on)
    even = nn.functional.one_hot(even % experts, experts).sum(1)
    weights, chosen = (gate(x).softmax(-1) + even).topk(top)
    return chosen, weights.flatten(), chosen.flatten().argsort()

def by_expert(theirs):
    whose = torch.arange(len(theirs), device=on) % (experts // world)
    return whose.repeat_interleave(theirs).argsort(stable=True), theirs.view(world, -1).sum(0)
"""
EXPERTS = (
    CHOICES
    + """
class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, get, give):
        ctx.sizes = give, get
        out = x.new_empty(sum(get), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), get, give)
        return out
    @staticmethod
    def backward(ctx, grad):
        return Send.apply(grad, *ctx.sizes), None, None

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.gate = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.own = nn.ModuleList(Block(width) for _ in range(experts // world))
    def forward(self, x):
        x = self.before(x)
        chosen, weights, order = route(x, self.gate)
        counts = chosen.flatten().bincount(minlength=experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        give = counts.view(world, -1).sum(1).tolist()
        get = theirs.view(world, -1).sum(1).tolist()
        tokens = Send.apply(x[order // top], get, give)
        together, sizes = by_expert(theirs)
        parts = tokens[together].split(sizes.tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.own, parts)])
        back = Send.apply(torch.empty_like(done).index_copy(0, together, done), give, get)
        return x + torch.zeros_like(x).index_add(0, order // top, back * weights[order, None])

train(Layer().to(on), 64, width)
"""
)
#: The same as a style of parallelize_module, as PyTorch's own training programs have it.
SHARDED_EXPERTS = (
    CHOICES
    + """
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width).normal_())
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width).normal_())
    def forward(self, tokens, counts):
        up, down = self.up.to_local(), self.down.to_local()
        each = zip(tokens.split(counts.tolist()), up.unbind(), down.unbind())
        return torch.cat([torch.relu(part @ up) @ down for part, up, down in each])

class ExpertParallel(ParallelStyle):
    def shard(self, name, module, mesh):
        for name, value in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))
    def dispatch(self, module, given, mesh):
        tokens, counts = given
        theirs = all_to_all_single(counts, None, None, mesh)
        self.give = counts.view(world, -1).sum(1).to("cpu", non_blocking=True).tolist()
        self.get = theirs.view(world, -1).sum(1).to("cpu").tolist()
        tokens = all_to_all_single_autograd(tokens, self.get, self.give, mesh)
        self.order, sizes = by_expert(theirs)
        return tokens[self.order], sizes
    def combine(self, module, done, mesh):
        back = torch.empty_like(done).index_copy(0, self.order, done)
        return all_to_all_single_autograd(back, self.give, self.get, mesh)
    def _apply(self, module, mesh):
        return distribute_module(module, mesh, self.shard, self.dispatch, self.combine)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, experts, bias=False), Experts()
    def forward(self, x):
        chosen, weights, order = route(x, self.gate)
        counts = nn.functional.one_hot(chosen, experts).sum((0, 1))
        done = self.experts(x[order // top], counts) * weights[order, None]
        return x + torch.zeros_like(x).index_add(0, order // top, done)

mesh = init_device_mesh(on, (world,))
model = Layer().to(on)
parallelize_module(model.experts, mesh, ExpertParallel())
train(model, 64, width)
"""
)
PROGRAMS = {
    "fsdp2": FSDP,
    "fsdp2 that stays gathered": GATHERED,
    "hsdp": HYBRID,
    "ddp": DDP,
    "tensor parallel": TENSOR_PARALLEL,
    "pipeline": PIPELINE,
    "fsdp1": FLAT,
    "zero1": ZERO,
    "experts": EXPERTS,
    "experts as DTensors": SHARDED_EXPERTS,
}


class Recorded(asking.Asked):
    """A program whose figures have the storages of its tensors, made and freed."""

    def answer(self) -> dict[str, Any]:
        ran = self.run()
        figures = asking.figures(ran, asking.verdict_of(ran, self.script), "", None)
        return figures | births_of(ran.prediction._memory)


def predicted(script: str, world: int) -> list[tuple[str, dict[str, Any]]]:
    found = Ranks(Recorded(script), World(world), lambda rank, tried: None)
    with Tries(2) as tries:
        found.run(tries)
    return [(one.error, one.figures) for _, one in sorted(found.found.items())]


def real(script: Path, world: int) -> list[dict[str, Any]]:
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


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("fsdp2 that stays gathered", 2),
        ("fsdp2", 4),
        ("hsdp", 4),
        ("fsdp2", 8),
        *((kind, 2) for kind in ("ddp", "tensor parallel", "pipeline", "fsdp1", "zero1")),
        *(
            pytest.param(kind, 4, marks=pytest.mark.long)
            for kind in ("ddp", "tensor parallel", "pipeline", "fsdp1", "zero1")
        ),
        *(
            pytest.param(kind, world, marks=pytest.mark.long)
            for kind in ("experts", "experts as DTensors")
            for world in (2, 4)
        ),
    ],
)
def test_every_rank_makes_and_frees_what_a_real_one_does(
    tmp_path: Path, kind: str, world: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + PROGRAMS[kind])
    theirs = real(script, world)
    ours = called(predicted, str(script), world)
    for (error, mine), real_one in zip(ours, theirs, strict=True):
        assert not error
        compare(mine, real_one)
