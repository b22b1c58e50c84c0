"""Pools of CUDA devices on two workers, with real libraries on the emulated driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask_recipes as recipes
import pytest

from bfc.integrations.dask import Pools, table

MIB = 1 << 20
LIBRARIES = ("numba", "cuda_core")


@pytest.fixture(scope="module")
def served(started: Any) -> Iterator[Any]:
    """Two workers, of which each loads a driver of its own."""
    with started(2) as (_, client):
        client.register_plugin(Pools(recipes.emulated, libraries=LIBRARIES))
        yield client
        assert list(client.run(recipes.complaints).values()) == [[], []]


def on_each(client: Any, work: Any, *arguments: object) -> list[Any]:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    futures = [client.submit(work, *arguments, workers=address, pure=False) for address in workers]
    return client.gather(futures)


def test_each_worker_has_a_pool_of_its_device(served, eventually) -> None:
    assert eventually(lambda: len(table(served)) == 2)
    assert {row["device"] for row in table(served)} == {"cuda:0"}
    assert on_each(served, recipes.hold, 5 * MIB) == ["cuda:0"] * 2
    assert eventually(lambda: [row["used"] for row in table(served)] == [5 * MIB] * 2)
    served.run(recipes.drop)


def test_arrays_of_numba_come_from_the_pool(served) -> None:
    assert on_each(served, recipes.numba_array, 3 * MIB) == [(3 * MIB, 0)] * 2


def test_a_library_that_is_served_by_thread_is_served_in_the_threads_of_tasks(served) -> None:
    for thread, used in on_each(served, recipes.core_buffer, 2 * MIB):
        assert "Dask-Default-Threads" in thread
        assert used == 2 * MIB


def test_another_plugin_serves_the_same_threads_from_its_own_pool(served) -> None:
    assert [used for _, used in on_each(served, recipes.core_buffer, 2 * MIB)] == [2 * MIB] * 2
    served.register_plugin(Pools(recipes.emulated, libraries=LIBRARIES))
    assert [used for _, used in on_each(served, recipes.core_buffer, MIB)] == [MIB] * 2
    assert on_each(served, recipes.numba_array, MIB) == [(MIB, 0)] * 2


def test_without_the_plugin_libraries_have_what_they_had(served) -> None:
    served.unregister_worker_plugin("bfc")
    try:
        assert on_each(served, recipes.whose_memory) == [False] * 2
    finally:
        served.register_plugin(Pools(recipes.emulated, libraries=LIBRARIES))
    assert on_each(served, recipes.whose_memory) == [True] * 2
