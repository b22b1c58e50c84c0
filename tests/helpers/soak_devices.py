"""Pools of CUDA's emulated driver, of OpenCL and of Dask's workers, for what runs beside them in
one process. Each function plays one history, and returns how many operations were verified."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import random
from collections.abc import Callable
from typing import Any

import dask_recipes
import numpy as np
import pocl
import soak_native
from soak_native import POLICIES, Game, habits
from waiting import PATIENCE, until

import bfc
from bfc.testing import cuda_emulator

MOST = "128 MiB"
PLAYED, COPIES, TASKS = 20_000, 20, 8


def cuda(dice: random.Random) -> int:
    """Native threads write to the emulated memory, whose pages are this process's."""
    policy = dice.choice(list(POLICIES))
    source = bfc.CUDASubAllocator(dice.randrange(2))
    return played(policy, source, dice) + driver_is_content()


def driver_is_content() -> int:
    complaints = cuda_emulator.load().complaints
    assert complaints == [], complaints
    return 1


class Cleared(bfc.OpenCLSubAllocator):
    """Memory that is zero when it comes, as the native players leave it."""

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        made = super().alloc(alignment, nbytes)
        if made is not None:
            ctypes.memset(made[0], 0, nbytes)
        return made


def opencl(dice: random.Random) -> int:
    """Shared virtual memory, which native threads write to, or buffers, which are copied."""
    policy = dice.choice(["bfc", "caching"])
    svm = dice.random() < 0.5
    kind = Cleared if svm else bfc.OpenCLSubAllocator
    source = kind(opencl_context(), svm=svm, capacity=MOST)
    return played(policy, source, dice) if svm else copied(policy, source, dice)


@functools.cache
def opencl_context() -> Any:
    import pyopencl

    return pyopencl.Context([pocl.devices()[0]])


def played(policy: str, source: Any, dice: random.Random) -> int:
    pool = POLICIES[policy](source, memory_limit=MOST)
    game = Game("marks", pool, dice.getrandbits(32), 2, ctypes.byref(habits(policy, dice)))
    game.call("play", PLAYED)
    return soak_native.finish(game, pool, source)


def copied(policy: str, source: Any, dice: random.Random) -> int:
    """What is copied there, from one block to the next, and back is what it was."""
    pool = POLICIES[policy](source)
    before = np.frombuffer(dice.randbytes(5000), np.uint8)
    chain: list[Any] = [before]
    for _ in range(COPIES):
        chain.append(pool.allocate(before.nbytes))
        bfc.copy(chain[-1], chain[-2], non_blocking=dice.random() < 0.5)
    for block in chain[1:]:
        assert np.array_equal(bfc.copy(np.zeros_like(before), block), before), "other contents"
        block.free()
    pool.close()
    assert source.live_bytes == 0, source.live_bytes
    return 4 * COPIES


class Cluster:
    """Two workers of Dask in this process, each with a pool of its own."""

    def __init__(self) -> None:
        from distributed import Client, LocalCluster

        from bfc.integrations.dask import Pools

        options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": None}
        self.cluster = LocalCluster(processes=False, silence_logs=logging.CRITICAL, **options)
        self.client = Client(self.cluster, set_as_default=False)
        self.client.register_plugin(Pools(dask_recipes.simulated))

    def tasks(self, dice: random.Random) -> int:
        """The operations of tasks; some are cancelled."""
        seeds = [dice.getrandbits(32) for _ in range(TASKS)]
        futures = [self.client.submit(dask_recipes.churn, seed, pure=False) for seed in seeds]
        if dice.random() < 0.3:
            futures.pop().cancel()
        return sum(future.result(PATIENCE) for future in futures)

    def close(self) -> None:
        from bfc.integrations.dask import table

        by_heartbeats = lambda: [row["used"] for row in table(self.client)]  # noqa: E731
        until(lambda: by_heartbeats() == [0, 0], PATIENCE)
        self.client.close()
        self.cluster.close()


def at_hand() -> list[Callable[[random.Random], int]]:
    """What this machine has of the first two."""
    found = []
    if importlib.util.find_spec("cuda.bindings"):
        cuda_emulator.load()
        found.append(cuda)
    if pocl.devices():
        opencl_context()
        found.append(opencl)
    return found
