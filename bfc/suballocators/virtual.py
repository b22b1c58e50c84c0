"""The books of a sub-allocator that maps memory: its reservations, its pages, and where they are
mapped. This code maps nothing itself: it checks what may be done, and records what was done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from bfc.errors import SubAllocatorError


class Page:
    """A piece of memory. It lives until it is released and mapped nowhere."""

    __slots__ = ("is_held", "mappings", "nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.is_held = True
        self.mappings = 0

    @property
    def is_gone(self) -> bool:
        return not self.is_held and not self.mappings


class Reservation:
    """Reserved addresses, and the pages behind them: three lists in the order of addresses."""

    __slots__ = ("access", "nbytes", "pages", "start", "starts")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.starts: list[int] = []
        self.pages: list[Page] = []
        self.access = bytearray()  # 1 where `set_access` was called

    def put(self, index: int, starts: list[int], pages: list[Page], access: bytes) -> None:
        """Add mappings, all or none."""
        count, end = len(self.starts), index + len(starts)
        try:
            self.starts[index:index] = starts
            self.pages[index:index] = pages
            self.access[index:index] = access
        except BaseException:
            for column in (self.starts, self.pages, self.access):
                if len(column) > count:
                    del column[index:end]
            raise

    def drop(self, index: int, starts: list[int], pages: list[Page], access: bytes) -> None:
        """Remove these mappings, all or none."""
        count, end = len(self.starts), index + len(starts)
        try:
            del self.starts[index:end]
            del self.pages[index:end]
            del self.access[index:end]
        except BaseException:
            if len(self.starts) < count:
                self.starts[index:index] = starts
            if len(self.pages) < count:
                self.pages[index:index] = pages
            if len(self.access) < count:
                self.access[index:index] = access
            raise


class Run:
    """Mappings of one reservation that lie end to end, by their indices in its lists."""

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

    __slots__ = ("nbytes", "pages", "reservation", "starts")

    def __init__(self, reservation: Reservation, starts: list[int], pages: list[Page]) -> None:
        self.reservation = reservation
        self.starts = starts
        self.pages = pages
        self.nbytes = starts[-1] + pages[-1].nbytes - starts[0]


class Cut:
    """Mappings of one reservation that are added or removed together."""

    __slots__ = ("access", "gone", "pages", "reservation", "starts")

    def __init__(
        self, reservation: Reservation, starts: list[int], pages: list[Page], access: bytes
    ) -> None:
        self.reservation = reservation
        self.starts = starts
        self.pages = pages
        self.access = access
        self.gone: list[Page] = []  # those that are released and mapped nowhere now


class MappingBooks:
    """Reservations, pages and mappings of one sub-allocator, whose sizes and addresses must be
    multiples of `granularity`. The caller must hold a lock.

    Each change is made completely or not at all, even if the host has no memory for it, or an
    exception interrupts it.
    """

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.page_bytes = 0  # of all pages that are not released, or still mapped
        self.pages: dict[int, Page] = {}  # those that are not released, by number
        self.reservations: dict[int, Reservation] = {}  # by first address
        self._order: list[int] = []  # the first addresses of the reservations, sorted

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all reservations."""
        return sum(it.nbytes for it in self.reservations.values())

    def check_size(self, nbytes: int, call: str) -> None:
        """Refuse a size that is not a multiple of the granularity."""
        if nbytes <= 0 or nbytes % self.granularity:
            raise SubAllocatorError(
                f"{call}({nbytes}): the size must be a positive multiple of {self.granularity}"
            )

    # -- addresses --------------------------------------------------------------------------------

    def reserved(self, address: int, nbytes: int) -> None:
        reservation = Reservation(address, nbytes)
        try:
            insort(self._order, address)
            self.reservations[address] = reservation
        except BaseException:
            self.unreserved(address)
            raise

    def check_unreserve(self, address: int, nbytes: int) -> None:
        reservation = self.reservations.get(address)
        if reservation is None or reservation.nbytes != nbytes:
            raise SubAllocatorError(f"unreserve({address:#x}, {nbytes}) is not a whole reservation")
        if reservation.starts:
            raise SubAllocatorError(
                f"unreserve({address:#x}, {nbytes}): memory is mapped there, the first at "
                f"{reservation.starts[0]:#x}: unmap it first"
            )

    def unreserved(self, address: int) -> None:
        """Remove a reservation. One that was removed already is no error."""
        index = bisect_left(self._order, address)
        if index < len(self._order) and self._order[index] == address:
            del self._order[index]
        self.reservations.pop(address, None)

    def find(self, address: int) -> Reservation | None:
        """The reservation that an address lies in."""
        index = bisect_right(self._order, address) - 1
        if index < 0:
            return None
        reservation = self.reservations[self._order[index]]
        return reservation if address - reservation.start < reservation.nbytes else None

    # -- pages ------------------------------------------------------------------------------------

    def created(self, number: int, nbytes: int) -> None:
        page, total = Page(number, nbytes), self.page_bytes
        try:
            self.pages[number] = page
            self.page_bytes = total + nbytes
        except BaseException:
            self.pages.pop(number, None)
            self.page_bytes = total
            raise

    def check_release(self, number: int) -> Page:
        page = self.pages.get(number)
        if page is None:
            raise SubAllocatorError(
                f"release({number}): there is no such page, or it was released already"
            )
        return page

    def released(self, page: Page) -> None:
        """Remove a page, which may still be mapped."""
        total = self.page_bytes
        try:
            self.pages.pop(page.number, None)
            page.is_held = False
            self.page_bytes = total if page.mappings else total - page.nbytes
        except BaseException:
            self.pages[page.number] = page
            page.is_held = True
            self.page_bytes = total
            raise

    def held_again(self, page: Page) -> None:
        """Undo `released`."""
        total = self.page_bytes + page.nbytes if page.is_gone else self.page_bytes
        self.pages[page.number] = page
        page.is_held = True
        self.page_bytes = total

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
        self._check_free(reservation, address, at)
        return Plan(reservation, starts, pages)

    def _pages_of(self, address: int, numbers: Sequence[int]) -> list[Page]:
        try:
            pages = [self.pages[number] for number in numbers]
        except KeyError as error:
            raise SubAllocatorError(
                f"map({address:#x}): there is no page {error.args[0]!r}, or it was released already"
            ) from None
        if not pages:
            raise SubAllocatorError(f"map({address:#x}) needs one page or more")
        return pages

    def _check_free(self, reservation: Reservation, address: int, end: int) -> None:
        """Refuse addresses where something is mapped."""
        starts = reservation.starts
        index = bisect_left(starts, address)
        taken = None
        if index < len(starts) and starts[index] < end:
            taken = starts[index]
        elif index and starts[index - 1] + reservation.pages[index - 1].nbytes > address:
            taken = starts[index - 1]
        if taken is not None:
            raise SubAllocatorError(
                f"map({address:#x}): a page is mapped at {taken:#x} already: unmap it first"
            )

    def mapped(self, plan: Plan, count: int | None = None) -> None:
        """Record the first `count` pages of a plan as mapped, or all."""
        starts = plan.starts[:count]
        self._enter(Cut(plan.reservation, starts, plan.pages[:count], bytes(len(starts))))

    def _enter(self, cut: Cut) -> None:
        pages, total = cut.pages, self.page_bytes
        before = [page.mappings for page in pages]
        again = sum(page.nbytes for page in set(pages) if page.is_gone)
        reservation = cut.reservation
        index, count = bisect_left(reservation.starts, cut.starts[0]), len(reservation.starts)
        try:
            reservation.put(index, cut.starts, pages, cut.access)
            for page in pages:
                page.mappings += 1
            self.page_bytes = total + again
        except BaseException:
            self._undo_enter(cut, before, total, index, count)
            raise

    def _undo_enter(self, cut: Cut, before: list[int], total: int, index: int, count: int) -> None:
        self._put_counts_back(cut.pages, before, total)
        if len(cut.reservation.starts) > count:
            cut.reservation.drop(index, cut.starts, cut.pages, cut.access)

    def _put_counts_back(self, pages: list[Page], before: list[int], total: int) -> None:
        for page, mappings in zip(pages, before, strict=True):
            page.mappings = mappings
        self.page_bytes = total

    def find_run(self, address: int, nbytes: int, call: str) -> Run:
        """The mappings that begin at an address and have `nbytes` bytes. Nothing changes."""
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

    def put_access_back(self, run: Run, had: bytes) -> None:
        """Restore the access from before `accessible`."""
        run.reservation.access[run.index : run.end] = had

    def unmapped(self, run: Run) -> Cut:
        """Remove mappings. Returns what was removed, for `restored`."""
        reservation, total = run.reservation, self.page_bytes
        access = bytes(reservation.access[run.index : run.end])
        cut = Cut(reservation, run.starts, run.pages, access)
        before = [page.mappings for page in cut.pages]
        count = len(reservation.starts)
        try:
            self._strike(run, cut)
            return cut
        except BaseException:
            self._put_counts_back(cut.pages, before, total)
            if len(reservation.starts) < count:
                reservation.put(run.index, cut.starts, cut.pages, access)
            raise

    def _strike(self, run: Run, cut: Cut) -> None:
        cut.reservation.drop(run.index, cut.starts, cut.pages, cut.access)
        for page in cut.pages:
            page.mappings -= 1
        cut.gone = [it for it in set(cut.pages) if it.is_gone]
        self.page_bytes -= sum(page.nbytes for page in cut.gone)

    def restored(self, cut: Cut) -> None:
        """Add again what `unmapped` has removed."""
        self._enter(cut)

    def mappings(self) -> Iterator[tuple[int, int]]:
        """(address, page number) of each mapping, in the order of addresses."""
        for start in self._order:
            reservation = self.reservations[start]
            for at, page in zip(reservation.starts, reservation.pages, strict=True):
                yield at, page.number

    def accessible_runs(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of memory with access, in order; neighbours are joined."""
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
    """The error of a `map` that could not be undone: the same error, with what is still mapped."""
    where = ", ".join(f"{nbytes} bytes at {address:#x}" for address, nbytes in lost)
    error.args = (f"{error}\n  undoing it failed, too: {undoing}\n  still mapped: {where}",)
    error.lost = tuple(lost)
    return error
