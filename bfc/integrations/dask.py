"""One pool for each GPU of a Dask cluster: made on every worker, served to other libraries, and
shown in the dashboard.

`Pools` is a plugin of the workers. Their figures come with each heartbeat, and `table(client)`
shows them. Import this module before the scheduler starts, and its dashboard has a page of them
(`/individual-bfc-pools`). A scheduler that runs by itself imports it with
`dask scheduler --preload bfc.integrations.dask`.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from bfc.allocators._allocator import Allocator
from bfc.integrations._dask_page import COLUMNS, FAULT, FIGURES, register, rows_of
from bfc.integrations._shared import OneOrMore, client
from bfc.libraries import frame_of
from bfc.snapshots.figures import figures

try:
    from distributed import WorkerPlugin
except ImportError:  # `Pools` says so when it is called
    WorkerPlugin = object

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker

register()

INSTALL = "'dask[distributed]' bokeh"
#: `use` and the names of libraries, which are defined in the package above this file.
integrations = importlib.import_module("bfc.integrations")
NAME = "bfc"
#: Libraries that take memory from a pool only in threads that ask for it, and what asks.
OF_A_THREAD = {"cuda_core": "install_in_thread", "torch": "serve"}
#: What workers report besides: the dashboard has had a page for figures of this name since 2022.
RMM = "rmm"


class Pools(WorkerPlugin):  # type: ignore[misc]
    """The same pools on every worker of a Dask cluster: `client.register_plugin(Pools(recipe))`.

    Workers that join later make them, too, and so does a worker that a nanny has restarted. A
    plugin that is registered later replaces this one. `client.unregister_worker_plugin("bfc")`
    ends it.

    Parameters
    ----------
    recipe : callable
        Called on each worker, in its event loop. It returns an allocator, or several for different
        devices: a list, or a dict by ordinal. If it has a parameter `dask_worker`, that is the
        worker.
    libraries : sequence of {"cupy", "numba", "cuda_core", "torch", "rmm"}, optional
        What takes its memory from the pools, as by `bfc.use`.

    Attributes
    ----------
    recipe : callable
        As given.
    libraries : tuple of str
        As given.
    pools : dict of str to Allocator
        On a worker: its pools, by device, such as "cuda:0".

    Raises
    ------
    DeviceUnavailableError
        If distributed is not installed.
    TypeError
        If `recipe` cannot be called.
    ValueError
        If a library is unknown.

    Notes
    -----
    If the recipe fails on a worker, `register_plugin` raises a RuntimeError that names the worker.
    A worker that joins later works on without pools; its log and `table` have the error.

    Each heartbeat brings the figures of `stats()`: `worker.metrics["bfc"]`, by device, and, summed,
    "rmm-used" and "rmm-total" of `worker.metrics["rmm"]`, which the dashboard's page of RMM shows.
    That page needs a GPU that NVML knows, and `nvidia-ml-py`. Cost: some microseconds a pool.

    A worker that ends, or that gets another plugin, puts the libraries back and closes its pools,
    with what is still allocated from them. PyTorch and cuda.core are served in each thread that
    runs tasks, from its first task on.

    Examples
    --------
    >>> def recipe():
    ...     return bfc.CachingAllocator(bfc.CUDASubAllocator(), memory_limit="4 GiB")
    >>> client.register_plugin(Pools(recipe, libraries=("cupy",)))  # doctest: +SKIP
    """

    name = NAME

    def __init__(self, recipe: Callable[..., OneOrMore], libraries: Sequence[str] = ()) -> None:
        client("distributed", INSTALL)
        if not callable(recipe):
            raise TypeError(f"recipe is a function, not {type(recipe).__name__}")
        self.recipe = recipe
        self.libraries = (libraries,) if isinstance(libraries, str) else tuple(libraries)
        unknown = [name for name in self.libraries if name not in integrations.LIBRARIES]
        if unknown:
            given = ", ".join(map(repr, unknown))
            known = ", ".join(integrations.LIBRARIES)
            raise ValueError(f"the libraries are any of {known}, not {given}")
        self.pools: dict[str, Allocator] = {}
        self._cleanup = ExitStack()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.recipe, self.libraries)

    def setup(self, worker: Worker) -> None:
        """Make the pools. Dask calls it.

        Parameters
        ----------
        worker : distributed.Worker
            The worker.

        Raises
        ------
        RuntimeError
            If the recipe fails, or a library cannot be served.
        """
        _set_metric(worker, FAULT, None)
        try:
            self._serve(worker)
        except Exception as error:
            self.pools.clear()
            text = f"worker {worker.address} cannot make its pools: {type(error).__name__}: {error}"
            _set_metric(worker, FAULT, lambda worker: text)
            raise RuntimeError(text) from error

    def _serve(self, worker: Worker) -> None:
        with ExitStack() as undo:
            made = self._made(worker)
            for pool in made:
                if isinstance(pool, Allocator):
                    undo.callback(pool.close)
            for pool in made:
                self._add(pool)
            if self.libraries:
                ours = list(self.pools.values())
                installed = undo.enter_context(integrations.use(ours, *self.libraries))
                _serve_threads(worker, installed.allocators, self.libraries, undo)
            self._report(worker, undo)
            self._cleanup = undo.pop_all()

    def _made(self, worker: Worker) -> list[Allocator]:
        takes_it = importlib.import_module("distributed.utils").has_arg(self.recipe, "dask_worker")
        made = self.recipe(dask_worker=worker) if takes_it else self.recipe()
        listed = made.values() if isinstance(made, Mapping) else made
        return list(listed) if isinstance(listed, Iterable) else [listed]

    def _add(self, pool: Allocator) -> None:
        if not isinstance(pool, Allocator):
            raise TypeError(f"the recipe returns an allocator, not {type(pool).__name__}")
        if str(pool.device) in self.pools:
            raise ValueError(f"two allocators for {pool.device}: a device can have one")
        self.pools[str(pool.device)] = pool

    def _report(self, worker: Worker, undo: ExitStack) -> None:
        """Makes heartbeats carry the figures. The event loop calls these functions, often."""
        known: dict[str, dict[str, Any]] = {}

        def read(worker: Worker) -> dict[str, dict[str, Any]]:
            for device, pool in self.pools.items():
                try:
                    known[device] = figures(pool.stats())
                except Exception as error:  # the figures before are the last that are known
                    fault = f"{type(error).__name__}: {error}"
                    known[device] = known.get(device, {}) | {"error": fault}
            return known

        def summed(worker: Worker) -> dict[str, int]:
            now = read(worker).values()
            return {
                "rmm-used": sum(each.get("used", 0) for each in now),
                "rmm-total": sum(each.get("reserved", 0) for each in now),
            }

        for key, metric in ((FIGURES, read), (RMM, summed)):
            undo.callback(_set_metric, worker, key, worker.metrics.get(key))
            _set_metric(worker, key, metric)

    def teardown(self, worker: Worker) -> None:
        """Put the libraries back, and close the pools. Dask calls it.

        Parameters
        ----------
        worker : distributed.Worker
            The worker.
        """
        _set_metric(worker, FAULT, None)
        cleanup, self._cleanup = self._cleanup, ExitStack()
        cleanup.close()
        self.pools.clear()


def _set_metric(worker: Worker, key: str, metric: Callable[..., Any] | None) -> None:
    """In a new dict: a heartbeat that awaits another metric is in the middle of the old one."""
    others = {name: one for name, one in worker.metrics.items() if name != key}
    worker.metrics = others if metric is None else others | {key: metric}


def pool(device: str | None = None) -> Allocator:
    """The pool of the worker that runs this task.

    Parameters
    ----------
    device : str, optional
        Such as "cuda:1", if the worker has several.

    Returns
    -------
    Allocator
        It is closed when the worker ends.

    Raises
    ------
    LookupError
        If this is no task, the worker has no such pool, or it has several and `device` is None. A
        function that `client.run` calls is no task, and runs beside them: it gets the worker as
        `dask_worker`, and finds the pools in `dask_worker.plugins["bfc"].pools`.

    Examples
    --------
    >>> def work(nbytes):
    ...     with bfc.integrations.dask.pool().allocate(nbytes) as buffer:
    ...         return buffer.device
    >>> client.submit(work, "1 MiB").result()  # doctest: +SKIP
    Device(kind='cuda', ordinal=0)
    """
    try:
        worker = client("distributed", INSTALL).get_worker()
    except ValueError:
        where = f"a function of client.run has them in dask_worker.plugins[{NAME!r}].pools"
        raise LookupError(f"no task of Dask runs this: call it in a task; {where}") from None
    plugin = worker.plugins.get(NAME)
    pools: dict[str, Allocator] = {} if plugin is None else plugin.pools
    if device is None and len(pools) == 1:
        return next(iter(pools.values()))
    if device in pools:
        return pools[device]
    wanted = "no pool" if device is None else f"no pool for {device}"
    known = f"it has {', '.join(pools)}: name one" if pools else "register Pools(recipe) first"
    raise LookupError(f"worker {worker.address} has {wanted}; {known}")


def table(client: Client, *, as_frame: bool = False) -> Any:
    """The pools of all workers, as of their last heartbeats.

    Parameters
    ----------
    client : distributed.Client
        A client that is not asynchronous.
    as_frame : bool, optional
        Return a pandas.DataFrame.

    Returns
    -------
    list of dict, or pandas.DataFrame
        One row for each pool: "worker", its address; "name"; "device", such as "cuda:0"; "used",
        "reserved", "peak", "limit" and "largest_free" in bytes; "error". A worker that could not
        make its pools has one row, with the error. What does not apply is None.

    Raises
    ------
    DeviceUnavailableError
        If pandas is asked for and missing.
    ValueError
        If the client is asynchronous.

    Examples
    --------
    >>> for row in table(client):  # doctest: +SKIP
    ...     print(row["worker"], row["device"], row["used"], row["reserved"])
    tcp://127.0.0.1:40001 cuda:0 1048576 2097152
    """
    if client.asynchronous:
        raise ValueError("the client is asynchronous, and its list of workers is empty")
    workers = client.scheduler_info(n_workers=-1)["workers"]
    rows = [
        row
        for address, worker in workers.items()
        for row in rows_of(address, worker.get("name"), worker.get("metrics", {}))
    ]
    if not as_frame:
        return rows
    return _frame(rows)


def _frame(rows: list[dict[str, Any]]) -> Any:
    return frame_of({name: [row.get(name) for row in rows] for name in COLUMNS})


def dask_setup(server: Scheduler) -> None:
    """Do nothing: `--preload` has imported this module, which registers the page of the dashboard.

    Parameters
    ----------
    server : distributed.Scheduler
        The scheduler.
    """


# Libraries that are served by thread -------------------------------------------------------------


class _Served:
    """Replaces `submit` of an executor, for good. Before its next piece of work, each thread leaves
    what it served before and enters what is to be served."""

    def __init__(self, submit: Callable[..., Any]) -> None:
        self.submit = submit
        self.enter: Callable[[], Callable[[], object]] | None = None
        self._of_thread = threading.local()

    def __call__(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        return self.submit(self._run, work, *arguments, **options)

    def _run(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        mine, wanted = self._of_thread, self.enter
        if getattr(mine, "entered", None) is not wanted:
            leave, mine.leave, mine.entered = getattr(mine, "leave", None), None, None
            if leave is not None:
                leave()
            if wanted is not None:
                mine.leave = wanted()
            mine.entered = wanted
        return work(*arguments, **options)


def _serve_threads(
    worker: Worker, allocators: dict[int, Allocator], libraries: Sequence[str], undo: ExitStack
) -> None:
    """Serves the libraries that take memory by thread in all threads that run tasks."""
    named = [name for name in dict.fromkeys(libraries) if name in OF_A_THREAD]
    if not named:
        return

    def enter() -> Callable[[], object]:
        with ExitStack() as entered:
            for name in named:
                module = importlib.import_module(f"bfc.integrations.{name}")
                entered.callback(getattr(module, OF_A_THREAD[name])(allocators))
            return entered.pop_all().close

    for executor in worker.executors.values():
        if "ThreadPoolExecutor" not in type(executor).__name__:
            continue  # an executor of processes, which have no pool
        if not isinstance(executor.submit, _Served):
            executor.submit = _Served(executor.submit)
        executor.submit.enter = enter
        undo.callback(functools.partial(setattr, executor.submit, "enter", None))
