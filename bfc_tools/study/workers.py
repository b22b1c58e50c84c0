"""Many replays of one trace, over any `concurrent.futures.Executor`; processes by default.

The trace is sent to the processes once, as a file or over Dask's network, and the points in
batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from bfc.files import naming
from bfc.libraries import np
from bfc.trace import Trace
from bfc_tools.scratch import scratch
from bfc_tools.study.candidates import MOST_PAGES, Outcome, Point, replay
from bfc_tools.study.cluster import Cluster
from bfc_tools.study.counting import was_predicted

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

#: What is replayed: a point, and the bytes of the device.
Task = tuple[Point, int]
#: Called with the number of replays that are done.
Tick = Callable[[int], object]

#: Batches for each worker: few enough to be worth sending, enough to share the work evenly.
BATCHES_A_WORKER = 4
#: The most replays of a batch: the last one keeps other workers waiting, and progress is by batch.
MOST_IN_A_BATCH = 64
NO_GUARD = (
    "bfc.advise starts processes that import the program's main file, and this one calls it again "
    "on import: put the call behind `if __name__ == '__main__':`, or pass jobs=1 or an executor "
    "of threads"
)
#: Dask cancels what needs a trace that no worker has any more.
LOST = (
    "the executor has cancelled replays of bfc.advise: it was shut down, or the workers of its "
    "cluster have ended"
)


class Replays:
    """Replays of one trace, in this process or in others. Use it in a `with` block.

    Columns that a replay does not need are not sent, nor all of `meta` but what `Beginning` reads,
    the version of PyTorch, and whether the run was predicted. `executor` is not shut down; its
    workers must see this machine's folder of temporary files, except those of
    `distributed.Client.get_executor()`. Without it, so many `jobs` are started as processes: 1
    starts none, and None one for each core that this process may use. `tick` is called with a
    number of replays when so many more are done.

    Raises RuntimeError if processes cannot be started, because the main file has no guard; or if
    workers of Dask have no bfc, or another version.
    """

    def __init__(
        self,
        trace: Trace,
        executor: Executor | None = None,
        jobs: int | None = None,
        tick: Tick | None = None,
    ) -> None:
        said: dict[str, Any] = {"torch_version": trace.torch}
        if was_predicted(trace):
            said["predicted"] = {}
        self.trace = trace._bare(trace.beginning.as_meta() | said)
        self.count = 0
        self._is_started = False
        self._known: dict[Task, Outcome] = {}
        self._given = executor
        self._jobs = usable_cores() if jobs is None else jobs
        self._tick = tick or (lambda done: None)
        self._cleanup = contextlib.ExitStack()
        self._executor: Executor | None = None
        self._path = ""
        self._sent: Any = None

    def __enter__(self) -> Replays:
        if self._given is None and self._jobs == 1:
            return self
        if self._given is None:
            refuse_to_start_again()
        cluster = Cluster.behind(self._given)
        if cluster is not None:
            self._jobs, self._sent = cluster.threads, cluster.send(self.trace)
            self._executor = self._given
            return self
        with contextlib.ExitStack() as cleanup:
            with _without_interrupts():  # no folder is left that nobody knows of
                folder = cleanup.enter_context(scratch("bfc-advise-"))
                self._path = str(Path(folder, "trace.npz"))
                with naming(self._path):
                    _write(self.trace, self._path)
                self._executor = self._given or cleanup.enter_context(processes(self._jobs))
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._sent = None  # then the workers drop the trace
        _read.pop(self._path, None)  # where the executor has threads of this process
        self._cleanup.__exit__(*error)

    def run(self, tasks: Sequence[Task], *, here: bool = False) -> list[Outcome]:
        """The outcome of each task. What was replayed before is not replayed again. With `here`,
        this process does it, since other processes take a while to start, and gives none up."""
        new = [task for task in dict.fromkeys(tasks) if task not in self._known]
        if here or self._executor is None:
            done = self._run_here(new, None if here else MOST_PAGES)
        else:
            done = self._run(new)
        for outcomes in done:
            self._known |= outcomes
            self.count += len(outcomes)
            self._tick(len(outcomes))
        return [self._known[task] for task in tasks]

    def _run_here(self, tasks: list[Task], most_pages: int | None) -> Iterator[dict[Task, Outcome]]:
        for task in tasks:
            yield {task: replay(self.trace, *task, most_pages)}

    def _run(self, tasks: list[Task]) -> Iterator[dict[Task, Outcome]]:
        from concurrent.futures import CancelledError
        from concurrent.futures.process import BrokenProcessPool

        share = -(-len(tasks) // (self._jobs * BATCHES_A_WORKER))
        step = max(1, min(share, MOST_IN_A_BATCH))
        batches = [tasks[at : at + step] for at in range(0, len(tasks), step)]
        futures: dict[Future[list[Outcome]], list[Task]] = {}
        # `as_completed` takes the locks of all futures, and a signal leaves it with some of them.
        ended: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()
        try:
            with _without_interrupts():  # processes that start here inherit that
                for batch in batches:
                    future = self._submit(batch)
                    futures[future] = batch
                    future.add_done_callback(ended.put)
            for _ in batches:
                future = ended.get()
                outcomes = future.result()
                self._is_started = True
                yield dict(zip(futures[future], outcomes, strict=True))
        except BrokenProcessPool as error:
            if self._given is not None:
                raise
            raise RuntimeError(self._why_broken()) from error
        except CancelledError as error:
            raise RuntimeError(LOST) from error
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, batch: list[Task]) -> Future[list[Outcome]]:
        assert self._executor is not None
        if self._sent is not None:
            return self._executor.submit(replay_batch, self._sent, batch)
        return self._executor.submit(replay_all, self._path, batch)

    def _why_broken(self) -> str:
        if self._is_started:
            return "a process of bfc.advise has ended unexpectedly, perhaps for lack of memory"
        return f"the processes of bfc.advise have ended at once. {NO_GUARD}"


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(trace: Trace, path: str) -> None:
    """Not compressed: it is read once by each process."""
    arrays: dict[str, Any] = {"meta": np.array(json.dumps(trace.meta))}
    for name in ("op", "id", "size", "stream", "pool", "pools", "pool_marks"):
        values = getattr(trace, name)
        if values is not None:
            arrays[name] = values
    np.savez(path, **arrays)


# In the workers ------------------------------------------------------------------------------

_read: dict[str, Trace] = {}


def replay_all(path: str, tasks: Sequence[Task]) -> list[Outcome]:
    """The outcomes of some tasks on the trace in a file, which a worker reads once."""
    trace = _read.get(path)
    if trace is None:
        _read.clear()
        trace = _read[path] = Trace.load(path)
    return replay_batch(trace, tasks)


def replay_batch(trace: Trace, tasks: Sequence[Task]) -> list[Outcome]:
    """The outcomes of some tasks."""
    return [replay(trace, *task) for task in tasks]


def refuse_to_start_again() -> None:
    """Ends a process that is only importing the main file of the one that started it."""
    from multiprocessing import process

    if getattr(process.current_process(), "_inheriting", False):
        sys.exit(NO_GUARD)


def _end_with_the_parent() -> None:
    """Ends a worker when the process that started it is killed: it would wait for work for ever."""
    from multiprocessing import connection, parent_process

    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# The processes -------------------------------------------------------------------------------


class _Spawning(SpawnContext):
    """Starts processes anew, without a copy of this one, and keeps what it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        self.started.append(SpawnProcess(*arguments, **options))
        return self.started[-1]


@contextlib.contextmanager
def processes(count: int) -> Iterator[Executor]:
    """An executor of new processes. An exception, such as a Ctrl-C, ends them at once."""
    from concurrent.futures import ProcessPoolExecutor

    context = _Spawning()
    executor = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_the_parent)
    try:
        yield executor
    except BaseException:
        for process in context.started:
            if process.pid is not None:
                process.terminate()
        executor.shutdown(wait=True, cancel_futures=True)
        raise
    executor.shutdown(wait=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Holds a Ctrl-C back, and what else ends the program if its handler raises something, so that
    no process starts that nobody knows of. Processes that start meanwhile never see a Ctrl-C: the
    process that waits for them ends them.

    They inherit what this thread blocks. The signal may be delivered to another thread of this
    process, so that its handler must wait, too.
    """
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    number: int
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number, frame in came[:1]:
        handlers[number](number, frame)
