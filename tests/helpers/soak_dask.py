"""A cluster of Dask on this machine: clients that submit and cancel, workers that are killed, and
tables that are asked for meanwhile."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from typing import Any

import dask_recipes as recipes
from waiting import DEADLINE

CLIENTS, TASKS, WORKERS = 3, 30, 2


def dask(seed: int) -> int:
    from distributed import Client, LocalCluster

    from bfc.integrations.dask import Pools

    cluster = LocalCluster(
        n_workers=WORKERS,
        threads_per_worker=2,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
    )
    with cluster:
        clients = [Client(cluster, set_as_default=False) for _ in range(CLIENTS)]
        try:
            clients[0].register_plugin(Pools(recipes.simulated))
            return submitted(clients, random.Random(seed))
        finally:
            for client in clients:
                client.close()


def submitted(clients: list[Any], dice: random.Random) -> int:
    """The operations of the tasks that came to their end: the others were cancelled."""
    from bfc.integrations.dask import table

    futures = []
    for number in range(TASKS * CLIENTS):
        client = dice.choice(clients)
        futures.append(client.submit(recipes.churn, dice.getrandbits(32), retries=9, pure=False))
        kind = dice.random()
        if kind < 0.1:
            dice.choice(futures).cancel()
        elif kind < 0.15:
            table(client)
        elif number == TASKS:
            os.kill(dice.choice(list(client.run(recipes.pid).values())), signal.SIGKILL)
    calls = sum(future.result(DEADLINE) for future in futures if not future.cancelled())
    end = time.monotonic() + DEADLINE
    while [row["used"] for row in table(clients[0])] != [0] * WORKERS:
        assert time.monotonic() < end, table(clients[0])
        time.sleep(0.1)
    return calls
