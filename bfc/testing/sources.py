"""Sub-allocators for tests: one with every habit that a correct one may have, and one that
misbehaves as a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from bfc.devices import Availability, Fence
from bfc.errors import SubAllocatorError
from bfc.suballocators._books import MappingBooks
from bfc.suballocators.base import MAPPING_CALLS, SubAllocator
from bfc.suballocators.held_streams import HeldFence, HeldStreams
from bfc.suballocators.simulated import SimulatedSubAllocator


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


_ASK = object()
Order = Callable[..., Any]
#: What may be told to go wrong, by the name of the method.
FAULTY = (
    *("alloc", "free", "fence", "order", "wait", "copy", *MAPPING_CALLS),
    *("memory_info", "stream_id", "is_ordered", "check_stream"),
    *("capture_id", "capture_terminals", "capture_dependencies"),
)
#: Read from `inner` when it is wrapped.
_PLAIN = (
    *("total_bytes", "device", "supports_coalescing", "stream_ordered", "default_stream_alias"),
    *("streams_are_handles", "granularity", "largest_block", "may_be_unordered", "thread_streams"),
    "mapping_granularity",
)
#: Asked of `inner` each time.
_ASKED = ("asynchronous", "host_accessible", "supports_virtual_memory")


class Misbehaving(HeldStreams, SubAllocator):
    """A sub-allocator that follows a script: it refuses, lies, raises or waits where `on` says so.

    Whatever no order speaks of goes to `inner`, and so does each name that it does not have itself,
    such as the log `calls` of a simulated device.

    Parameters
    ----------
    inner : SubAllocator, int or str
        The sub-allocator that does the work. A capacity stands for a simulated device that has it.
    **says : object
        Attributes of a sub-allocator that are to differ from those of `inner`, such as
        ``asynchronous=True``.

    Attributes
    ----------
    inner : SubAllocator
        The sub-allocator that does the work.
    live : dict of int to int
        The bytes of each block that is handed out, by address.
    counts : dict of str to int
        How often each call was made, those that were refused or raised included.

    Raises
    ------
    TypeError
        If `says` has a name that sub-allocators do not have.

    Examples
    --------
    >>> source = Misbehaving("1 GiB")
    >>> source.on("alloc", 2, raises=OSError("unplugged"))
    >>> source.alloc(256, 4096)
    (1099511627776, 4096)
    >>> source.alloc(256, 4096)
    Traceback (most recent call last):
    OSError: unplugged
    >>> source.live, source.counts["alloc"]
    ({1099511627776: 4096}, 2)
    """

    def __init__(self, inner: SubAllocator | int | str, **says: object) -> None:
        HeldStreams.__init__(self)
        if isinstance(inner, int | str):
            inner = SimulatedSubAllocator(inner)
        self.inner = inner
        self.live: dict[int, int] = {}
        self.counts = dict.fromkeys(FAULTY, 0)
        unknown = says.keys() - {*_PLAIN, *_ASKED}
        if unknown:
            raise TypeError(f"no sub-allocator has the attribute {min(unknown)!r}")
        self._says = says
        for name in _PLAIN:
            setattr(self, name, says.get(name, getattr(inner, name)))
        self._lock = threading.Lock()
        self._books = MappingBooks(inner.mapping_granularity or 1)
        self._orders: dict[str, dict[int | None, Order]] = {call: {} for call in FAULTY}

    def __repr__(self) -> str:
        return f"Misbehaving({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    # -- the script -------------------------------------------------------------------------------

    def on(
        self,
        call: str,
        n: int | Iterable[int] | None = None,
        *,
        first: Callable[[], object] | None = None,
        instead: Callable[..., object] | None = None,
        raises: BaseException | type[BaseException] | None = None,
        returns: object = _ASK,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Say what happens at a call. What is given happens in the order of the parameters.

        A call that `instead`, `raises` or `returns` speak of does nothing to `inner`. A new order
        replaces an older one for the same calls.

        Parameters
        ----------
        call : str
            A method, such as "alloc", "free" (which is `free_idle`, too), "fence", "order", "wait",
            "copy", "create", "map" or "unmap".
        n : int or iterable of int, optional
            At which of the next calls: 1 is the next. By default at each for which no number was
            given, until `off`.
        first : function of (), optional
            Called before anything else.
        instead : function of (ask, \\*arguments), optional
            Called with the arguments of the call, and its result is the answer. ``ask`` is the call
            itself, which it may make with these arguments, with others, or not at all.
        raises : BaseException or a type of it, optional
            What is raised.
        returns : object, optional
            The answer. None is the ordinary answer of a device that has no memory left.
        then : function of (), optional
            Called once the call has returned, before its answer reaches the caller.

        Raises
        ------
        ValueError
            If `call` is not such a method, or a number is below 1.

        Examples
        --------
        >>> device = Misbehaving("1 GiB")
        >>> device.on("alloc", 1, returns=None)
        >>> device.on("alloc", instead=lambda ask, alignment, nbytes: ask(alignment, nbytes + 256))
        >>> device.alloc(256, 1024) is None
        True
        >>> device.alloc(256, 1024)
        (1099511627776, 1280)
        """
        numbers: list[int | None] = [n] if n is None or isinstance(n, int) else list(n)
        for number in numbers:
            if number is not None and number < 1:
                raise ValueError(f"calls are counted from 1, the next one, not {number}")

        def order(ask: Order, *arguments: Any) -> Any:
            if first is not None:
                first()
            if raises is not None:
                raise raises
            if instead is not None:
                answer = instead(ask, *arguments)
            else:
                answer = ask(*arguments) if returns is _ASK else returns
            if then is not None:
                then()
            return answer

        orders = self._orders_of(call)
        with self._lock:
            for number in numbers:
                orders[None if number is None else self.counts[call] + number] = order

    def off(self, call: str | None = None) -> None:
        """Cancel what was ordered.

        Parameters
        ----------
        call : str, optional
            For which method; by default for all.

        Raises
        ------
        ValueError
            If `call` is not a method that `on` knows.
        """
        for name in FAULTY if call is None else (call,):
            self._orders_of(name).clear()

    def _orders_of(self, call: str) -> dict[int | None, Order]:
        if call not in FAULTY:
            raise ValueError(f"call is one of {', '.join(map(repr, FAULTY))}, not {call!r}")
        return self._orders[call]

    def _follow(self, call: str, ask: Order, *arguments: Any) -> Any:
        orders = self._orders[call]
        with self._lock:
            self.counts[call] = count = self.counts[call] + 1
            order = orders.pop(count, None) or orders.get(None)
        return ask(*arguments) if order is None else order(ask, *arguments)

    # -- the source -------------------------------------------------------------------------------

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block: tuple[int, int] | None = self._follow("alloc", self._alloc, alignment, nbytes)
        return block

    def _alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block = self.inner.alloc(alignment, nbytes)
        if block is not None:
            with self._lock:
                self.live[block[0]] = block[1]
        return block

    def free(self, address: int, nbytes: int) -> None:
        self._follow("free", partial(self._free, self.inner.free), address, nbytes)

    def free_idle(self, address: int, nbytes: int) -> None:
        self._follow("free", partial(self._free, self.inner.free_idle), address, nbytes)

    def _free(self, free: Callable[[int, int], None], address: int, nbytes: int) -> None:
        free(address, nbytes)
        with self._lock:
            end = address + nbytes
            while address < end:
                address += self.live.pop(address, nbytes)

    @property
    def live_bytes(self) -> int:
        """The bytes of all blocks and pages that are handed out now."""
        with self._lock:
            return sum(self.live.values()) + self._books.page_bytes

    # -- memory that is mapped --------------------------------------------------------------------

    @property
    def supports_virtual_memory(self) -> Availability:  # type: ignore[override]
        """As `inner` says."""
        says: Any = self._says.get("supports_virtual_memory", self.inner.supports_virtual_memory)
        return says  # type: ignore[no-any-return]

    def reserve(self, nbytes: int) -> int | None:
        address: int | None = self._follow("reserve", self._reserve, nbytes)
        return address

    def _reserve(self, nbytes: int) -> int | None:
        address = self.inner.reserve(nbytes)
        if address is not None:
            with self._lock:
                self._books.reserved(address, nbytes)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._follow("unreserve", self._unreserve, address, nbytes)

    def _unreserve(self, address: int, nbytes: int) -> None:
        self.inner.unreserve(address, nbytes)
        with self._lock:
            self._books.unreserved(address)

    def create(self, nbytes: int) -> int | None:
        page: int | None = self._follow("create", self._create, nbytes)
        return page

    def _create(self, nbytes: int) -> int | None:
        page = self.inner.create(nbytes)
        if page is not None:
            with self._lock:
                self._books.created(page, nbytes)
        return page

    def release(self, page: int) -> None:
        self._follow("release", self._release, page)

    def _release(self, page: int) -> None:
        self.inner.release(page)
        with self._lock:
            self._books.released(self._books.check_release(page))

    def map(self, address: int, pages: Sequence[int]) -> None:
        self._follow("map", self._map, address, pages)

    def _map(self, address: int, pages: Sequence[int]) -> None:
        self.inner.map(address, pages)
        with self._lock:
            self._books.mapped(self._books.plan_map(address, pages))

    def set_access(self, address: int, nbytes: int) -> None:
        self._follow("set_access", self.inner.set_access, address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._follow("unmap", self._unmap, address, nbytes)

    def _unmap(self, address: int, nbytes: int) -> None:
        self.inner.unmap(address, nbytes)
        with self._lock:
            self._books.unmapped(self._books.find_run(address, nbytes, "unmap"))

    # -- streams ----------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        """True while a stream is held, or if `inner` is asynchronous."""
        return bool(self._says.get("asynchronous", self._held or self.inner.asynchronous))

    def fence(self, stream: int) -> Fence | None:
        fence: Fence | None = self._follow("fence", self._fence, stream)
        return fence

    def _fence(self, stream: int) -> Fence | None:
        below = self.inner.fence(stream) if self.inner.asynchronous else None
        return HeldFence(self, stream, below) if stream in self._held else below

    def wait(self, stream: int) -> None:
        self._follow("wait", self._wait, stream)

    def _wait(self, stream: int) -> None:
        self.inner.wait(stream)
        if stream in self._held:
            self.finish(stream)

    def order(self, first: int, then: int) -> None:
        self._follow("order", self.inner.order, first, then)

    def is_ordered(self, stream: int) -> bool:
        return bool(self._follow("is_ordered", self.inner.is_ordered, stream))

    def check_stream(self, stream: int) -> None:
        self._follow("check_stream", self.inner.check_stream, stream)

    def capture_id(self, stream: int) -> int:
        number: int = self._follow("capture_id", self.inner.capture_id, stream)
        return number

    def capture_terminals(self, stream: int) -> tuple[int, ...]:
        ask = self.inner.capture_terminals
        nodes: tuple[int, ...] = self._follow("capture_terminals", ask, stream)
        return nodes

    def capture_dependencies(self, node: int) -> tuple[int, ...]:
        ask = self.inner.capture_dependencies
        nodes: tuple[int, ...] = self._follow("capture_dependencies", ask, node)
        return nodes

    def exchange_address(self, address: int) -> tuple[int, int]:
        return self.inner.exchange_address(address)

    def stream_id(self, stream: int) -> int:
        number: int = self._follow("stream_id", self.inner.stream_id, stream)
        return number

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._follow("copy", self.inner.copy, destination, source, nbytes, stream)

    @property
    def host_accessible(self) -> bool:
        return bool(self._says.get("host_accessible", self.inner.host_accessible))

    def memory_info(self) -> tuple[int, int]:
        answer: tuple[int, int] = self._follow("memory_info", self.inner.memory_info)
        return answer

    def allocation_limit(self) -> int:
        return self.inner.allocation_limit()
