"""The tries of a search on the workers of a cluster of Dask or Ray, in place of this machine's
cores: each stands in for `Tries`."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from bfc.libraries import client
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.distant import Came, Place, answer, end
from bfc_tools.predicting.tries import Question, SideBySide, Tried
from bfc_tools.study import cluster
from bfc_tools.study.cluster import Cluster, connected

#: More tries than this a search has little use for at a time.
MOST_AT_A_TIME = 16
#: Seconds between two looks at whether the cluster is there.
EVERY = 1.0


class _Answers:
    """Takes what workers send, and refuses workers that differ in their PyTorch."""

    def __init__(self) -> None:
        self._first: Came | None = None

    def take(self, came: Came) -> Tried:
        """Raises RuntimeError if another worker has another PyTorch."""
        first = self._first = self._first or came
        if came.torch != first.torch:
            raise RuntimeError(
                f"the worker on {came.where} has PyTorch {came.torch}, and the one on "
                f"{first.where} {first.torch}: their predictions cannot be compared"
            )
        return came.tried


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the tracebacks of a client that has lost its scheduler out of the log: that is said."""
    log = logging.getLogger("distributed.client")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class DaskTries(SideBySide[Any]):
    """Runs tries on a cluster of Dask. Use it in a `with` block."""

    def __init__(self, address: str, asked: Asked, jobs: int | None = None) -> None:
        self._address, self._asked, self._jobs = address, asked, jobs
        self.width = 0

    def __enter__(self) -> DaskTries:
        with contextlib.ExitStack() as cleanup:
            executor: Any = cleanup.enter_context(connected(self._address))
            self._client = executor._client
            threads = Cluster(self._client).threads
            self.width = self._jobs or min(threads, MOST_AT_A_TIME)
            self._place, self._answers = Place.here(self._asked), _Answers()
            self._ended: SimpleQueue[Any] = SimpleQueue()
            cleanup.enter_context(_quiet())
            cleanup.callback(self._end)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cleanup.__exit__(*error)

    def _end(self) -> None:
        """Ends what the workers keep, unless they are gone."""
        if self._client.status == "running":
            with contextlib.suppress(Exception):  # of workers that have just ended
                self._client.run(end, self._place.search, on_error="ignore")

    def begin(self, question: Question) -> Any:
        """A future of Dask."""
        future = self._client.submit(answer, question, self._place, pure=False)
        future.add_done_callback(self._ended.put)
        return future

    def drop(self, running: Collection[Any]) -> None:
        """Cancels them."""
        if running and self._client.status == "running":
            self._client.cancel(list(running))

    def wait(self, running: Collection[Any]) -> Any:
        """The next that ends. Raises RuntimeError if the cluster goes away."""
        missing = 0.0
        while True:
            with contextlib.suppress(Empty):
                while (future := self._ended.get(timeout=EVERY)) not in running:
                    pass  # which was dropped
                return future
            since = time.monotonic()
            missing = 0.0 if self._has_workers() else missing + EVERY + time.monotonic() - since
            if missing > cluster.PATIENCE:
                raise RuntimeError(
                    f"{self._gone()} has not answered for some time, or has no workers"
                )

    def _has_workers(self) -> bool:
        patience = cluster.PATIENCE
        try:
            told = self._client.sync(self._client.scheduler.identity, callback_timeout=patience)
        except Exception:  # of any kind, by where its connection was lost
            return False
        return bool(told["workers"])

    def _gone(self) -> str:
        return f"the Dask cluster at {self._address} is gone: its scheduler"

    def came(self, job: Any) -> Tried:
        """What its worker has sent."""
        import concurrent.futures

        from distributed import KilledWorker

        try:
            return self._answers.take(job.result())
        except KilledWorker as error:
            return Tried(error=f"workers of Dask have ended with it: {error}".splitlines()[0])
        except concurrent.futures.CancelledError as error:
            raise RuntimeError(f"{self._gone()} has ended, or cancelled the tries") from error


def _listens(address: tuple[str, int], patience: float) -> bool:
    """Whether anything listens there."""
    try:
        socket.create_connection(address, timeout=patience).close()
    except OSError:
        return False
    return True


class RayTries(SideBySide[Any]):
    """Runs tries on a cluster of Ray. Use it in a `with` block."""

    def __init__(self, address: str, asked: Asked, jobs: int | None = None) -> None:
        self._address, self._asked, self._jobs = address, asked, jobs
        self.width = 0

    def __enter__(self) -> RayTries:
        self._ray = ray = client("ray", "ray")
        host, _, port = self._address.rpartition(":")
        is_plain = bool(host) and "://" not in host and port.isdigit()
        if is_plain and not _listens((host, int(port)), cluster.PATIENCE):
            raise OSError(f"no cluster of Ray answers at {self._address}")  # Ray tries for minutes
        try:
            ray.init(
                self._address,
                log_to_driver=False,
                logging_level="critical",
                configure_logging=False,
            )
        except (ConnectionError, ValueError) as error:
            if "InvalidAuthToken" in str(error.__cause__):
                raise OSError(
                    f"the Ray cluster at {self._address} asks for its token: set "
                    "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless it is in ~/.ray/auth_token"
                ) from error
            raise OSError(f"no cluster of Ray answers at {self._address}") from error
        cores = int(ray.cluster_resources().get("CPU", 0))
        if not cores:
            ray.shutdown()
            raise RuntimeError(f"the Ray cluster at {self._address} has no cores for tasks")
        self.width = self._jobs or min(cores, MOST_AT_A_TIME)
        self._place, self._answers = Place.here(self._asked), _Answers()
        self._answer = ray.remote(num_cpus=1, max_retries=2)(answer)
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host, int(port))
        return self

    def __exit__(self, *error: Any) -> None:
        """What its workers keep ends when they do."""
        self._ray.shutdown()

    def begin(self, question: Question) -> Any:
        """A task of Ray."""
        return self._answer.remote(question, self._place)

    def drop(self, running: Collection[Any]) -> None:
        """Cancels them."""
        for task in running:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)

    def wait(self, running: Collection[Any]) -> Any:
        """The next that ends. Ray would end this process if its head were gone for long.

        Raises RuntimeError if the cluster goes away.
        """
        missing = 0.0
        while True:
            ended, _ = self._ray.wait(list(running), num_returns=1, timeout=EVERY)
            if ended:
                return ended[0]
            missing = 0.0 if _listens(self._head, EVERY) else missing + EVERY
            if missing > cluster.PATIENCE:
                raise RuntimeError(self._gone())

    def _gone(self) -> str:
        return f"the Ray cluster at {self._address} is gone: its head does not answer"

    def came(self, job: Any) -> Tried:
        """What its worker has sent."""
        errors = self._ray.exceptions
        try:
            return self._answers.take(self._ray.get(job))
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.WorkerCrashedError as error:
            return Tried(error=f"workers of Ray have ended with it: {error}".splitlines()[0])
        except errors.RayError as error:
            raise RuntimeError(f"{self._gone()}: {error}".splitlines()[0]) from error
