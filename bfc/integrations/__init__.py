"""One pool under several libraries: `bfc.use(allocator, "cupy", "numba")`.

There is one file for each library, imported when the library is first named. Each has the same
`serve(allocators)`, which returns a function that undoes it. No other library is imported. In
order:

    _shared.py, _numba_contexts.py
    _torch.pyx            calls from PyTorch that must not take the GIL
    _torch_stats.py       PyTorch's statistics of either policy
    _torch_table.pyx      the table of C functions that back ends of PyTorch compile against
    torch_shared.hpp      mapped memory for other processes
    torch_cuda.cpp        PyTorch's allocator of CUDA memory over that table
    _torch_cuda.py        compiles it, and answers what it asks
    _by_tag.py            tags of the pools that serve PyTorch, for the calls of other libraries
    torch_memory_saver.py, vllm.py
    _core_resource.py
    cuda_core.py
    _emm.py
    _numba_default.py     for processes that name us in NUMBA_CUDA_MEMORY_MANAGER
    cupy.py, numba.py, nvtx.py, prometheus.py, pyopencl.py, rmm.py, torch.py, torch_backend.py
    _dask_page.py
    dask.py               the pools of a cluster
    torch_opencl.py       the door to the package bfc_torch_opencl
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from bfc.integrations._shared import Allocators, OneOrMore, by_device
from bfc.interpreter._process import ForkSafeLock

LIBRARIES = ("cupy", "numba", "cuda_core", "torch", "rmm")
_lock = ForkSafeLock()
_layers: list[Installation] = []  # those that have not been put back, oldest first
_installed: dict[str, tuple[Installation, Callable[[], None]]] = {}


class Installation:
    """What `bfc.use` returns. It is undone by `put_back()`, or at the end of a `with` block.

    Parameters
    ----------
    allocators : dict of int to Allocator
        The allocators, by device.
    libraries : tuple of str
        The libraries that take memory from them.

    Attributes
    ----------
    allocators : dict of int to Allocator
        As given.
    libraries : tuple of str
        As given.
    """

    def __init__(self, allocators: Allocators, libraries: tuple[str, ...]) -> None:
        self.allocators = allocators
        self.libraries = libraries

    def put_back(self) -> None:
        """Give each library what it had before. Doing it twice does nothing."""
        with _lock:
            if self in _layers:
                _layers.remove(self)
                _follow_all(reversed(self.libraries))

    def serves(self, library: str) -> bool:
        """Whether it names a library, and its pools are open.

        Parameters
        ----------
        library : str
            Such as "cupy".

        Returns
        -------
        bool
            False once a pool is closed.
        """
        closed = any(allocator.closed for allocator in self.allocators.values())
        return library in self.libraries and not closed

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.put_back()

    def __repr__(self) -> str:
        where = ", ".join(str(allocator.device) for allocator in self.allocators.values())
        state = f"{where} in {', '.join(self.libraries)}" if self in _layers else "put back"
        return f"<bfc.use: {state}>"


def use(allocator: OneOrMore | None, *libraries: str) -> Installation:
    """Let other libraries take their memory from an allocator.

    Parameters
    ----------
    allocator : Allocator, list of Allocator, dict of int to Allocator, or None
        One over CUDA memory, or one for each device: a list, or {ordinal: allocator}. None puts
        every library back, and takes no names.
    *libraries : {"cupy", "numba", "cuda_core", "torch", "rmm"}
        The libraries. It takes effect in the calling thread for torch, in the `Device` objects of
        the calling thread for cuda_core, and in all threads for the others.

    Returns
    -------
    Installation
        It undoes this, with `put_back()` or at the end of a `with` block. A later `use` replaces
        this one in the libraries that it names, until it is undone itself.

    Raises
    ------
    ValueError
        If a library is unknown, or the memory is not that of CUDA devices, one allocator for each.
    DeviceUnavailableError
        If a library is missing, or its CUDA runtime refuses the driver, as those of cupy, rmm and
        torch do the emulated one; the text says what to install or to do.
    ClosedError
        If an allocator is closed.

    Notes
    -----
    It takes effect in all of the libraries, or raises an error and takes effect in none. What they
    allocated before is not affected; what comes from the pool keeps it alive.

    Cost of an allocation: `python -m bench.integrations` measures it.

    Examples
    --------
    >>> import bfc
    >>> if bfc.cuda.is_available():
    ...     allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="1 GiB")
    ...     with bfc.use(allocator, "cupy", "numba"):
    ...         pass  # arrays of both lie in one pool
    >>> bfc.use(None)
    <bfc.use: put back>
    """
    if allocator is None:
        if libraries:
            raise ValueError("use(None) gives every library back what it had: pass it no names")
        with _lock:
            _layers.clear()
            _follow_all(reversed(list(_installed)))
        return Installation({}, ())
    unknown = [name for name in libraries if name not in LIBRARIES]
    if unknown or not libraries:
        given = f", not {', '.join(map(repr, unknown))}" if unknown else ""
        raise ValueError(f"name the libraries to serve, any of {', '.join(LIBRARIES)}{given}")
    layer = Installation(by_device(allocator), libraries)
    with _lock:
        _layers.append(layer)
        try:
            for library in layer.libraries:
                _follow(library)
        except BaseException:
            layer.put_back()
            raise
    return layer


def _follow(library: str) -> None:
    """Gives a library the allocators of the newest installation that serves it, or its own."""
    wanted = next((layer for layer in reversed(_layers) if layer.serves(library)), None)
    current, put_back = _installed.get(library, (None, None))
    if wanted is current:
        return
    if put_back is not None:
        put_back()
        del _installed[library]
    if wanted is not None:
        module = importlib.import_module(f"{__name__}.{library}")
        _installed[library] = wanted, module.serve(wanted.allocators)


def _follow_all(libraries: Iterable[str]) -> None:
    faults = []
    for library in libraries:
        try:
            _follow(library)
        except Exception as error:
            faults.append(error)
    if faults:
        raise faults[0]


def __getattr__(name: str) -> Any:
    """`bfc.integrations.cupy` without an import statement."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
