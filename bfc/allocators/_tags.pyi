from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

from bfc.allocators._frees import Frees
from bfc.snapshots.asleep import SleepReport

Way = Literal["host", "pinned"] | Callable[[int], object]
WAYS: tuple[str, ...]

class Tag:
    """A name, and whether what was allocated under it sleeps."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def is_asleep(self) -> bool: ...

class Entry:
    """One time that a scope was entered."""

class Scope:
    """What `with allocator.tag(name):` enters. It can be nested; the innermost one of an allocator holds."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Scope: ...
    def __exit__(
        self, kind: object = None, error: object = None, traceback: object = None
    ) -> None: ...

class Tagged(Frees):
    """How parts of an allocator's memory sleep and wake: a part of `Allocator`."""

    def tag(self, name: str) -> AbstractContextManager[object]:
        """A context manager: what is allocated within belongs to a tag, which `sleep` can put to sleep.

        It holds in this thread, and in this asyncio task. It can be nested; the innermost one wins.

        Parameters
        ----------
        name : str
            Any name. A new one makes a new tag.

        Returns
        -------
        context manager
            To be used in a `with` statement, any number of times.

        Raises
        ------
        TypeError
            If `name` is not a str.
        ValueError
            If `name` is empty.

        Notes
        -----
        What is allocated within also has an owner of the tag's name (see `bfc.owner`), unless another
        owner is set further in.

        Each tag has memory of its own, if the allocator maps memory. An allocation within both a tag
        and a `use_mem_pool` raises a RuntimeError. PyTorch, under `bfc.use`, allocates without the GIL, and
        its tensors belong to no tag. While a tag of an allocator is entered, its allocations and frees
        take their slow way, a few hundred nanoseconds more.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate("64 MiB")
        >>> report = pool.sleep(keep={"weights": "host"})
        >>> pool.asleep, pool.stats().bytes_reserved
        (frozenset({'weights'}), 0)
        >>> pool.wake("weights")
        """

    def sleep(
        self, keep: Mapping[str, Way] | Way | None = None, drop: Iterable[str] | None = None
    ) -> SleepReport:
        """Give the memory of tags back to the device. Their allocations stay, at the same addresses.

        With no argument all tags sleep, and their contents are dropped. Otherwise those that are named
        do, and the others stay awake. A tag that sleeps already is left as it is.

        Parameters
        ----------
        keep : mapping, "host", "pinned" or callable, optional
            Where the contents go, by tag: {"weights": "host"}. "host" is ordinary memory of the host,
            "pinned" is pinned memory, which a GPU reads and writes faster. A callable is called with a
            number of bytes, 32 MiB at most at a time, and returns a writable buffer for them, such as
            an `mmap.mmap` of a file. One of these, not in a mapping, holds for all tags that `drop`
            does not name.
        drop : str or iterable of str, optional
            Tags whose contents are lost.

        Returns
        -------
        SleepReport
            What went, and how long it took.

        Raises
        ------
        BufferError
            If another object holds a view of memory of these tags (an array, a memoryview).
        SettingsError
            If the allocator maps no memory (`virtual_memory=True` and `expandable_segments:True` do), a
            part of the tag's memory is not mapped, or contents are to be kept of a simulated device,
            which has none.
        ValueError
            If a tag is unknown or named twice, or `keep` has another value.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails, or one of the streams is being captured into a CUDA graph.
        MemoryError
            If the host has no room for what is to be kept.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It waits for all streams that used the memory and that the allocator knows of. Wait yourself for
        a stream that it was not told of. After an error everything is as before, and the call can be
        repeated; only what was to be dropped may be lost. If the device fails a second time while that
        is undone, the tags sleep all the same, and a note of the error says so.

        While a tag sleeps, its buffers can be freed; that copies and maps nothing. Allocating in the
        tag, and reading or exporting a buffer, raises `AsleepError`. Only live allocations are copied.

        Cost: one driver call to unmap each run of addresses, one to release each page, and the copy.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate(4).from_host(b"abcd")
        >>> with pool.tag("kv"):
        ...     cache = pool.allocate("256 MiB")
        >>> pool.sleep(keep={"weights": "host"}, drop=["kv"]).kept_bytes
        4
        >>> pool.wake()
        >>> bytes(weights)
        b'abcd'
        """

    def wake(self, *tags: str, fill: int | None = None) -> None:
        """Give sleeping tags memory again, at the same addresses, and their contents if they were kept.

        Parameters
        ----------
        *tags : str
            Which ones; without any, all that sleep. A tag that is awake is left as it is.
        fill : int, optional
            A byte, from 0 to 255. Memory whose contents were dropped is filled with it. By default
            the contents of such memory are undefined.

        Raises
        ------
        OutOfMemoryError
            If there is no room for all of them, even after what is cached was given back.
        ValueError
            If a tag is unknown, or `fill` is not a byte.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails.
        AsleepError
            If the contents of a tag were lost, since the process was forked while they were copied.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        All of the tags wake, or none. After an error they sleep as before, what was kept is still
        kept, and the call can be repeated. The host's memory is given back once it has succeeded.
        What was freed meanwhile is neither mapped nor copied.

        Cost: one driver call to create each page, one to map it, one to give access to each run of
        addresses, and the copy.
        """

    @property
    def asleep(self) -> frozenset[str]:
        """The names of the tags that sleep, as a frozenset."""
