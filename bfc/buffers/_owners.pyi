from collections.abc import Callable
from typing import SupportsIndex

class Scope:
    """The value of the context variable: an owner, and the scope around it."""

class Entered:
    """One time that a scope was entered."""

class owner:
    """A context manager that says whose memory is allocated within it.

    `Stats.by_owner` has the bytes in use of each owner. Snapshots, histories, `leaks()` and the
    text of an `OutOfMemoryError` name them. It can be nested; the innermost one wins.

    Parameters
    ----------
    name : str
        Any name, such as "weights" or "kv cache". The same name is the same owner everywhere.
    step : int, optional
        The number of the training step, or of whatever else the program counts. Without one, that of
        the scope around it holds. `ChunkInfo` and `HistoryEntry` have it for what is allocated while
        `record_history` keeps frames.

    Attributes
    ----------
    name : str
        As given.
    step : int or None
        As given.

    Raises
    ------
    TypeError
        If `name` is not a str, or `step` is not an int.
    ValueError
        If `name` is empty, or `step` is negative or above 2**63 - 1.
    RuntimeError
        If it is left without having been entered, or in another thread or asyncio task.

    Notes
    -----
    It holds in this thread and in this asyncio task, for every allocator. A task that is started
    within it inherits it, and keeps it after the `with` block has ended; so does
    `asyncio.to_thread`. Other threads do not inherit it.

    The owner of an allocation does not change. Its bytes count until the memory can be reused: if
    it waits for a stream, until that has finished.

    Tensors that PyTorch allocates through bfc (`bfc.use`) have the owner of a `with` block that was
    entered in the same thread, or in the same task, after `bfc.use`: PyTorch allocates without the
    GIL, where an inherited owner cannot be seen. Autograd's own threads have none.

    A process can name 65,534 owners. Further names share one owner, "(more owners)", and a
    RuntimeWarning says so.

    Cost: about 5 ns for each allocation within, and 0.3 us for the `with` statement.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with bfc.owner("kv cache"):
    ...     cache = allocator.allocate("3 MiB")
    >>> rest = allocator.allocate("1 MiB")
    >>> allocator.stats().by_owner
    {'kv cache': 3145728, '': 1048576}
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    def __init__(self, name: str, *, step: SupportsIndex | None = None) -> None: ...
    def __enter__(self) -> owner: ...
    def __exit__(
        self, kind: object = None, error: object = None, traceback: object = None
    ) -> None: ...

def set_ranges(
    begin: Callable[[str], object] | None, end: Callable[[object], object] | None
) -> None:
    """From now on `begin(name)` is called where an `owner` is entered, and `end` with its answer where it is left.
    None and None: nothing is called.
    """
