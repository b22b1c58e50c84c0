"""`bfc.advise` over a cluster of Dask: the same advice, from workers on any machine."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import dask_recipes as recipes
import pytest
from distributed.client import FutureCancelledError

import bfc
from bfc_tools.cli import main
from bfc_tools.study.cluster import Cluster, connected
from bfc_tools.study.workers import Replays

ROOT = Path(__file__).parents[2]
DECOMFL = ROOT / "bench" / "traces" / "gpu_decomfl.npz"
TRACE = bfc.Trace.load(DECOMFL)
SIZE = 1783664516 * 103 // 100


@pytest.fixture(scope="module")
def local() -> bfc.Advice:
    return bfc.advise(TRACE, SIZE, jobs=1)


def test_an_executor_of_a_client_says_what_this_process_does(client, local) -> None:
    executor = client.get_executor()
    assert bfc.advise(TRACE, SIZE, executor) == local
    assert executor.submit(int).result() == 0, "it is not shut down"


def test_the_trace_is_sent_once_and_not_kept(client, local, eventually) -> None:
    """Nothing lies in a folder that only this machine has, and no task carries the trace."""
    with Replays(TRACE, client.get_executor()) as replays:
        (sent,) = client.who_has()
        assert len(client.who_has()[sent]) == 2, "both workers have it"
        assert replays._path == ""
        del sent
    del replays
    assert eventually(lambda: client.who_has() == {})


def test_progress_counts_the_replays(client, local) -> None:
    told: list[tuple[str, int]] = []
    bfc.advise(
        TRACE, SIZE, client.get_executor(), progress=lambda text, done: told.append((text, done))
    )
    assert sum(done for _, done in told) == local.replays
    assert len([done for _, done in told if done]) > 20, "it is told in the course of the search"


def test_the_command_prints_what_it_prints_locally(client, local, capsys) -> None:
    command = ["advise", str(DECOMFL), "--device", str(SIZE)]
    address = client.scheduler.address
    assert main([*command, "--dask", address]) == 0
    out, err = capsys.readouterr()
    assert out == f"{local}\n"
    assert err.startswith("bfc advise: replaying gpu_decomfl.npz")
    assert main([*command, "--dask", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(local.to_json())


def test_a_worker_that_dies_in_the_middle_changes_nothing(client, local, eventually) -> None:
    before = client.run(recipes.pid)
    done = 0

    def strike(text: str, new: int) -> None:
        nonlocal done
        done += new
        if done > 30 and not struck.is_set():
            struck.set()
            os.kill(before[min(before)], signal.SIGKILL)

    struck = threading.Event()
    assert bfc.advise(TRACE, SIZE, client.get_executor(), progress=strike) == local
    assert struck.is_set()
    assert eventually(lambda: has_workers(client, 2))


def has_workers(client, count: int) -> bool:
    try:
        return len(client.run(recipes.pid, on_error="ignore")) == count
    except Exception:  # one that is just ending or beginning is asked
        return False


def test_workers_with_another_version_are_refused(client) -> None:
    worker = min(client.run(recipes.pid))
    client.run(recipes.another_version, workers=[worker])
    try:
        with pytest.raises(RuntimeError, match=f"worker {worker} has bfc 0.0.1, and this process"):
            bfc.advise(TRACE, SIZE, client.get_executor())
    finally:
        client.run(recipes.the_version)


def test_workers_that_have_no_bfc_are_refused(started, capsys) -> None:
    """Which a preload hides from them."""
    with started(1, preload="import sys; sys.modules['bfc'] = None") as (_, client):
        address = client.scheduler.address
        assert main(["advise", str(DECOMFL), "--device", "2GiB", "--dask", address]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"bfc: the workers of the Dask cluster cannot import bfc {bfc.__version__}:"
    )


def test_workers_in_threads_of_this_process_say_the_same(local) -> None:
    from distributed import Client

    with Client(processes=False, n_workers=1, dashboard_address=None, set_as_default=False) as both:
        assert bfc.advise(TRACE, SIZE, both.get_executor()) == local


def test_an_interrupt_ends_the_command_and_not_the_cluster(client, eventually) -> None:
    command = [sys.executable, "-m", "bfc", "advise", str(DECOMFL), "--device", str(SIZE)]
    running = subprocess.Popen(
        [*command, "--thorough", "--dask", client.scheduler.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        cwd=ROOT,
    )
    assert eventually(lambda: len(client.who_has()) > 0)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, ""), err
    *said, last = err.splitlines()
    assert last == "bfc: interrupted"
    assert all(line.startswith("bfc advise: ") for line in said)
    assert client.submit(len, "abc", pure=False).result() == 3
    assert eventually(lambda: client.who_has() == {})


def test_cancelled_futures_are_not_logged_while_the_command_is_connected(client, caplog) -> None:
    """Only tornado's loop hears of a future that is cancelled while its result arrives."""

    def say(error: BaseException) -> None:
        try:
            raise error
        except BaseException:
            logging.getLogger("tornado.application").exception("in a callback")

    with connected(client.scheduler.address):
        say(FutureCancelledError("replay_batch-1", "unknown"))
        say(RuntimeError("something else"))
    say(FutureCancelledError("replay_batch-2", "unknown"))
    logged = [str(it.exc_info[1]) for it in caplog.records if it.name == "tornado.application"]
    assert [text.split()[0] for text in logged] == ["something", "replay_batch-2"]


def test_a_cluster_without_workers_is_said(started, monkeypatch, capsys) -> None:
    monkeypatch.setattr("bfc_tools.study.cluster.PATIENCE", 0.5)
    with started(0) as (_, client):
        address = client.scheduler.address
        with pytest.raises(RuntimeError, match=f"the Dask cluster at {address} has no workers"):
            bfc.advise(TRACE, SIZE, client.get_executor())
        assert main(["advise", str(DECOMFL), "--device", "2GiB", "--dask", address]) == 2
        assert capsys.readouterr().err.endswith(
            f"bfc: the Dask cluster at {address} has no workers\n"
        )


def test_a_scheduler_that_does_not_answer_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr("bfc_tools.study.cluster.PATIENCE", 0.5)
    address = "tcp://127.0.0.1:1"
    assert main(["advise", str(DECOMFL), "--device", "2GiB", "--dask", address]) == 2
    said = capsys.readouterr().err
    assert said == f"bfc: no scheduler of Dask answers at {address} within 0.5 s\n"


@pytest.mark.parametrize("address", ["", "nonsense://x", "tcp://"])
def test_an_address_that_is_none_is_said(address: str, capsys) -> None:
    assert main(["advise", str(DECOMFL), "--device", "2GiB", "--dask", address]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bfc: ")
    assert len(err.splitlines()) == 1


def test_jobs_are_for_processes_of_this_machine(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "x", "--device", "1GiB", "--jobs", "2", "--dask", "tcp://127.0.0.1:1"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_client_that_is_asynchronous_is_refused() -> None:
    with pytest.raises(ValueError, match="not asynchronous"):
        Cluster(SimpleNamespace(asynchronous=True))
