"""Searches on clusters of Dask and Ray: processes of this machine, begun as people begin them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_commands import _main, called, command

pytest.importorskip("distributed", reason="this environment has no distributed")

PROGRAM = """
import os, sys, time
import torch

batch = int(sys.argv[1].partition("=")[2])
if batch > 8 and "WHOM" in os.environ:
    for process in os.environ["WHOM"].split():
        os.kill(int(process), 9)
    time.sleep(60)
model = torch.nn.Linear(256, 256).cuda()
model(torch.randn(batch, 1024, 256, device="cuda")).sum().backward()
"""
SEARCH = ("--device", "64MiB", "--largest", "batch=4,8,32")


@contextlib.contextmanager
def dask_cluster(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The address of a scheduler that has a worker with two threads, and their processes."""
    file, log = folder / "scheduler.json", folder / "log"
    began = []
    words = ["--scheduler-file", str(file)]
    kinds = {
        "scheduler": ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"],
        "worker": ["--no-nanny", "--nthreads", "2", "--no-dashboard"],
    }
    with contextlib.ExitStack() as cleanup:
        for kind, more in kinds.items():
            module = ["-m", f"distributed.cli.dask_{kind}"]
            one = subprocess.Popen(
                [sys.executable, *module, *words, *more],
                stderr=cleanup.enter_context(log.open("a")),
                cwd=folder,
                process_group=0,
            )
            cleanup.callback(_end, one)
            began.append(one.pid)
            for _ in range(600):
                if file.exists():
                    break
                time.sleep(0.1)
        yield json.loads(file.read_text())["address"], began


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dask_cluster(tmp_path_factory.mktemp("dask")) as (address, _):
        yield address


def searched(name: str, *words: str, **environment: str) -> tuple[int, str, list[str]]:
    """A search with variables of the environment: its exit code, and what it prints."""
    code, out, err = called(_search, ["predict", name, *SEARCH, *words], environment)
    return code, out, [line for line in err.splitlines() if not line.startswith("bfc: compiling")]


def _search(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    os.environ.update(environment)
    return _main(words)


def test_a_search_on_dask_prints_what_this_machine_prints(script, dask) -> None:
    """The variables of its environment are there, too."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    name = script(PROGRAM)
    here = searched(name, "--jobs", "2", **settings)
    there = searched(name, "--dask", dask, **settings)
    assert there[:2] == here[:2]
    assert there[0] == 0
    assert sorted(there[2][1:]) == sorted(here[2][1:])
    assert "102.00 MiB" in here[1], "as it is in expandable segments"


CHANGED = """
import os, sys
import torch

if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("nccl")
    rows = 64 * (1 + torch.distributed.get_rank())
else:
    rows = 64
model = torch.nn.Sequential(*(
    torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)
)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(rows, 1024, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "words",
    [["--cheapest"], ["--nproc", "2"], pytest.param(["--what-if"], marks=pytest.mark.long)],
    ids=lambda words: words[0],
)
def test_other_questions_on_dask_have_the_answers_of_this_machine(script, dask, words) -> None:
    name = script(CHANGED)
    here, there = (
        called(_asked_of_three, ["predict", name, *words, *more, "--json"])
        for more in ([], ["--dask", dask])
    )
    assert here[0] == 0, here[2]
    assert there[:2] == here[:2]


def _asked_of_three(words: list[str]) -> tuple[int, str, str]:
    """Where only three GPUs are known to the process that asks."""
    from bfc_tools.predicting import cheapest

    kept = {name: cheapest.DEVICES[name] for name in ("h200", "t4", "a100-40gb")}
    cheapest.DEVICES = kept  # type: ignore[misc]
    return _main(words)


def test_a_worker_without_the_script_is_said(script, dask, tmp_path) -> None:
    """A file at that place that differs, as on a machine with an older copy."""
    name = script(PROGRAM)
    code, out, err = called(_with_an_older_copy, name, dask)
    assert (code, out) == (2, "")
    assert f"has another {tmp_path / name} than this machine" in err


def _with_an_older_copy(name: str, address: str) -> tuple[int, str, str]:
    from bfc_tools.predicting import distant

    distant._hash = lambda file: "another"
    return _main(["predict", name, *SEARCH, "--dask", address])


def test_a_cluster_that_goes_away_leaves_the_tries_so_far(script, tmp_path) -> None:
    with dask_cluster(tmp_path) as (address, processes):
        words = (script(PROGRAM), "--dask", address, "--jobs", "1")
        code, out, err = searched(*words, WHOM=" ".join(map(str, processes)))
    assert code == 2
    assert out.startswith("Not finished: batch 8 fits on a GPU of 64.00 MiB.\n")
    assert f"bfc: the Dask cluster at {address} is gone: its scheduler " in err[-1]
    assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dask", "tcp://127.0.0.1:1"], "--dask is for several predictions"),
        ([*SEARCH, "--dask", "tcp://127.0.0.1:1", "--ray", "x"], "two clusters"),
    ],
)
def test_options_that_do_not_go_together(script, words: list[str], said: str) -> None:
    code, _, err = command("predict", script(PROGRAM), *words)
    assert code == 2
    assert said in err


def test_a_search_on_ray_prints_what_this_machine_prints(script) -> None:
    pytest.importorskip("ray", reason="this environment has no Ray")
    name = script(PROGRAM)
    there = searched(name, "--ray", "local", "--jobs", "2")
    assert there[:2] == searched(name, "--jobs", "2")[:2]
