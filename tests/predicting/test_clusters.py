"""Searches on clusters of Dask and Ray: processes of this machine, begun as people begin them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_commands import _main, called, command

from bfc_tools.predicting import clusters
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.distant import Came, Place, answer
from bfc_tools.predicting.tries import Tried

pytest.importorskip("distributed", reason="this environment has no distributed")
if find_spec("ray") is None:  # its import reads the environment, which tests set
    pytest.skip("this environment has no Ray", allow_module_level=True)

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
            _await(file)
        yield json.loads(file.read_text())["address"], began


#: Of the processes below: no figures go to Ray's authors, a token lets in, and workers are as soon
#: served as others.
OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-these-tests",
    "RAY_worker_niceness": "0",
}
HEAD = ["start", "--head", "--block", "--port=0", "--num-cpus=2", "--include-dashboard=false"]


@contextlib.contextmanager
def ray_cluster() -> Iterator[tuple[str, list[int]]]:
    """The address of a head that has a worker for two tasks, and the process of that head which
    knows of all others. Names of its sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        more = (f"--temp-dir={folder}", f"--object-store-memory={80_000_000}")
        with open(f"{folder}/log", "w") as log:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *HEAD, *more],
                stdout=log,
                stderr=log,
                env=os.environ | OF_RAY,
                process_group=0,
            )
        try:
            file = Path(folder, "ray_current_cluster")
            _await(file)
            children = Path(f"/proc/{head.pid}/task/{head.pid}/children").read_text().split()
            words = {int(one): Path(f"/proc/{one}/cmdline").read_bytes() for one in children}
            yield file.read_text(), [one for one in words if b"/gcs_server" in words[one]]
        finally:
            _end(head)


def _await(file: Path) -> None:
    for _ in range(1200):
        if file.exists() and file.stat().st_size:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{file} is not there")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dask_cluster(tmp_path_factory.mktemp("dask")) as (address, _):
        yield address


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    with ray_cluster() as (address, _):
        yield address


#: A cluster of each kind, by the option that names it, and by its fixture.
KINDS = ["dask", "ray"]


def searched(name: str, *words: str, **environment: str) -> tuple[int, str, list[str]]:
    """A search with variables of the environment: its exit code, and what it prints."""
    code, out, err = called(_search, ["predict", name, *SEARCH, *words], environment)
    return code, out, [line for line in err.splitlines() if not line.startswith("bfc: compiling")]


def _search(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    os.environ.update(environment)
    return _main(words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_on_a_cluster_prints_what_this_machine_prints(script, request, kind) -> None:
    """The variables of its environment are there, too."""
    settings = OF_RAY | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    name = script(PROGRAM)
    here = searched(name, "--jobs", "2", **settings)
    there = searched(name, f"--{kind}", request.getfixturevalue(kind), **settings)
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
    ("kind", "words"),
    [
        ("dask", ["--cheapest"]),
        ("dask", ["--nproc", "2"]),
        ("ray", ["--nproc", "2"]),
        *(pytest.param(kind, ["--what-if"], marks=pytest.mark.long) for kind in KINDS),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_other_questions_on_clusters_have_the_answers_of_this_machine(
    script, request, kind, words
) -> None:
    name = script(CHANGED)
    here, there = (
        called(_asked_of_three, ["predict", name, *words, *more, "--json"])
        for more in ([], [f"--{kind}", request.getfixturevalue(kind)])
    )
    assert here[0] == 0, here[2]
    assert there[:2] == here[:2]


def _asked_of_three(words: list[str]) -> tuple[int, str, str]:
    """Where only three GPUs are known to the process that asks."""
    from bfc_tools.predicting import cheapest

    os.environ.update(OF_RAY)
    kept = {name: cheapest.DEVICES[name] for name in ("h200", "t4", "a100-40gb")}
    cheapest.DEVICES = kept  # type: ignore[misc]
    return _main(words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_without_the_script_is_said(script, request, tmp_path, kind) -> None:
    """A file at that place that differs, as on a machine with an older copy."""
    name = script(PROGRAM)
    words = [f"--{kind}", request.getfixturevalue(kind)]
    code, out, err = called(_with_an_older_copy, name, words)
    assert (code, out) == (2, "")
    assert f"has another {tmp_path / name} than this machine" in err


def _with_an_older_copy(name: str, words: list[str]) -> tuple[int, str, str]:
    from bfc_tools.predicting import distant

    os.environ.update(OF_RAY)
    distant._hash = lambda file: "another"
    return _main(["predict", name, *SEARCH, *words])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"bfc": "0.1"}, r"has bfc \d.*, and this process 0\.1$"),
        ({"folder": "/of/another/machine"}, "has no folder /of/another/machine: the workers of a"),
    ],
)
def test_a_worker_that_differs_is_said(script, other: dict[str, str], said: str) -> None:
    place = replace(Place.here(Asked(script(PROGRAM))), **other)
    with pytest.raises(RuntimeError, match=f"the worker on .* {said}"):
        answer(Asked("train.py"), place)


def test_workers_with_two_pytorches_are_said() -> None:
    answers = clusters._Answers()
    answers.take(Came("one", "2.13.0", Tried()))
    with pytest.raises(RuntimeError, match=r"on two has PyTorch 2\.15\.0, and the one on one"):
        answers.take(Came("two", "2.15.0", Tried()))


@pytest.mark.parametrize(
    ("kind", "gone"), [("dask", "scheduler has"), ("ray", "head does not answer")]
)
def test_a_cluster_that_goes_away_leaves_the_tries_so_far(script, tmp_path, kind, gone) -> None:
    with dask_cluster(tmp_path) if kind == "dask" else ray_cluster() as (address, processes):
        words = (script(PROGRAM), f"--{kind}", address, "--jobs", "1")
        code, out, err = searched(*words, **OF_RAY, WHOM=" ".join(map(str, processes)))
    assert code == 2
    assert out.startswith("Not finished: batch 8 fits on a GPU of 64.00 MiB.\n")
    assert f" cluster at {address} is gone: its {gone}" in err[-1]
    assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize(
    ("kind", "address", "said"),
    [
        ("dask", "tcp://127.0.0.1:1", "no scheduler of Dask answers at tcp://127.0.0.1:1"),
        ("ray", "127.0.0.1:1", "no cluster of Ray answers at 127.0.0.1:1"),
    ],
)
def test_a_cluster_that_is_not_there(script, kind, address, said) -> None:
    code, out, err = searched(script(PROGRAM), f"--{kind}", address, **OF_RAY)
    assert (code, out) == (2, "")
    assert said in err[-1]


def test_a_token_that_ray_asks_for_is_said(script, ray) -> None:
    code, out, err = searched(
        script(PROGRAM), "--ray", ray, RAY_AUTH_MODE="disabled", RAY_NUM_REDIS_GET_RETRIES="2"
    )
    assert (code, out) == (2, "")
    assert f"the Ray cluster at {ray} asks for its token: set RAY_AUTH_MODE=token" in err[-1]


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
