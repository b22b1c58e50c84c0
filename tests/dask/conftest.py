"""Tests on real clusters of Dask, on this machine. `make test-dask` runs them: they need
distributed, which the other tests do without."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("BFC_TEST_DASK") != "1":
    collect_ignore_glob = ["test_*.py"]

SECONDS = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What distributed leaves to the collector is not our business."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Calls a function until what it returns is true, and returns that."""

    def wait(ask: Callable[[], Any], seconds: float = SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            answer = ask()
            if answer or time.monotonic() > deadline:
                return answer
            time.sleep(0.05)

    return wait


@contextlib.contextmanager
def local_cluster(workers: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A cluster in processes of its own, on loopback addresses, and a client."""
    from distributed import Client, LocalCluster

    import bfc.integrations.dask  # before the scheduler starts, for its page  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of distributed's own
        cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            **options,
        )
        with cluster, Client(cluster, set_as_default=False) as client:
            yield cluster, client
        gc.collect()


@pytest.fixture(scope="session")
def started() -> Callable[..., Any]:
    """`local_cluster`, for tests that change a cluster."""
    return local_cluster


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Any, Any]]:
    """A cluster of two workers, shared by the tests of a file."""
    with local_cluster(2) as both:
        yield both


@pytest.fixture
def cluster(running: tuple[Any, Any]) -> Any:
    return running[0]


@pytest.fixture
def client(running: tuple[Any, Any]) -> Iterator[Any]:
    """After each test the workers have no pools."""
    yield running[1]
    with contextlib.suppress(ValueError):
        running[1].unregister_worker_plugin("bfc")
