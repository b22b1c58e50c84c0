"""Replays on a Dask cluster, whose workers may be on any machine: each gets the trace once."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from typing import Any

from bfc.libraries import client
from bfc.trace import Trace
from bfc.version import __version__

#: How long a scheduler may take to answer, and a cluster to have a worker, in seconds.
PATIENCE = 10.0


@contextlib.contextmanager
def connected(address: str) -> Iterator[Executor]:
    """An executor over the cluster of a scheduler, such as "tcp://10.0.0.1:8786", which may take
    some seconds to answer: what `distributed.Client.get_executor` returns. The client is closed at
    the end.

    Raises DeviceUnavailableError if distributed is not installed, OSError if no scheduler answers,
    and ValueError if the address is malformed.
    """
    distributed = client("distributed", "'dask[distributed]'")
    try:
        connection = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except OSError as error:
        raise OSError(f"no scheduler of Dask answers at {address} within {PATIENCE:g} s") from error
    with _quiet_cancellations(), connection:
        yield connection.get_executor()


@contextlib.contextmanager
def _quiet_cancellations() -> Iterator[None]:
    """Keeps cancelled futures out of the log. Where a result arrives while its future is being
    cancelled, distributed has nobody to raise that to, and tornado logs it with a traceback. After
    a Ctrl-C, which cancels all futures, that says nothing to the user."""

    def is_news(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, CancelledError)

    log = logging.getLogger("tornado.application")
    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


class Cluster:
    """The workers behind a client of Dask, and a trace that is sent to them.

    Raises RuntimeError if there are no workers, or one has another version of bfc, or none;
    ValueError if the client is asynchronous.
    """

    def __init__(self, client: Any) -> None:
        if client.asynchronous:
            raise ValueError("bfc.advise needs a client of Dask that is not asynchronous")
        self._client = client
        self.threads = sum(self._workers().values())
        self._refuse_others()

    @classmethod
    def behind(cls, executor: Executor | None) -> Cluster | None:
        """The cluster that `client.get_executor()` runs its work on; None for other executors."""
        module = sys.modules.get("distributed.cfexecutor")
        if module is None or not isinstance(executor, module.ClientExecutor):
            return None
        return cls(executor._client)

    def send(self, trace: Trace) -> Any:
        """Gives each worker what a replay reads of the trace. A task that the future is passed to
        gets the trace."""
        lean = trace._bare(trace.meta)
        return self._client.scatter(lean, broadcast=True, hash=False)

    def _workers(self) -> dict[str, int]:
        """The threads of each worker, by address."""
        try:
            self._client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError as error:
            address = self._client.scheduler.address
            raise RuntimeError(f"the Dask cluster at {address} has no workers") from error
        threads: dict[str, int] = self._client.nthreads()
        return threads

    def _refuse_others(self) -> None:
        mine = version()
        try:
            theirs = self._client.run(version)
        except Exception as error:  # what a worker cannot read comes back as text
            if "ModuleNotFoundError" not in repr(error):
                raise
            raise RuntimeError(
                f"the workers of the Dask cluster cannot import bfc {mine}: {error}"
            ) from error
        for worker, other in theirs.items():
            if other != mine:
                raise RuntimeError(f"worker {worker} has bfc {other}, and this process has {mine}")


def version() -> str:
    """The version of bfc in this process."""
    return __version__
