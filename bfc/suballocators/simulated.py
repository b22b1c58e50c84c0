"""A GPU made of integers: addresses that nobody touches, for tests, replays and a laptop."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Literal, SupportsIndex

from bfc.devices import Availability, Device
from bfc.errors import SubAllocatorError
from bfc.interpreter._process import ForkSafeLock
from bfc.suballocators._books import MappingBooks, Run, still_mapped
from bfc.suballocators.base import SubAllocator
from bfc.suballocators.held_streams import HeldFence, HeldStreams
from bfc.suballocators.simulated_captures import SimulatedCaptures
from bfc.units import format_bytes, parse_bytes

Call = Literal[
    "alloc", "free", "reserve", "unreserve", "create", "release", "map", "access", "unmap", "wait"
]
CALLS: tuple[Call, ...] = Call.__args__  # type: ignore[attr-defined]
#: The calls that return None to refuse.
ANSWERS_NONE = ("alloc", "reserve", "create")

GRANULARITY = 2 << 20
#: How many bytes of addresses can be reserved at once: what an x86-64 process has.
ADDRESS_SPACE = 1 << 47
#: CUDA's driver takes addresses in multiples of so many bytes, from the highest down: what `chunk`
#: and `base` are to be for addresses like those of a GPU under Linux.
CUDA_CHUNK, CUDA_HIGHEST = 32 << 20, 1 << 47
#: In how many places chunks lie where a seed picks among them.
PLACES = 3
#: Where the addresses of blocks continue when they have reached the reserved addresses.
FAR = 1 << 62


class Orders:
    """Which of the next calls of one kind are to fail, and with what."""

    def __init__(self, numbers: set[int], error: SubAllocatorError | None) -> None:
        self.numbers = numbers
        self.error = error
        self.seen = 0


class SimulatedSubAllocator(HeldStreams, SubAllocator):
    """A GPU made of integers: addresses, and no memory behind them.

    The addresses rise and none is used twice, so that a failure shows where a block came from. With
    `reuse` freed addresses are handed out again, as GPU drivers do, and with `chunk` they fall, as
    on GPUs under Linux. An allocator whose placement depends on the addresses of its blocks shows
    that only there.

    Parameters
    ----------
    capacity : int or str
        How many bytes can be live at once, as a number or a string such as "4 GiB".
    base : int, optional
        The first address.
    alignment : int, optional
        A power of two, in bytes. Addresses are rounded up to multiples of it.
    gap : int, optional
        Bytes that are left out between two blocks.
    supports_coalescing : bool, optional
        Accept a run of neighbouring blocks in `free`.
    max_bytes : int or str, optional
        Refuse any single request above this.
    reserve_base : int, optional
        Where reserved addresses begin: a multiple of 2 MiB above 0. Reservations follow from there
        end to end. Neighbours are not joined.
    reuse : bool, optional
        Hand freed addresses out again: each block, and each reservation, gets the lowest addresses
        that are free and long enough. A call then takes time in proportion to what is live.
    chunk : int or str, optional
        Take addresses in chunks of multiples of so many bytes, each below the last one, the first
        below `base`. Blocks get the lowest addresses that are free in a chunk, freed ones as well;
        a block that fits nowhere gets a chunk. CUDA's driver does so with 32 MiB: see
        `bfc_tools.predicting.memory`. A call then takes time in proportion to what is live.
    seed : int, optional
        With `chunk`: each new chunk lies in one of three places, `base` apart, that a generator
        with this seed picks. The addresses of a real process lie so, between its libraries.

    Attributes
    ----------
    calls : list of (str, int, int or None)
        The log, in order, refusals included. An entry is one driver call: its kind, the bytes, and
        the address. In place of the address "create" and "release" have the page, and "wait" has
        the stream; it is None for a refusal. The kinds are "alloc", "free", "reserve",
        "unreserve", "create", "release", "map" (one for each page), "access" (`set_access`),
        "unmap" and "wait". Calls that break the contract are not in it.
    live : dict of int to int
        The bytes of each live block, by address.
    captures : SimulatedCaptures
        Which streams capture a graph: `begin(stream)`, `work(stream)`, `wait(stream, on)` and
        `end(stream)` steer it.

    Raises
    ------
    ValueError
        If an argument is negative, `alignment` is not a power of two, `reserve_base` is not a
        multiple of 2 MiB, `chunk` is not a multiple of `alignment` or needs a higher `base`, or
        `seed` is given without `chunk`.

    Examples
    --------
    >>> device = SimulatedSubAllocator("1 GiB")
    >>> device.alloc(256, 4096), device.alloc(256, 2 << 30)
    ((1099511627776, 4096), None)
    >>> device.calls
    [('alloc', 4096, 1099511627776), ('alloc', 2147483648, None)]

    The addresses of a freed block, again:

    >>> device = SimulatedSubAllocator("1 GiB", reuse=True)
    >>> first, second = device.alloc(256, 8 << 20), device.alloc(256, 4 << 20)
    >>> device.free(*first)
    >>> device.alloc(256, 2 << 20) == (first[0], 2 << 20)
    True

    Addresses that fall, chunk by chunk; what is left of a chunk is used first:

    >>> device = SimulatedSubAllocator("1 GiB", base=1 << 40, chunk="32 MiB")
    >>> blocks = [device.alloc(256, size << 20) for size in (20, 20, 2)]
    >>> [((1 << 40) - address) >> 20 for address, _ in blocks]
    [32, 64, 44]

    Addresses, and a page behind them:

    >>> device = SimulatedSubAllocator("1 GiB")
    >>> address, page = device.reserve(20 << 20), device.create(2 << 20)
    >>> device.map(address, [page])
    >>> device.set_access(address, 2 << 20)
    >>> device.calls[2:]
    [('map', 2097152, 17592186044416), ('access', 2097152, 17592186044416)]
    """

    device = Device("simulated")
    supports_virtual_memory = Availability(True, "a simulated device maps memory")
    mapping_granularity = GRANULARITY

    def __init__(
        self,
        capacity: SupportsIndex | str,
        *,
        base: int = 1 << 40,
        alignment: int = 2 << 20,
        gap: int = 0,
        supports_coalescing: bool = False,
        max_bytes: SupportsIndex | str | None = None,
        reserve_base: int = 1 << 44,
        reuse: bool = False,
        chunk: SupportsIndex | str = 0,
        seed: int | None = None,
    ) -> None:
        self.total_bytes = parse_bytes(capacity)
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes)
        if base < 0 or gap < 0 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("base and gap are at least 0, and alignment is a power of two")
        if reserve_base < GRANULARITY or reserve_base % GRANULARITY:
            raise ValueError("reserve_base is at least 2 MiB, and a multiple of it")
        self.alignment = alignment
        self.gap = gap
        self.supports_coalescing = supports_coalescing
        self.reuse = reuse
        self.chunk = parse_bytes(chunk)
        if self.chunk % alignment:
            raise ValueError("chunk is a multiple of alignment")
        if self.chunk and base < 2 * self.total_bytes:
            raise ValueError("with chunk, addresses fall: base is at least twice the capacity")
        if seed is not None and not self.chunk:
            raise ValueError("seed says where chunks lie: it needs chunk")
        HeldStreams.__init__(self)
        self.calls: list[tuple[str, int, int | None]] = []
        self.live: dict[int, int] = {}
        self._block_bytes = 0
        self._lock = ForkSafeLock()
        self._next = base
        self._random = random.Random(seed)
        # Where chunks are taken, from the end down: first and last address.
        self._places = [(base * n, base * n) for n in range(1, 2 if seed is None else PLACES + 1)]
        self._areas: tuple[tuple[int, int], ...] = (
            (base, 0),
        )  # of blocks; the last one has no end yet
        self._books = MappingBooks(GRANULARITY)
        #: From the first address that was reserved up to where the next ones go.
        self._reserved = reserve_base, reserve_base
        self._pages_made = 0
        self._orders: dict[str, Orders] = {}
        self.captures = SimulatedCaptures()

    @property
    def live_bytes(self) -> int:
        """The bytes of all blocks and pages that are live.

        A page is live until it is released and mapped nowhere.
        """
        return self._block_bytes + self._books.page_bytes

    def __repr__(self) -> str:
        total, live = format_bytes(self.total_bytes), format_bytes(self.live_bytes)
        return f"SimulatedSubAllocator({total}, {live} live)"

    def capture_id(self, stream: int) -> int:
        return self.captures.id_of(stream)

    def capture_terminals(self, stream: int) -> tuple[int, ...]:
        return self.captures.terminals(stream)

    def capture_dependencies(self, node: int) -> tuple[int, ...]:
        return self.captures.dependencies(node)

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block = None
        try:
            with self._lock:
                if self._refuses("alloc", nbytes):
                    self.calls.append(("alloc", nbytes, None))
                else:
                    block = self._take(alignment, nbytes)
            return block
        except BaseException:
            if block is not None:
                SimulatedSubAllocator.free(self, *block)
            raise

    def _take(self, alignment: int, nbytes: int) -> tuple[int, int]:
        address = -1
        before = self._areas, self._next, self._block_bytes, self._places.copy()
        try:
            address = self._place(max(alignment, self.alignment), nbytes)
            return self._note(address, nbytes)
        except BaseException:
            self.live.pop(address, None)
            self._areas, self._next, self._block_bytes, self._places = before
            raise

    def _place(self, step: int, nbytes: int) -> int:
        if self.chunk:
            return self._in_chunk(step, nbytes + self.gap)
        if self.reuse:
            return self._first_gap(self._areas[0][0], step, nbytes + self.gap)
        address = (self._next + step - 1) // step * step
        if self._is_reserved(address, nbytes):  # blocks continue after all reservations
            address = (max(FAR, self._reserved[1]) + step - 1) // step * step
            self._areas = (*self._areas[:-1], (self._areas[-1][0], self._next), (address, 0))
        return address

    def _in_chunk(self, step: int, nbytes: int) -> int:
        """The lowest free addresses of all chunks, or of a new one below those of a place."""
        for floor, end in self._places:
            address = self._first_gap(floor, step, nbytes)
            if address + nbytes <= end:
                return address
        at = self._random.randrange(len(self._places))
        floor, end = self._places[at]
        size = math.lcm(self.chunk, step)
        while (address := self._first_gap(floor, step, nbytes)) + nbytes > end:
            end = floor
            floor = (floor - nbytes) // size * size
        self._places[at] = floor, self._places[at][1]
        return address

    def _first_gap(self, first: int, step: int, nbytes: int) -> int:
        """The lowest multiple of `step`, from `first` on, with free addresses behind it."""
        taken = [(start, start + size + self.gap) for start, size in self.live.items()]
        taken += [(start, start + size) for start, size in self._books.reservations.items()]
        taken.sort()
        address = (first + step - 1) // step * step
        for start, end in taken:
            if address + nbytes <= start:
                break
            address = max(address, (end + step - 1) // step * step)
        return address

    def _note(self, address: int, nbytes: int) -> tuple[int, int]:
        self.live[address] = nbytes
        self._block_bytes += nbytes
        self._next = address + nbytes + self.gap
        block = address, nbytes
        self.calls.append(("alloc", nbytes, address))
        return block

    def _is_reserved(self, address: int, nbytes: int) -> bool:
        """Whether addresses overlap any that are, or were, reserved."""
        first, end = self._reserved
        return first < end and address < end and address + nbytes > first

    def _refuses(self, kind: Call, nbytes: int) -> bool:
        """Whether there is no memory for a block or a page, or `fail_at` has ordered a refusal."""
        if self._orders and self._fails(kind, nbytes):
            return True
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return True
        return self.live_bytes + nbytes > self.total_bytes

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            blocks = self._run_of_blocks(address, nbytes)
            left = self._block_bytes - nbytes
            self._call("free", nbytes, address)
            for block in blocks:
                del self.live[block]
            self._block_bytes = left

    def _fails(self, kind: Call, nbytes: int) -> bool:
        """Whether a call must return None. If it must fail in another way, logs it and raises."""
        orders = self._orders.get(kind)
        if orders is None:
            return False
        orders.seen += 1
        if orders.seen not in orders.numbers:
            return False
        orders.numbers.remove(orders.seen)
        if not orders.numbers:
            del self._orders[kind]
        if orders.error is None and kind in ANSWERS_NONE:
            return True
        self.calls.append((kind, nbytes, None))
        error = orders.error or SubAllocatorError(f"{kind} of {nbytes} bytes fails, as ordered")
        raised = copy(error)
        # Dask teaches exceptions a way of copying that shares their attributes, and a failed `map`
        # writes into its error what stayed mapped: the next failure would report that, too.
        raised.__dict__ = dict(vars(error))
        raise raised

    def _call(self, kind: Call, nbytes: int, place: int) -> None:
        """Log a call, or raise the error that `fail_at` has ordered."""
        if self._orders:
            self._fails(kind, nbytes)
        self.calls.append((kind, nbytes, place))

    def _run_of_blocks(self, address: int, nbytes: int) -> list[int]:
        """The blocks, end to end, that a range consists of."""
        start, left = address, nbytes
        blocks = []
        while left > 0 and start in self.live and (start == address or self.supports_coalescing):
            blocks.append(start)
            left -= self.live[start]
            start += self.live[start]
        if left or not blocks:
            raise SubAllocatorError(
                f"free({address:#x}, {nbytes}) is not a live block, or a run of live blocks"
            )
        return blocks

    def memory_info(self) -> tuple[int, int]:
        """How much memory is left.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes.
        """
        return max(0, self.total_bytes - self.live_bytes), self.total_bytes

    # -- memory that is mapped --------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int | None:
        address = None
        try:
            with self._lock:
                self._books.check_size(nbytes, "reserve")
                address = self._reserve(nbytes)
            return address  # noqa: RET504  # it is undone if an exception comes here
        except BaseException:
            if address is not None:
                self._books.unreserved(address)
            raise

    def _reserve(self, nbytes: int) -> int | None:
        address = self._free_addresses(nbytes)
        if self._orders and self._fails("reserve", nbytes):
            address = None
        if address is None:
            self.calls.append(("reserve", nbytes, None))
            return None
        return self._reserve_at(address, nbytes)

    def _reserve_at(self, address: int, nbytes: int) -> int:
        first, end = before = self._reserved
        try:
            first = address if first == end and not self.reuse else first
            self._reserved = first, address + nbytes
            self._books.reserved(address, nbytes)
            self.calls.append(("reserve", nbytes, address))
            return address
        except BaseException:
            self._books.unreserved(address)
            self._reserved = before
            raise

    def _free_addresses(self, nbytes: int) -> int | None:
        if self.reuse:
            address = self._first_gap(self._reserved[0], GRANULARITY, nbytes)
        else:
            address = self._next_reservation(nbytes)
        if address + nbytes > 1 << 63 or self._books.reserved_bytes + nbytes > ADDRESS_SPACE:
            return None
        return address

    def _next_reservation(self, nbytes: int) -> int:
        """Where addresses can be reserved that never were in use."""
        address = self._reserved[1]
        for start, end in (*self._areas[:-1], (self._areas[-1][0], self._next)):
            if address < end and address + nbytes > start:
                address = (end + GRANULARITY - 1) // GRANULARITY * GRANULARITY
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._books.check_unreserve(address, nbytes)
            self._call("unreserve", nbytes, address)
            self._books.unreserved(address)

    def create(self, nbytes: int) -> int | None:
        page = None
        try:
            with self._lock:
                self._books.check_size(nbytes, "create")
                if self._refuses("create", nbytes):
                    self.calls.append(("create", nbytes, None))
                else:
                    page = self._create(nbytes)
            return page
        except BaseException:
            if page is not None:
                self._books.released(self._books.check_release(page))
            raise

    def _create(self, nbytes: int) -> int:
        page = self._pages_made + 1
        try:
            self._books.created(page, nbytes)
            self.calls.append(("create", nbytes, page))
            self._pages_made = page
            return page
        except BaseException:
            held = self._books.page(page)
            if held is not None:
                self._books.released(held)
            raise

    def release(self, page: int) -> None:
        with self._lock:
            held = self._books.check_release(page)
            self._call("release", held.nbytes, page)
            self._books.released(held)

    def map(self, address: int, pages: Sequence[int]) -> None:
        with self._lock:
            plan = self._books.plan_map(address, pages)
            if "map" in self._orders:
                self._map_one_by_one(plan)
                return
            entries: list[tuple[str, int, int | None]] = [
                ("map", mapping.page.nbytes, mapping.start) for mapping in plan.mappings
            ]
            self.calls += entries
            self._books.mapped(plan)

    def _map_one_by_one(self, plan: Run) -> None:
        done = 0
        try:
            for mapping in plan.mappings:
                self._call("map", mapping.page.nbytes, mapping.start)
                done += 1
        except SubAllocatorError as error:
            if done:
                self._undo_map(plan, done, error)
            raise
        self._books.mapped(plan)

    def _undo_map(self, plan: Run, done: int, error: SubAllocatorError) -> None:
        address, nbytes = plan.start, plan.mappings[done].start - plan.start
        try:
            self._call("unmap", nbytes, address)
        except SubAllocatorError as undoing:
            self._books.mapped(plan, done)
            still_mapped(error, undoing, [(address, nbytes)])

    def set_access(self, address: int, nbytes: int) -> None:
        with self._lock:
            run = self._books.find_run(address, nbytes, "set_access")
            self._call("access", nbytes, address)
            self._books.accessible(run)

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            run = self._books.find_run(address, nbytes, "unmap")
            self._call("unmap", nbytes, address)
            self._books.unmapped(run)

    @property
    def pages(self) -> dict[int, int]:
        """The bytes of each page that was created and not released."""
        with self._lock:
            return {number: page.nbytes for number, page in self._books.pages.items()}

    @property
    def reservations(self) -> dict[int, int]:
        """The bytes of each reservation, by address."""
        with self._lock:
            return self._books.reservations

    @property
    def mappings(self) -> dict[int, int]:
        """The mapped pages, by the address where each begins."""
        with self._lock:
            return dict(self._books.mappings())

    @property
    def accessible(self) -> list[tuple[int, int]]:
        """(address, bytes) of mapped memory that may be used; neighbours are joined."""
        with self._lock:
            return list(self._books.accessible_runs())

    # -- for tests --------------------------------------------------------------------------------

    def fail_at(
        self,
        n: int | Iterable[int],
        kind: Call = "alloc",
        *,
        error: SubAllocatorError | None = None,
    ) -> None:
        """Let some of the next calls of one kind fail, however small they are.

        Parameters
        ----------
        n : int or iterable of int
            Which calls fail: 1 is the next one. 0 cancels what was ordered for the kind; so does a
            new order.
        kind : str, optional
            As in `calls`. Each page of a `map` counts as a call, and so does the unmapping with
            which one is undone.
        error : SubAllocatorError, optional
            What is raised. By default "alloc", "reserve" and "create" return None, and all others
            raise an error.

        Raises
        ------
        ValueError
            If a number is negative, or `kind` is not a kind of call.

        Examples
        --------
        >>> device = SimulatedSubAllocator("1 GiB")
        >>> device.fail_at(2, "create")
        >>> device.create(2 << 20), device.create(2 << 20), device.create(2 << 20)
        (1, None, 2)
        """
        numbers = {n} if isinstance(n, int) else set(n)
        if any(number < 0 for number in numbers):
            raise ValueError("fail_at counts calls from 1; 0 cancels an earlier fail_at")
        if kind not in CALLS:
            raise ValueError(f"kind is one of {', '.join(map(repr, CALLS))}, not {kind!r}")
        with self._lock:
            numbers.discard(0)
            if numbers:
                self._orders[kind] = Orders(numbers, error)
            else:
                self._orders.pop(kind, None)

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        """True while a stream is held."""
        return bool(self._held)

    def wait(self, stream: int) -> None:
        """Wait for a stream, and add an entry to `calls`. If the stream is held, call `finish`.

        Parameters
        ----------
        stream : int
            Which one.
        """
        with self._lock:
            self._call("wait", 0, stream)
        if stream in self._held:
            self.finish(stream)

    def fence(self, stream: int) -> HeldFence | None:
        return HeldFence(self, stream) if stream in self._held else None
