"""Sub-allocators for tests: one with every habit that a correct one may have, and one that
misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bfc.devices import Availability, Fence
from bfc.errors import SubAllocatorError
from bfc.suballocators.base import MAPPING_CALLS, SubAllocator
from bfc.suballocators.held_streams import HeldFence, HeldStreams
from bfc.suballocators.virtual import MappingBooks


def round_up(size: int, granule: int = 256) -> int:
    return -(-size // granule) * granule


class IntegerSource(SubAllocator):
    """A device of integers, with every habit that a correct sub-allocator may have, for one thread.

    Parameters
    ----------
    capacity : int, optional
        How many bytes can be live at once.
    max_bytes : int, optional
        Refuse any one call above this.
    gap : int, optional
        Bytes that are left out between two blocks.
    alignment : int, optional
        A power of two, in bytes, that addresses are rounded up to.
    supports_coalescing : bool, optional
        Accept a run of neighbouring blocks in `free`.
    granule : int, optional
        What a request is rounded up to, in bytes: an allocator then gets more than it asks for.
    reuses : bool, optional
        Hand freed addresses out again, the lowest first. Otherwise addresses rise.
    base : int, optional
        The first address.

    Attributes
    ----------
    calls : list of (str, int, int or None)
        The log, as that of `bfc.SimulatedSubAllocator`.
    live : dict of int to int
        The bytes of each live block, by address.

    Examples
    --------
    >>> source = IntegerSource(1 << 20, granule=4096)
    >>> source.alloc(256, 1000)
    (1099511627776, 4096)
    """

    def __init__(
        self,
        capacity: int = 1 << 50,
        *,
        max_bytes: int = 1 << 50,
        gap: int = 0,
        alignment: int = 256,
        supports_coalescing: bool = False,
        granule: int = 256,
        reuses: bool = False,
        base: int = 1 << 40,
    ) -> None:
        self.total_bytes = capacity
        self.max_bytes = max_bytes
        self.gap = gap
        self.alignment = alignment
        self.supports_coalescing = supports_coalescing
        self.granule = granule
        self.reuses = reuses
        self.calls: list[tuple[str, int, int | None]] = []
        self.live: dict[int, int] = {}
        self._fail_in = 0
        self._base = self._next = round_up(base, alignment)

    @property
    def live_bytes(self) -> int:
        """The bytes that are handed out now."""
        return sum(self.live.values())

    def fail_at(self, n: int) -> None:
        """Refuse one of the next allocations, however small it is.

        Parameters
        ----------
        n : int
            Which one: 1 is the next. 0 cancels it.
        """
        self._fail_in = n

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        self._fail_in -= 1
        received = round_up(nbytes, self.granule)
        fits = received <= self.max_bytes and self.live_bytes + received <= self.total_bytes
        address = self._place(received, alignment) if fits and self._fail_in != 0 else None
        self.calls.append(("alloc", nbytes, address))
        if address is None:
            return None
        self.live[address] = received
        return address, received

    def _place(self, received: int, alignment: int) -> int:
        step = max(alignment, self.alignment)
        if not self.reuses:
            address = round_up(self._next, step)
            self._next = address + received + self.gap
            return address
        address = round_up(self._base, step)
        for start in sorted(self.live):
            if start - address >= received + self.gap:
                break
            after = round_up(start + self.live[start] + self.gap, step)
            address = max(address, after)
        return address

    def free(self, address: int, nbytes: int) -> None:
        run = [address]
        while sum(self.live.get(start, 0) for start in run) < nbytes and run[-1] in self.live:
            run.append(run[-1] + self.live[run[-1]])
        held = sum(self.live.get(start, 0) for start in run)
        if not 0 < nbytes == held or (len(run) > 1 and not self.supports_coalescing):
            raise SubAllocatorError(f"free({address:#x}, {nbytes}) is not a live block")
        self.calls.append(("free", nbytes, address))
        for start in run:
            del self.live[start]


Fault = Callable[[], Any]
#: What may go wrong, by the name of the method.
FAULTY = ("alloc", "free", "fence", "wait", *MAPPING_CALLS)


class Misbehaving(HeldStreams, SubAllocator):
    """A sub-allocator that refuses, lies, raises or is slow when told to.

    It passes all other calls to `inner`. Calls are counted from 1, which is the next one.

    Parameters
    ----------
    inner : SubAllocator
        The sub-allocator that does the work.

    Attributes
    ----------
    inner : SubAllocator
        As given.
    live : dict of int to int
        The bytes of each block that is handed out, by address.
    seconds : float
        How long each call takes at least.

    Examples
    --------
    >>> import bfc
    >>> source = Misbehaving(bfc.SimulatedSubAllocator("1 GiB"))
    >>> source.raise_at(2, OSError("unplugged"))
    >>> source.alloc(256, 4096)
    (1099511627776, 4096)
    >>> source.alloc(256, 4096)
    Traceback (most recent call last):
    OSError: unplugged
    >>> source.live
    {1099511627776: 4096}
    """

    def __init__(self, inner: SubAllocator) -> None:
        HeldStreams.__init__(self)
        self.inner = inner
        self.total_bytes = inner.total_bytes
        self.device = inner.device
        self.supports_coalescing = inner.supports_coalescing
        self.stream_ordered = inner.stream_ordered
        self.default_stream_alias = inner.default_stream_alias
        self.streams_are_handles = inner.streams_are_handles
        self.granularity = inner.granularity
        self.largest_block = inner.largest_block
        self.may_be_unordered = inner.may_be_unordered
        self.thread_streams = inner.thread_streams
        self.live: dict[int, int] = {}
        self.seconds = 0.0
        self.mapping_granularity = inner.mapping_granularity
        self._lock = threading.Lock()
        self._books = MappingBooks(inner.mapping_granularity or 1)
        self._faults: dict[str, dict[int, Fault]] = {call: {} for call in FAULTY}
        self._counts = dict.fromkeys(FAULTY, 0)

    def __repr__(self) -> str:
        return f"Misbehaving({self.inner!r})"

    # -- what is to go wrong ----------------------------------------------------------------------

    def fail_at(self, n: int, call: str = "alloc") -> None:
        """Refuse one of the next allocations, however small it is, or another call.

        Parameters
        ----------
        n : int
            Which one: 1 is the next. 0 cancels every fault of the call.
        call : str, optional
            Which calls are counted: "alloc", "reserve" and "create" return None then, and all that
            `raise_at` knows raise a SubAllocatorError.

        Raises
        ------
        ValueError
            If `n` is negative, or `call` is not one of them.
        """
        if n == 0 and call in FAULTY:
            self._faults[call].clear()
        elif call in ("alloc", "reserve", "create"):
            self._order(call, n, lambda: None)
        else:
            self.raise_at(n, SubAllocatorError(f"{call} fails, as ordered"), call)

    def lie_at(self, n: int, answer: object) -> None:
        """Answer one of the next allocations with anything, without asking `inner`.

        Parameters
        ----------
        n : int
            Which one: 1 is the next.
        answer : object
            What `alloc` returns.

        Raises
        ------
        ValueError
            If `n` is below 1.
        """
        self._order("alloc", n, lambda: answer)

    def raise_at(self, n: int, error: BaseException, call: str = "alloc") -> None:
        """Raise an error from one of the next calls, which then does nothing.

        Parameters
        ----------
        n : int
            Which one: 1 is the next.
        error : BaseException
            What is raised.
        call : str, optional
            Which calls are counted: "alloc", "free", "fence", "wait", or a method of memory that is
            mapped: "reserve", "unreserve", "create", "release", "map", "set_access", "unmap".

        Raises
        ------
        ValueError
            If `call` is not one of these, or `n` is below 1.
        """
        if call not in FAULTY:
            raise ValueError(f"call is one of {', '.join(map(repr, FAULTY))}, not {call!r}")

        def fault() -> Any:
            raise error

        self._order(call, n, fault)

    def slow(self, seconds: float) -> None:
        """Make every alloc, free and fence slow.

        Parameters
        ----------
        seconds : float
            How long each takes at least.
        """
        self.seconds = seconds

    def _order(self, call: str, n: int, fault: Fault) -> None:
        if n < 1:
            raise ValueError(f"calls are counted from 1, the next one, not {n}")
        with self._lock:
            self._faults[call][self._counts[call] + n] = fault

    def _fault(self, call: str) -> Fault | None:
        if self.seconds:
            time.sleep(self.seconds)
        with self._lock:
            self._counts[call] += 1
            return self._faults[call].pop(self._counts[call], None)

    # -- the source -------------------------------------------------------------------------------

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        fault = self._fault("alloc")
        if fault is not None:
            answer: tuple[int, int] | None = fault()
            return answer
        block = self.inner.alloc(alignment, nbytes)
        if block is not None:
            with self._lock:
                self.live[block[0]] = block[1]
        return block

    def free(self, address: int, nbytes: int) -> None:
        self._free(self.inner.free, address, nbytes)

    def free_idle(self, address: int, nbytes: int) -> None:
        self._free(self.inner.free_idle, address, nbytes)

    def _free(self, free: Callable[[int, int], None], address: int, nbytes: int) -> None:
        self._raise("free")
        free(address, nbytes)
        with self._lock:
            end = address + nbytes
            while address < end:
                address += self.live.pop(address)

    @property
    def live_bytes(self) -> int:
        """The bytes of all blocks and pages that are handed out now."""
        with self._lock:
            return sum(self.live.values()) + self._books.page_bytes

    # -- memory that is mapped --------------------------------------------------------------------

    @property
    def supports_virtual_memory(self) -> Availability:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.supports_virtual_memory

    def reserve(self, nbytes: int) -> int | None:
        address = self._asked("reserve", self.inner.reserve, nbytes)
        if address is not None:
            with self._lock:
                self._books.reserved(address, nbytes)
        return address

    def _asked(self, call: str, ask: Callable[[int], int | None], nbytes: int) -> int | None:
        fault = self._fault(call)
        return ask(nbytes) if fault is None else fault()

    def unreserve(self, address: int, nbytes: int) -> None:
        self._raise("unreserve")
        self.inner.unreserve(address, nbytes)
        with self._lock:
            self._books.unreserved(address)

    def create(self, nbytes: int) -> int | None:
        page = self._asked("create", self.inner.create, nbytes)
        if page is not None:
            with self._lock:
                self._books.created(page, nbytes)
        return page

    def release(self, page: int) -> None:
        self._raise("release")
        self.inner.release(page)
        with self._lock:
            self._books.released(self._books.check_release(page))

    def map(self, address: int, pages: Sequence[int]) -> None:
        self._raise("map")
        self.inner.map(address, pages)
        with self._lock:
            self._books.mapped(self._books.plan_map(address, pages))

    def set_access(self, address: int, nbytes: int) -> None:
        self._raise("set_access")
        self.inner.set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._raise("unmap")
        self.inner.unmap(address, nbytes)
        with self._lock:
            self._books.unmapped(self._books.find_run(address, nbytes, "unmap"))

    def _raise(self, call: str) -> None:
        fault = self._fault(call)
        if fault is not None:
            fault()

    # -- streams ----------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        """True while a stream is held, or if `inner` is asynchronous."""
        return bool(self._held) or self.inner.asynchronous

    def fence(self, stream: int) -> Fence | None:
        self._raise("fence")
        below = self.inner.fence(stream) if self.inner.asynchronous else None
        return HeldFence(self, stream, below) if stream in self._held else below

    def wait(self, stream: int) -> None:
        self._raise("wait")
        self.inner.wait(stream)
        if stream in self._held:
            self.finish(stream)

    def order(self, first: int, then: int) -> None:
        self.inner.order(first, then)

    def is_ordered(self, stream: int) -> bool:
        return self.inner.is_ordered(stream)

    def exchange_address(self, address: int) -> tuple[int, int]:
        return self.inner.exchange_address(address)

    def stream_id(self, stream: int) -> int:
        return self.inner.stream_id(stream)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self.inner.copy(destination, source, nbytes, stream)

    @property
    def host_accessible(self) -> bool:
        return self.inner.host_accessible

    def memory_info(self) -> tuple[int, int]:
        return self.inner.memory_info()

    def allocation_limit(self) -> int:
        return self.inner.allocation_limit()
