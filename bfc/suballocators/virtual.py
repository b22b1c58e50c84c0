"""The books of a source that maps memory: what is reserved, which pages there are, and where they
are mapped. They call nothing: they say what may be done, and are told what was done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from bfc.errors import SubAllocatorError


class Page:
    """A piece of memory. It lives as long as its number is held, or it is mapped somewhere."""

    __slots__ = ("is_held", "mappings", "nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.is_held = True
        self.mappings = 0


class Reservation:
    """Reserved addresses, and the pages behind them: three lists in the order of addresses."""

    __slots__ = ("access", "nbytes", "pages", "start", "starts")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.starts: list[int] = []
        self.pages: list[Page] = []
        self.access = bytearray()  # 1 where `set_access` was called

    def put(self, index: int, starts: list[int], pages: Sequence[Page], access: bytes) -> None:
        """Enter mappings. All or nothing, also where the host has no memory."""
        count = len(starts)
        try:
            self.starts[index:index] = starts
            self.pages[index:index] = pages
            self.access[index:index] = access
        except MemoryError:
            if len(self.starts) > len(self.access):
                del self.starts[index : index + count]
            if len(self.pages) > len(self.access):
                del self.pages[index : index + count]
            raise

    def drop(self, index: int, end: int) -> None:
        """Strike mappings out."""
        del self.starts[index:end], self.pages[index:end], self.access[index:end]


class Run:
    """Mappings that lie end to end: some of one reservation's, by their indices in its lists."""

    __slots__ = ("end", "index", "reservation")

    def __init__(self, reservation: Reservation, index: int, end: int) -> None:
        self.reservation = reservation
        self.index = index
        self.end = end

    @property
    def pages(self) -> list[Page]:
        return self.reservation.pages[self.index : self.end]

    @property
    def starts(self) -> list[int]:
        return self.reservation.starts[self.index : self.end]


class Plan:
    """What `map` is to do: pages at addresses, into one reservation."""

    __slots__ = ("index", "nbytes", "pages", "reservation", "starts")

    def __init__(
        self, reservation: Reservation, index: int, starts: list[int], pages: list[Page]
    ) -> None:
        self.reservation = reservation
        self.index = index
        self.starts = starts
        self.pages = pages
        self.nbytes = starts[-1] + pages[-1].nbytes - starts[0]


class MappingBooks:
    """Reservations, pages and mappings of one source. Whoever uses it holds a lock.

    Parameters
    ----------
    granularity : int
        What sizes and addresses must be multiples of, in bytes.

    Attributes
    ----------
    page_bytes : int
        The bytes of all pages that are held or mapped.
    pages : dict of int to Page
        Those that are held, by number.
    reservations : dict of int to Reservation
        By first address.
    """

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.page_bytes = 0
        self.pages: dict[int, Page] = {}
        self.reservations: dict[int, Reservation] = {}
        self._order: list[int] = []  # their first addresses, sorted

    def check_size(self, nbytes: int, call: str) -> None:
        """Refuse a size that is not a multiple of the granularity."""
        if nbytes <= 0 or nbytes % self.granularity:
            raise SubAllocatorError(
                f"{call}({nbytes}): the size must be a positive multiple of {self.granularity}"
            )

    # -- addresses --------------------------------------------------------------------------------

    def reserved(self, address: int, nbytes: int) -> None:
        insort(self._order, address)
        try:
            self.reservations[address] = Reservation(address, nbytes)
        except MemoryError:
            self._order.remove(address)
            raise

    def check_unreserve(self, address: int, nbytes: int) -> None:
        reservation = self.reservations.get(address)
        if reservation is None or reservation.nbytes != nbytes:
            raise SubAllocatorError(f"unreserve({address:#x}, {nbytes}) is not a whole reservation")
        if reservation.starts:
            raise SubAllocatorError(
                f"unreserve({address:#x}, {nbytes}): memory is mapped there, the first at "
                f"{reservation.starts[0]:#x}: unmap it before"
            )

    def unreserved(self, address: int) -> None:
        del self.reservations[address]
        del self._order[bisect_left(self._order, address)]

    def find(self, address: int) -> Reservation | None:
        """The reservation that an address lies in."""
        index = bisect_right(self._order, address) - 1
        if index < 0:
            return None
        reservation = self.reservations[self._order[index]]
        return reservation if address - reservation.start < reservation.nbytes else None

    # -- pages ------------------------------------------------------------------------------------

    def created(self, number: int, nbytes: int) -> None:
        self.pages[number] = Page(number, nbytes)
        self.page_bytes += nbytes

    def check_release(self, number: int) -> Page:
        page = self.pages.get(number)
        if page is None:
            raise SubAllocatorError(f"release({number}): there is no such page, or not any more")
        return page

    def released(self, page: Page) -> int:
        """Strike a page out. Returns the bytes that go back: 0 while it is mapped somewhere."""
        del self.pages[page.number]
        page.is_held = False
        return 0 if page.mappings else self._gone(page)

    def _gone(self, page: Page) -> int:
        self.page_bytes -= page.nbytes
        return page.nbytes

    # -- mappings ---------------------------------------------------------------------------------

    def plan_map(self, address: int, numbers: Sequence[int]) -> Plan:
        """Check what `map` was asked for. Nothing changes."""
        pages = self._pages_of(address, numbers)
        reservation = self.find(address)
        if reservation is None:
            raise SubAllocatorError(f"map({address:#x}): that address is not reserved")
        if (address - reservation.start) % self.granularity:
            raise SubAllocatorError(
                f"map({address:#x}): the address must be a multiple of {self.granularity}"
            )
        starts, at = [], address
        for page in pages:
            starts.append(at)
            at += page.nbytes
        if at > reservation.start + reservation.nbytes:
            raise SubAllocatorError(
                f"map({address:#x}): {at - address} bytes of pages pass the end of the "
                f"reservation, {reservation.start + reservation.nbytes:#x}"
            )
        index = self._free_place(reservation, address, at)
        return Plan(reservation, index, starts, pages)

    def _pages_of(self, address: int, numbers: Sequence[int]) -> list[Page]:
        try:
            pages = [self.pages[number] for number in numbers]
        except KeyError as error:
            raise SubAllocatorError(
                f"map({address:#x}): there is no page {error.args[0]!r}, or not any more"
            ) from None
        if not pages:
            raise SubAllocatorError(f"map({address:#x}) needs one page or more")
        return pages

    def _free_place(self, reservation: Reservation, address: int, end: int) -> int:
        """The index at which mappings from `address` to `end` belong."""
        starts = reservation.starts
        index = bisect_left(starts, address)
        taken = None
        if index < len(starts) and starts[index] < end:
            taken = starts[index]
        elif index and starts[index - 1] + reservation.pages[index - 1].nbytes > address:
            taken = starts[index - 1]
        if taken is not None:
            raise SubAllocatorError(
                f"map({address:#x}): a page is mapped at {taken:#x} already: unmap it before"
            )
        return index

    def mapped(self, plan: Plan, count: int | None = None) -> None:
        """Enter the first `count` pages of a plan, or all."""
        pages, starts = plan.pages[:count], plan.starts[:count]
        plan.reservation.put(plan.index, starts, pages, bytes(len(starts)))
        for page in pages:
            page.mappings += 1

    def find_run(self, address: int, nbytes: int, call: str) -> Run:
        """The mappings that begin at an address and are so many bytes. Nothing changes."""
        reservation = self.find(address)
        if reservation is not None and nbytes > 0:
            index = end = bisect_left(reservation.starts, address)
            at = address
            while at < address + nbytes and end < len(reservation.starts):
                if reservation.starts[end] != at:
                    break
                at += reservation.pages[end].nbytes
                end += 1
            if at == address + nbytes:
                return Run(reservation, index, end)
        raise SubAllocatorError(
            f"{call}({address:#x}, {nbytes}): these are not whole pages that are mapped end to end"
        )

    def accessible(self, run: Run) -> None:
        run.reservation.access[run.index : run.end] = b"\x01" * (run.end - run.index)

    def unmapped(self, run: Run) -> int:
        """Strike mappings out. Returns the bytes of the pages that nobody holds any more."""
        pages = run.pages
        run.reservation.drop(run.index, run.end)
        given_back = 0
        for page in pages:
            page.mappings -= 1
            if not page.is_held and not page.mappings:
                given_back += self._gone(page)
        return given_back

    def mappings(self) -> Iterator[tuple[int, int]]:
        """Where a page is mapped, and its number, in the order of addresses."""
        for start in self._order:
            reservation = self.reservations[start]
            for at, page in zip(reservation.starts, reservation.pages, strict=True):
                yield at, page.number

    def accessible_runs(self) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of what has access, in order; what lies end to end is one."""
        for start in self._order:
            reservation = self.reservations[start]
            begun = end = 0
            for at, page, has_access in zip(
                reservation.starts, reservation.pages, reservation.access, strict=True
            ):
                if not has_access:
                    continue
                if at != end:
                    if end:
                        yield begun, end - begun
                    begun = at
                end = at + page.nbytes
            if end:
                yield begun, end - begun


def still_mapped(
    error: SubAllocatorError, undoing: Exception, lost: list[tuple[int, int]]
) -> SubAllocatorError:
    """The error of a `map` that could not be undone: the same, but it says what is lost."""
    where = ", ".join(f"{nbytes} bytes at {address:#x}" for address, nbytes in lost)
    error.args = (f"{error}\n  undoing it failed, too: {undoing}\n  still mapped: {where}",)
    error.lost = tuple(lost)
    return error
