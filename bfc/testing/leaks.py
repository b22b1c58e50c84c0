"""What is still live, and the lines of Python that it was allocated on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from bfc.allocators._allocator import Allocator
from bfc.snapshots.leaks import Leak, describe
from bfc.snapshots.snapshot import ChunkInfo, Frame

#: How many notes are kept before those of what was freed are dropped.
FIRST_NOTES_ALLOWED = 1024


class LeakError(AssertionError):
    """Memory is live that should have been freed.

    Parameters
    ----------
    allocator : Allocator
        Whose memory it is.
    leaks : list of Leak
        What is live.

    Attributes
    ----------
    leaks : list of Leak
        As given.
    """

    def __init__(self, allocator: Allocator, leaks: list[Leak]) -> None:
        self.leaks = leaks
        super().__init__(describe(repr(allocator), leaks, "not from Python within the check"))


class leak_check:  # noqa: N801 - used as a function is
    """A context manager that finds what was allocated within it and is live at its end.

    Parameters
    ----------
    allocator : Allocator
        A `BFCAllocator` or a `CachingAllocator`.
    depth : int, optional
        How many frames of each allocation to keep, from the innermost out to the `with` block.

    Raises
    ------
    LeakError
        If something is live at the end of the block. It names the lines that allocated it.
    TypeError
        If `allocator` is not an allocator.

    Notes
    -----
    Garbage is collected first. What waits for a stream counts as freed, and so does everything of
    an allocator that was closed. If an exception leaves the block, nothing is checked. Checks of
    one allocator can be nested.

    Cost: some microseconds for each allocation; nothing while no check is on.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with leak_check(allocator):
    ...     ptr = allocator.allocate_raw(1000)
    ...     allocator.deallocate_raw(ptr)
    >>> with leak_check(allocator) as check:
    ...     ptr = allocator.allocate_raw(1000)
    ...     [(leak.nbytes, leak.frames[0].line) for leak in check.found()]
    ...     allocator.deallocate_raw(ptr)
    [(1000, 2)]
    """

    def __init__(self, allocator: Allocator, *, depth: int = 12) -> None:
        if not isinstance(allocator, Allocator):
            raise TypeError(f"leak_check takes an allocator, not {type(allocator).__name__}")
        self._allocator = allocator
        self._depth = depth
        self._known: frozenset[int] = frozenset()
        self._frames: dict[int, tuple[Frame, ...]] = {}
        self._notes_allowed = FIRST_NOTES_ALLOWED
        self._outer: Callable[[int], object] | None = None
        self._block: FrameType | None = None

    def __enter__(self) -> Self:
        self._known = frozenset(chunk.allocation_id for chunk in self._live())
        self._block = sys._getframe(1)
        self._outer = self._allocator._swap_noter(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._allocator._swap_noter(self._outer)
        self._block = None
        if error is not None:
            return
        leaks = self.found()
        if leaks:
            raise LeakError(self._allocator, leaks)

    def found(self) -> list[Leak]:
        """What was allocated since the check began and is live now.

        Returns
        -------
        list of Leak
            In address order.
        """
        gc.collect()
        return [
            Leak(chunk.ptr, chunk.requested_size, chunk.stream, self._frames_of(chunk), chunk.owner)
            for chunk in self._live()
            if chunk.allocation_id not in self._known
        ]

    def _live(self) -> list[ChunkInfo]:
        if self._allocator.closed:
            return []
        chunks = self._allocator.snapshot(history=False).chunks()
        return [chunk for chunk in chunks if chunk.state == "in use"]

    def _frames_of(self, chunk: ChunkInfo) -> tuple[Frame, ...]:
        return self._frames.get(chunk.allocation_id, ())

    def _note(self, allocation_id: int) -> None:
        """Called by the allocator, directly below the code that allocates."""
        frames: list[Frame] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(frames) < self._depth:
            code = frame.f_code
            if code.co_filename != __file__:  # of a check around this one
                frames.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
            frame = None if frame is self._block else frame.f_back
        self._frames[allocation_id] = tuple(frames)
        if len(self._frames) > self._notes_allowed:
            self._forget_freed()
        if self._outer is not None:
            self._outer(allocation_id)

    def _forget_freed(self) -> None:
        """Drops the notes of freed allocations. Those that are live now are in the later snapshot,
        too."""
        noted = list(self._frames)
        live = {chunk.allocation_id for chunk in self._live()}
        for allocation_id in noted:
            if allocation_id not in live:
                self._frames.pop(allocation_id, None)
        self._notes_allowed = max(FIRST_NOTES_ALLOWED, 2 * len(self._frames))
