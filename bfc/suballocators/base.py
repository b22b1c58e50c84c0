"""The contract between an allocator and whatever its regions come from.

A sub-allocator is plain Python and is called once a region, never once an allocation, so clarity is
worth more than speed. An outside package can write one: subclass `SubAllocator`, set `total_bytes`,
implement `alloc` and `free`, and run `bfc.testing.SubAllocatorContract` on it.
"""

from __future__ import annotations

import ctypes
import math
import operator
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, SupportsIndex

from bfc.errors import SubAllocatorError
from bfc.units import parse_bytes

#: DLPack's numbers for the kinds of memory that it knows.
DLPACK_DEVICE_TYPES = {"cpu": 1, "cuda": 2, "cuda_host": 3, "opencl": 4, "cuda_managed": 13}


class Device(NamedTuple):
    """Where memory lies: a kind ("cpu", "cuda", "cuda_managed", "cuda_host", "opencl", "simulated")
    and an ordinal."""

    kind: str
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}"


class Fence(Protocol):
    """A mark in a stream's queue."""

    def done(self) -> bool:
        """Whether everything queued before the mark has finished. Does not block."""

    def wait(self) -> None:
        """Blocks until it has."""


class SubAllocator(ABC):
    """A source of regions.

    An allocator calls it without holding a lock, from any thread (also the one in which a buffer is
    finalised), and possibly from several at once. Every block that `alloc` returned goes back
    through `free`, at the latest when the allocator closes. Several allocators may share one
    source. Its `repr` stands in error messages: keep it to a few words.

    `total_bytes`, `device` and `supports_coalescing` stay as they are once an allocator has been
    made on it; `asynchronous` may change.
    """

    #: What it has in all, in bytes: the default memory limit of an allocator.
    total_bytes: int
    #: Where its memory lies. The kind "cpu" says that the host can read and write it.
    device: Device = Device("simulated")
    #: Whether `free` may be given one range that spans several blocks which lie end to end. With it
    #: an allocator joins such blocks into one region. Memory that the driver frees block by block
    #: must say False.
    supports_coalescing: bool = False
    #: Whether work queued on a stream can be unfinished. False: an allocator never asks for a
    #: fence, or for an order.
    asynchronous: bool = False
    #: Whether memory may be used again while its last user's work is still queued on the
    #: allocator's stream: later work there runs after it. Not where the host is the user.
    stream_ordered: bool = True
    #: Another handle of stream 0, if there is one (CUDA: 1).
    default_stream_alias: int = 0
    #: Whether a stream is a handle that a driver gave, so that a number which stands for a stream
    #: elsewhere (in a trace) must not be passed for one.
    streams_are_handles: bool = False
    #: Every block of an allocator starts at a multiple of it, in bytes from the region's start: a
    #: power of two. An allocator rounds sizes up to it where it is above its own 256 or 512.
    granularity: int = 256
    #: The most that one `alloc` can ever give, in bytes; None: no such bound. For error messages.
    largest_block: int | None = None
    #: Whether there are streams whose work runs in any order, so that `is_ordered` must be asked.
    may_be_unordered: bool = False
    #: Handles that name another stream in each thread (CUDA: 2): no allocator can belong to one.
    thread_streams: frozenset[int] = frozenset()
    #: The calls that need no GIL, as a capsule (`bfc/native/source.h`), for PyTorch.
    native: object | None = None

    @abstractmethod
    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        """A block of at least `nbytes` (1 or more), as (address, bytes received), or None where
        there is no room for it.

        The address is above 0 and a multiple of `alignment` (256, or another power of two), and the
        block overlaps no other that is live and ends below 2**64. Its content may be anything. What
        is received beyond `nbytes` is used too, and counts towards the allocator's limit.

        None is the ordinary answer of a full device: an allocator then asks for less, or gives up.
        A MemoryError counts as None. Anything else that goes wrong is raised as SubAllocatorError;
        another exception reaches the caller inside one. Whatever it raises, it has kept nothing:
        nobody would know of that block.

        An allocator puts Python's signal handlers off while it calls `alloc`, `free` and
        `free_idle`, so no Ctrl-C interrupts them: it is raised when they have returned. Called by
        anybody else, they may be interrupted at any line.
        """

    @abstractmethod
    def free(self, address: int, nbytes: int) -> None:
        """Takes a block back: the address and the bytes received, as `alloc` returned them; where
        `supports_coalescing`, also a run of whole blocks. Never a part of a block.

        Raises SubAllocatorError for what is no live block, and changes nothing then; a source that
        cannot tell, as C's `free`, need not. After any
        exception the allocator takes the block for live and offers it again at its next
        `release_free_regions()` or `close()`.
        """

    def free_idle(self, address: int, nbytes: int) -> None:
        """As `free`, for a block that no queued work uses. A source whose `free` waits for the
        device need not wait here."""
        self.free(address, nbytes)

    def fence(self, stream: int) -> Fence | None:
        """A mark behind all that is queued on the stream now; None where nothing is.

        `stream` is a handle as users pass it, 0 the default stream. Asked for once a free, for each
        stream that was named for the block, and only while `asynchronous`.
        The fence may be asked and waited for from any thread, and again after it was done. What it
        raises is passed on, and the memory behind it stays in use.
        """
        return None

    def order(self, first: int, then: int) -> None:
        """Makes what is queued on the stream `then` from now on wait for what is queued on `first`
        now. Returns at once.

        Asked when memory goes from the stream `first` to another: from the allocator's own at an
        allocation, from a buffer's to a consumer's, and back to the allocator's at PyTorch's frees.
        """
        return

    def is_ordered(self, stream: int) -> bool:
        """Whether work on the stream runs in the order in which it was queued. Only asked where
        `may_be_unordered`, at each allocation on a stream other than 0."""
        return True

    def exchange_address(self, address: int) -> tuple[int, int]:
        """What DLPack calls `data` and `byte_offset` for an address inside a live block. Raises
        BufferError where it has no such name. Asked for kinds that have handles (OpenCL)."""
        return address, 0

    def stream_id(self, stream: int) -> int:
        """A number that no other stream has or will have. A driver may give the handle of a stream
        that was destroyed to a new one."""
        return stream

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copies between two addresses, of which at least one is this source's and the other may be
        the host's, behind what is queued on the stream. Done when it returns."""
        if self.device.kind != "cpu":
            raise SubAllocatorError(f"{self!r} cannot copy")
        if nbytes:  # C forbids even that much of NULL
            ctypes.memmove(destination, source, nbytes)

    @property
    def host_accessible(self) -> bool:
        """Whether the host can read and write its memory at the same addresses."""
        return self.device.kind in ("cpu", "cuda_host")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device now, for messages and statistics: 0 <= free <= total.
        Anything else becomes SubAllocatorError."""
        return self.total_bytes, self.total_bytes

    def allocation_limit(self) -> int:
        """The memory limit of an allocator that was given none, in bytes. Asked once, when the
        allocator is made; a device may answer with what is free on it now."""
        return self.total_bytes


def checked_memory_info(answer: object, sub_allocator: SubAllocator) -> tuple[int, int]:
    """What `memory_info` has answered, as (free, total). Raises SubAllocatorError where that cannot
    be."""
    try:
        free, total = (operator.index(number) for number in answer)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        free, total = -1, -1
    if not 0 <= free <= total < 2**64:
        raise SubAllocatorError(
            f"{sub_allocator!r}.memory_info() must return (bytes free, bytes in all), the first "
            f"from 0 to the second, not {answer!r}"
        )
    return free, total


def resolve_limit(
    memory_limit: SupportsIndex | str | float | None, sub_allocator: SubAllocator
) -> int:
    """A memory limit in bytes: None asks the sub-allocator, a float is a fraction of its total."""
    if memory_limit is None:
        return parse_bytes(sub_allocator.allocation_limit())
    if isinstance(memory_limit, float):
        if not 0 < memory_limit < math.inf:
            raise ValueError(f"memory_limit as a fraction must be above 0, not {memory_limit}")
        return parse_bytes(int(sub_allocator.total_bytes * memory_limit))
    return parse_bytes(memory_limit)
