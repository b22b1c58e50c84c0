"""The contract between an allocator and the source of its regions.

A sub-allocator is plain Python. It is called once for each region, not for each allocation, so
clarity is worth more than speed. An outside package can write one: subclass `SubAllocator`, set
`total_bytes`, implement `alloc` and `free`, and run `bfc.testing.SubAllocatorContract` on it.
"""

from __future__ import annotations

import ctypes
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn, SupportsIndex

from bfc.devices import Availability, Device, Fence
from bfc.errors import SubAllocatorError
from bfc.suballocators._native_mapping import NativeMapping
from bfc.units import parse_bytes


class SubAllocator(ABC):
    """Where an allocator takes its memory from: the base class of all sub-allocators.

    A subclass sets `total_bytes`, and implements `alloc` and `free`; all else has a default.

    Attributes
    ----------
    total_bytes : int
        All the bytes that it has: the default memory limit of an allocator.
    device : Device
        Where its memory lies. Memory of the kind "cpu" can be read and written by the host.
    supports_coalescing : bool
        True if `free` accepts one range that spans several blocks which lie end to end. An
        allocator then joins such blocks into one region. It must be False if the driver frees block
        by block.
    asynchronous : bool
        True if work queued on a stream may be unfinished. If False, an allocator never asks for a
        fence or an order.
    stream_ordered : bool
        True if memory freed on the allocator's stream can be reused at once, because later work on
        that stream runs after it. False for host memory.
    default_stream_alias : int
        Another handle of stream 0, if there is one (CUDA: 1).
    streams_are_handles : bool
        True if the driver expects handles of its own as streams, so that the number of a stream in
        a trace must not be passed to it.
    granularity : int
        A power of two, in bytes. Chunks start at multiples of it, counted from the start of their
        region; an allocator rounds sizes up to it if it is above the allocator's own 256 or 512.
    largest_block : int or None
        The most bytes that one `alloc` can ever give; None if there is no such bound. Used in error
        messages.
    may_be_unordered : bool
        True if there are streams whose work runs in any order, so that `is_ordered` must be asked.
    thread_streams : frozenset of int
        Handles that name a different stream in each thread (CUDA: 2). An allocator cannot belong to
        one of these.
    native : capsule or None
        The functions that need no GIL (`bfc/native/source.h`), for PyTorch. They pass over what a
        subclass does in `alloc`, `free` or `order`, so that a `MemPool` refuses such a one, and for
        memory of graphs that PyTorch captures under `replace`; if it overrides `fence`, its fences
        are made and asked, with the GIL.
    supports_virtual_memory : Availability
        True if the sub-allocator has `reserve`, `create`, `map` and the rest, with which an
        allocator backs addresses with memory piece by piece. Printed, it says why not.
    native_mapping : capsule or None
        The functions of `bfc_mapping.h` in `bfc.get_include()`: the seven methods that map memory,
        in C. With these the methods need not be defined, and an allocator calls no Python to map.
        It does call the methods where a subclass defines one of them.
    mapping_granularity : int
        Reserved sizes, page sizes and mapped addresses must be multiples of this, in bytes (2 MiB
        on CUDA); 0 if `supports_virtual_memory` is False.

    Notes
    -----
    An allocator calls it without holding a lock, from any thread (including the one in which a
    buffer is finalised), and possibly from several at once. Every block that `alloc` returned is
    given to `free`, at the latest when the allocator closes. Several allocators may share one
    sub-allocator.

    Once an allocator has been made on it, `total_bytes`, `device` and `supports_coalescing` must
    not change; `asynchronous` may. Its `repr` appears in error messages: keep it to a few words.
    """

    total_bytes: int
    device: Device = Device("simulated")
    supports_coalescing: bool = False
    asynchronous: bool = False
    stream_ordered: bool = True
    default_stream_alias: int = 0
    streams_are_handles: bool = False
    granularity: int = 256
    largest_block: int | None = None
    may_be_unordered: bool = False
    thread_streams: frozenset[int] = frozenset()
    native: object | None = None
    #: Whether the events of `native` stand for what `fence` returns.
    _fences_are_native: bool = False
    supports_virtual_memory: Availability = Availability(
        False, "this sub-allocator gives whole blocks: it has no reserve, create and map"
    )
    mapping_granularity: int = 0
    native_mapping: object | None = None
    _made_calls: NativeMapping | None = None

    @abstractmethod
    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        """Give a block of at least `nbytes` bytes, or None if there is no room for it.

        Parameters
        ----------
        alignment : int
            A power of two, at least 256. The address must be a multiple of it.
        nbytes : int
            The size in bytes, at least 1.

        Returns
        -------
        tuple of (int, int), or None
            The address, and the bytes received. The block lies above 0 and below 2**64, and
            overlaps no other that is live; its content may be anything. Bytes beyond `nbytes` are
            used too, and count towards the allocator's limit. None is the ordinary answer of a full
            device: the allocator then asks for less, or gives up. A MemoryError counts as None.

        Raises
        ------
        SubAllocatorError
            If anything else goes wrong; other exceptions reach the user inside one. The block must
            have been released then: nobody else could do it.

        Notes
        -----
        An allocator defers Python's signal handlers while it calls `alloc`, `free` and `free_idle`:
        a Ctrl-C is raised when they have returned. Other callers may be interrupted at any line.
        """

    @abstractmethod
    def free(self, address: int, nbytes: int) -> None:
        """Take a block back.

        Parameters
        ----------
        address : int
            As `alloc` returned it.
        nbytes : int
            The bytes received, as `alloc` returned them. With `supports_coalescing`, a range may be
            a run of several whole blocks; it is never a part of one.

        Raises
        ------
        SubAllocatorError
            If that is not a live block. Nothing changes then. A sub-allocator that cannot tell
            (such as one over C's `free`) need not raise it.

        Notes
        -----
        After an exception the allocator assumes that the block is still live, and offers it again
        at its next `release_free_regions()` or `close()`.
        """

    def free_idle(self, address: int, nbytes: int) -> None:
        """Take back a block that no queued work uses, so that there is nothing to wait for.

        Parameters
        ----------
        address : int
            As in `free`.
        nbytes : int
            As in `free`.
        """
        self.free(address, nbytes)

    def fence(self, stream: int) -> Fence | None:
        """Mark the end of what is queued on a stream now.

        Parameters
        ----------
        stream : int
            A handle as users pass it; 0 is the default stream.

        Returns
        -------
        Fence or None
            None if nothing is queued. Any thread may query the fence or wait for it, even again
            after it was done. Its exceptions are passed on, and the memory that waits for it stays
            in use.

        Notes
        -----
        Called at a free, once for each stream that was recorded for the block, and only if
        `asynchronous`.
        """
        return None

    def order(self, first: int, then: int) -> None:
        """Make later work on one stream wait for what is queued on another now. Returns at once.

        Parameters
        ----------
        first : int
            The stream whose work comes first.
        then : int
            The stream that waits.

        Notes
        -----
        Called when memory passes from the stream `first` to another: from the allocator's own to
        that of an allocation, from a buffer's to a consumer's, and back to the allocator's when
        PyTorch frees.
        """
        return

    def wait(self, stream: int) -> None:
        """Wait until all that is queued on a stream now has finished.

        Parameters
        ----------
        stream : int
            A handle as users pass it; 0 is the default stream of its own device, whichever
            device is current.

        Raises
        ------
        SubAllocatorError
            If the wait fails, or is not possible, as on a stream that is being captured.

        Notes
        -----
        Called before `unmap`, which need not wait for queued work. By default it waits for the
        stream's `fence`.
        """
        fence = self.fence(stream) if self.asynchronous else None
        if fence is not None:
            fence.wait()

    def is_ordered(self, stream: int) -> bool:
        """Whether work on a stream runs in the order in which it was queued.

        Parameters
        ----------
        stream : int
            A handle other than 0.

        Returns
        -------
        bool
            Only asked if `may_be_unordered`, at each allocation for such a stream.
        """
        return True

    def exchange_address(self, address: int) -> tuple[int, int]:
        """What DLPack calls `data` and `byte_offset` for an address inside a live block.

        Parameters
        ----------
        address : int
            Any address of the block.

        Returns
        -------
        tuple of (int, int)
            `data` and `byte_offset`. Only asked for memory that has handles (OpenCL).

        Raises
        ------
        BufferError
            If the memory has no such handle.
        """
        return address, 0

    def stream_id(self, stream: int) -> int:
        """A number that no other stream has or will have.

        Parameters
        ----------
        stream : int
            A handle. A driver may give the handle of a destroyed stream to a new one.

        Returns
        -------
        int
            Unlike the handle, unique.
        """
        return stream

    def check_stream(self, stream: int) -> None:
        """Raise an error for a stream that this memory cannot be used on.

        Parameters
        ----------
        stream : int
            A handle.

        Raises
        ------
        ValueError
            If the stream belongs to another device.

        Notes
        -----
        Called when a capture of a graph begins.
        """
        return

    def capture_id(self, stream: int) -> int:
        """Which capture of a graph a stream belongs to.

        Parameters
        ----------
        stream : int
            A handle.

        Returns
        -------
        int
            The capture's number, the same for all streams of it; 0 if the stream does not capture.

        Notes
        -----
        Asked only while a capture is marked: see `Allocator.capture`.
        """
        return 0

    def capture_terminals(self, stream: int) -> tuple[int, ...]:
        """The nodes of the graph that the next work of a capturing stream will depend on.

        Parameters
        ----------
        stream : int
            The handle of a stream that captures.

        Returns
        -------
        tuple of int
            The nodes' handles.
        """
        return ()

    def capture_dependencies(self, node: int) -> tuple[int, ...]:
        """The nodes that a node of a graph depends on directly.

        Parameters
        ----------
        node : int
            Its handle.

        Returns
        -------
        tuple of int
            The handles of those nodes.
        """
        return ()

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes, after what is queued on a stream, and wait until that is done.

        Parameters
        ----------
        destination : int
            An address.
        source : int
            An address. One of the two, or both, are this sub-allocator's; the other may be the
            host's.
        nbytes : int
            How many bytes.
        stream : int
            A handle.

        Raises
        ------
        SubAllocatorError
            If this sub-allocator cannot copy.
        """
        if self.device.kind != "cpu":
            raise SubAllocatorError(f"{self!r} cannot copy")
        if nbytes:  # C does not allow a NULL pointer even for 0 bytes
            ctypes.memmove(destination, source, nbytes)

    # -- memory that is mapped --------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int | None:
        """Reserve addresses, with no memory behind them.

        Parameters
        ----------
        nbytes : int
            A multiple of `mapping_granularity`.

        Returns
        -------
        int or None
            The first address, a multiple of `mapping_granularity`; None if there are not so many
            addresses left. That is not a lack of memory.

        Raises
        ------
        SubAllocatorError
            If anything else goes wrong. Nothing is reserved then.
        """
        return self._calls().reserve(nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back: all of a reservation, with nothing mapped in it.

        Parameters
        ----------
        address : int
            As `reserve` returned it.
        nbytes : int
            As it was passed to `reserve`.

        Raises
        ------
        SubAllocatorError
            If that is not a whole reservation, memory is mapped in it, or the driver fails. The
            addresses stay reserved then.
        """
        self._calls().unreserve(address, nbytes)

    def create(self, nbytes: int) -> int | None:
        """Make a page: a piece of memory that has no address yet.

        Parameters
        ----------
        nbytes : int
            A multiple of `mapping_granularity`.

        Returns
        -------
        int or None
            A number that identifies the page until it is released; None if there is no memory for
            it.

        Raises
        ------
        SubAllocatorError
            If anything else goes wrong. No memory is taken then.
        """
        return self._calls().create(nbytes)

    def release(self, page: int) -> None:
        """Give a page up. Its memory is freed once the page is also mapped nowhere.

        Parameters
        ----------
        page : int
            As `create` returned it. The number means nothing afterwards.

        Raises
        ------
        SubAllocatorError
            If there is no such page, it was released before, or the driver fails. It still belongs
            to the caller then.
        """
        self._calls().release(page)

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Map pages to reserved addresses, end to end. They cannot be used before `set_access`.

        Parameters
        ----------
        address : int
            Where the first page begins: inside a reservation, at a multiple of
            `mapping_granularity`, with nothing mapped there.
        pages : sequence of int
            As `create` returned them. A page may be mapped at several addresses at once: what is
            written through one is read through another when the writing work has finished.

        Raises
        ------
        SubAllocatorError
            If a page or the addresses are not as described, or the driver fails. The pages that
            were mapped by this call are unmapped again. Where that fails too, the error's `lost`
            has the addresses that are still mapped.
        """
        self._calls().map(address, pages)

    def set_access(self, address: int, nbytes: int) -> None:
        """Let the device, and its peers if it has any, read and write mapped addresses.

        Parameters
        ----------
        address : int
            Where a mapped page begins.
        nbytes : int
            The bytes of one or more pages that are mapped there end to end.

        Raises
        ------
        SubAllocatorError
            If these are not whole pages that are mapped, or the driver fails. No access was given
            then.
        """
        self._calls().set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the pages at these addresses. The addresses stay reserved.

        Parameters
        ----------
        address : int
            Where a mapped page begins.
        nbytes : int
            The bytes of one or more pages that are mapped there end to end, also by several calls
            of `map`.

        Raises
        ------
        SubAllocatorError
            If these are not whole pages that are mapped, or the driver fails. All of them are still
            mapped then.

        Notes
        -----
        It does not wait for work that uses the addresses: call `wait` for its streams first.
        """
        self._calls().unmap(address, nbytes)

    def _calls(self) -> NativeMapping:
        """The functions of `native_mapping`, as methods."""
        if self._made_calls is None:
            table = self.native_mapping
            if table is None:
                self._refuse_to_map()
            self._made_calls = NativeMapping(table, type(self).__name__)
        return self._made_calls

    def _refuse_to_map(self) -> NoReturn:
        raise SubAllocatorError(f"{self!r} cannot map memory: {self.supports_virtual_memory}")

    @property
    def host_accessible(self) -> bool:
        """True if the host can read and write its memory at the same addresses."""
        return self.device.kind in ("cpu", "cuda_host")

    def memory_info(self) -> tuple[int, int]:
        """How much memory the device has now.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes, with 0 <= free <= total. For messages and statistics.
        """
        return self.total_bytes, self.total_bytes

    def allocation_limit(self) -> int:
        """The memory limit of an allocator that was made without one.

        Returns
        -------
        int
            In bytes. Called once, when the allocator is made. It may be the memory that is free on
            the device then.
        """
        return self.total_bytes


#: What a sub-allocator that maps memory must define itself, unless it has `native_mapping`.
MAPPING_CALLS = ("reserve", "unreserve", "create", "release", "map", "set_access", "unmap")


def native_calls(sub_allocator: SubAllocator) -> NativeMapping | None:
    """The C functions of a sub-allocator that stand in for its methods that map memory.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Which one.

    Returns
    -------
    NativeMapping or None
        None if it has no such functions, or if a subclass has a method of its own, which is to be
        called.
    """
    for call in MAPPING_CALLS:
        if getattr(getattr(sub_allocator, call), "__func__", None) is not getattr(
            SubAllocator, call
        ):
            return None
    if sub_allocator._made_calls is None and sub_allocator.native_mapping is None:
        return None
    return sub_allocator._calls()


def check_members(sub_allocator: SubAllocator) -> None:
    """Refuses a sub-allocator that lacks what an allocator asks it for later, perhaps much later: a
    TypeError says which member is missing or is something else, and what it must be. No driver is
    asked."""
    name = type(sub_allocator).__name__

    def check(member: str, what: str, is_right: Callable[[Any], bool]) -> None:
        if not hasattr(sub_allocator, member):
            raise TypeError(
                f"{name} has no {member}: set it in the class or in __init__, to {what}"
            )
        value = getattr(sub_allocator, member)
        if not is_right(value):
            raise TypeError(f"{name}.{member} must be {what}, not {value!r}")

    check("total_bytes", "all the bytes that it has, as an int", is_count)
    check("device", "a bfc.Device", lambda it: isinstance(it, Device))
    check(
        "largest_block",
        "the most bytes of one alloc, as an int above 0, or None",
        lambda it: it is None or (is_count(it) and it > 0),
    )
    check("default_stream_alias", "the handle of a stream, as an int", is_count)
    check(
        "thread_streams",
        "a frozenset of handles of streams",
        lambda it: isinstance(it, Set) and all(map(is_count, it)),
    )


def check_mapping_members(sub_allocator: SubAllocator) -> None:
    """Refuses a sub-allocator that says it maps memory and lacks what that takes: a method, or a
    `mapping_granularity` that is a power of two. Raises TypeError or ValueError."""
    name = type(sub_allocator).__name__
    for call in MAPPING_CALLS:
        found = getattr(sub_allocator, call)
        if (
            getattr(found, "__func__", None) is getattr(SubAllocator, call)
            and sub_allocator.native_mapping is None
        ):
            raise TypeError(
                f"{name} says that it supports_virtual_memory, and does not define {call}(): it "
                f"needs {', '.join(MAPPING_CALLS)}"
            )
    granularity = sub_allocator.mapping_granularity
    if not is_count(granularity):
        raise TypeError(f"{name}.mapping_granularity must be a power of two, not {granularity!r}")
    if granularity < 1 or granularity & (granularity - 1):
        raise ValueError(f"{name}.mapping_granularity must be a power of two, not {granularity!r}")


def is_count(value: object) -> bool:
    """Whether a value is an int from 0 up to what 63 bits hold. Integers of NumPy are such, too;
    True and False are not."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return False
    return 0 <= operator.index(value) < 2**63


def checked_memory_info(answer: object, sub_allocator: SubAllocator) -> tuple[int, int]:
    """The free and total bytes that `memory_info` returned. Raises SubAllocatorError if that is not
    such a pair."""
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
    """A memory limit in bytes. None asks the sub-allocator; a float is a fraction of its total.

    Raises ValueError if a fraction is not above 0, or a size is malformed, 0, negative or too
    large; TypeError if it is neither a number, nor a text, nor None.
    """
    if memory_limit is None:
        return parse_bytes(sub_allocator.allocation_limit())
    if isinstance(memory_limit, float):
        if not 0 < memory_limit < math.inf:
            raise ValueError(f"memory_limit as a fraction must be above 0, not {memory_limit}")
        nbytes = parse_bytes(int(sub_allocator.total_bytes * memory_limit))
    else:
        nbytes = parse_bytes(memory_limit)
    if not nbytes:
        raise ValueError(
            f"memory_limit={memory_limit!r} is a limit of 0 bytes, under which nothing can be "
            "allocated: leave it out for the default"
        )
    return nbytes
