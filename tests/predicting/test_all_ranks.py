"""`bfc predict --nproc`: every rank of a program, the worst first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fresh_commands import command

from bfc_tools.predicting import failures

#: Stages of a pipeline tell each other which tensors will come.
PIPELINE = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
width = 256 if rank < world - 1 else 1024
part = nn.Linear(256, width).cuda()
stage = PipelineStage(part, rank, world, torch.device("cuda", torch.cuda.current_device()))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for _ in range(2):
    if rank == 0:
        schedule.step(torch.randn(64, 256, device="cuda"))
    elif rank == world - 1:
        schedule.step(target=torch.randint(0, width, (64,), device="cuda"))
    else:
        schedule.step()
    optimizer.step()
"""
#: The ranks of a mesh differ along one of its dimensions, in the first and the last place. Numbers
#: that rank 0 tells all others are known there.
MESH = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
stage, _ = init_device_mesh("cuda", (4, 8), mesh_dim_names=("pp", "dp")).get_coordinate()
told = torch.tensor([1, 20] if dist.get_rank() == 0 else [-1, -1], device="cuda")
dist.broadcast(told, src=0)  # as DeepSpeed does, which compares it with what each rank has
most, bits = told.cpu().numpy().tolist()
torch.ones((most + (stage in (0, 3)) + (stage == 3)) << bits, dtype=torch.uint8, device="cuda")
"""
FAILS = """
import os, torch
rank = int(os.environ["RANK"])
torch.ones(1 << 20, device="cuda")
if rank == 1:
    raise KeyError("no shard of rank 1")
"""
SPAWNS = """
import torch
def main(rank, rows):
    torch.cuda.set_device(rank)
    torch.ones(rows * (rank + 1), 1 << 20, dtype=torch.uint8, device="cuda")
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (2,), nprocs=2)
"""
SCRIPT = ("train.py", "--lr", "3")
ENVIRONMENT = """
import os, sys, torch
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
assert [int(os.environ[name]) for name in names] in (
    [0, 0, 0, 2, 1, 2], [1, 0, 1, 2, 1, 2]), os.environ
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
assert sys.argv[1:] == ["--lr", "3"], sys.argv
torch.ones(1 << 20, device="cuda")
"""


def ranks(*words: str, code: int = 0) -> dict[str, Any]:
    found, out, err = command("predict", *words, "--json")
    assert found == code, err
    return json.loads(out)  # type: ignore[no-any-return]


def test_stages_of_a_pipeline_hear_what_will_come(script) -> None:
    name = script(PIPELINE)
    found = ranks("--nproc", "3", name, "--device", "16MiB", code=1)
    order = [one["rank"] for one in found["ranks"]]
    live = {one["rank"]: one["figures"]["peak_requested"] for one in found["ranks"]}
    assert order == sorted(live, key=lambda rank: (-live[rank], rank))
    assert order[0] == 2  # whose layer is wider
    assert live[2] - live[1] > 2 * 768 * 256 * 4  # of weights and their gradients
    assert found["ranks"][0]["more_than_the_middle"]["by_kind"]["parameters"] == 768 * 257 * 4
    assert found["answer"].startswith("It does not fit on a GPU of 16.00 MiB on 3 of 3 ranks: ")
    assert found["fits"] is False


def test_of_many_ranks_those_that_differ_are_predicted(script) -> None:
    found = ranks("--nproc", "8", "--nnodes", "4", script(MESH), "--device", "2500KiB", code=1)
    alike = {one["rank"]: one["taken_to_be_like_it"] for one in found["ranks"]}
    every = sorted(rank for rank, others in alike.items() for rank in (rank, *others))
    assert every == list(range(32))
    size = {one["rank"]: one["figures"]["peak_requested"] for one in found["ranks"]}
    for rank, others in alike.items():
        for one in (rank, *others):
            assert size[rank] >> 20 == {0: 2, 1: 1, 2: 1, 3: 3}[one // 8]
    assert len(alike) < 16
    assert found["ranks"][0]["rank"] // 8 == 3
    assert "on 16 of 32 ranks" in found["answer"]


def test_a_rank_that_fails_is_told_beside_the_others(script) -> None:
    code, out, err = command("predict", "--nproc", "3", script(FAILS))
    assert code == 2
    assert out.startswith("Rank 1 of 3 failed: ")
    assert [line.split()[:3] for line in out.splitlines() if line[:1] in ("0", "2")] == [
        ["0,", "2", "yes"]  # which are alike
    ]
    assert "[rank 1] KeyError: 'no shard of rank 1'" in err
    assert err.splitlines()[-1] == "bfc: rank 1: KeyError: 'no shard of rank 1'"


def test_processes_that_the_program_would_spawn_are_ranks(script) -> None:
    found = ranks("--nproc", "2", script(SPAWNS))
    sizes = {one["rank"]: one["figures"]["peak_requested"] for one in found["ranks"]}
    assert sizes == {0: 2 << 20, 1: 4 << 20}
    code, _, err = command("predict", "--nproc", "3", "train.py")
    assert code == 2
    assert "bfc predict was asked for 3 processes" in err
    assert "makes a group of 2: ask for 2" in err


@pytest.mark.parametrize(
    "words",
    [
        ("torchrun", "--nproc-per-node", "1", "--nnodes=2", *SCRIPT),
        ("-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=1:2", *SCRIPT),
    ],
    ids=["torchrun", "module"],
)
def test_a_launcher_says_how_many_ranks_there_are(script, words: tuple[str, ...]) -> None:
    script(ENVIRONMENT)
    found = ranks(*words)
    assert (found["nproc"], found["nnodes"], len(found["ranks"])) == (1, 2, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc 0 train.py", "--nproc is 1 or more, not 0"),
        ("--nnodes 2 train.py", "--nnodes says on how many nodes; --nproc, how many"),
        ("--nproc 2 --cheapest train.py", "--cheapest and --nproc are two questions"),
        ("--nproc 2 torchrun --nproc-per-node 2 train.py", "leave --nproc and --nnodes out"),
        ("torchrun --nproc-per-node gpu train.py", "--nproc-per-node is gpu: bfc cannot count"),
        ("torchrun --nproc-per-nude 2 train.py", "torchrun was called wrongly: "),
        ("torchrun --nnodes some --nproc-per-node 2 train.py", "--nnodes is a number, or MIN:MAX"),
        ("mpirun -n 8 train.py", "bfc does not know the launcher mpirun"),
        ("accelerate test", "accelerate launch"),
    ],
)
def test_wrong_calls_are_told_in_words(script, words: str, said: str) -> None:
    script(ENVIRONMENT)
    code, _, err = command("predict", *words.split())
    assert code == 2
    assert said in err


def test_a_process_alone_cannot_know_what_another_one_sends(script) -> None:
    alone = "import os\nos.environ |= {'RANK': '1', 'WORLD_SIZE': '2'}\n"
    code, _, err = command("predict", script(alone + PIPELINE))
    assert code == 2
    assert "rank 1 gets objects from rank 0, which has not run before it" in err


def test_the_output_says_which_process_it_was(script) -> None:
    alone = "import os\nos.environ |= {'RANK': '0', 'WORLD_SIZE': '2'}\n"
    code, out, err = command("predict", script(alone + PIPELINE))
    assert code == 0, err
    assert out.splitlines()[1].startswith("This is rank 0 of 2. With --nproc, bfc predict ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("Mesh should not be bigger than default world size 4, but found 8 ranks!"),
            ". bfc predict --nproc 8 predicts ",
        ),
        (OSError("CUDA_HOME environment variable is not set."), ". The program compiles code "),
    ],
    ids=["mesh", "compiler"],
)
def test_what_to_do_about_an_error_is_said(error: Exception, said: str) -> None:
    assert failures._hint(error).startswith(said)
