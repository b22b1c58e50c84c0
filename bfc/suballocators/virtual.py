"""The books of a sub-allocator that maps memory: its reservations, its pages, and where they are
mapped. This code maps nothing itself: it checks what may be done, and records what was done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


class Mapping(NamedTuple):
    """A page at an address."""

    start: int
    page: Page
    has_access: bool = False  # whether `set_access` was called

    @property
    def end(self) -> int:
        return self.start + self.page.nbytes


class Reservation:
    """Reserved addresses, and what is mapped there, in the order of addresses."""

    __slots__ = ("mappings", "nbytes", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.mappings: list[Mapping] = []

    def place_of(self, address: int) -> int:
        """The index of the first mapping that begins at an address or above."""
        return bisect_left(self.mappings, (address,))


class Run(NamedTuple):
    """Mappings that lie end to end in one reservation: there, to be made, or removed."""

    reservation: Reservation
    mappings: list[Mapping]

    @property
    def start(self) -> int:
        return self.mappings[0].start

    @property
    def nbytes(self) -> int:
        return self.mappings[-1].end - self.start

    @property
    def gone(self) -> list[Page]:
        """Those of its pages that are released and mapped nowhere now."""
        return [page for page in {mapping.page for mapping in self.mappings} if page.is_gone]


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
        if reservation.mappings:
            raise SubAllocatorError(
                f"unreserve({address:#x}, {nbytes}): memory is mapped there, the first at "
                f"{reservation.mappings[0].start:#x}: unmap it first"
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

    def plan_map(self, address: int, numbers: Sequence[int]) -> Run:
        """Check what `map` was asked for, and return it. Nothing changes."""
        pages = self._pages_of(address, numbers)
        reservation = self.find(address)
        if reservation is None:
            raise SubAllocatorError(f"map({address:#x}): that address is not reserved")
        if (address - reservation.start) % self.granularity:
            raise SubAllocatorError(
                f"map({address:#x}): the address must be a multiple of {self.granularity}"
            )
        mappings, at = [], address
        for page in pages:
            mappings.append(Mapping(at, page))
            at += page.nbytes
        if at > reservation.start + reservation.nbytes:
            raise SubAllocatorError(
                f"map({address:#x}): {at - address} bytes of pages pass the end of the "
                f"reservation, {reservation.start + reservation.nbytes:#x}"
            )
        self._check_free(reservation, address, at)
        return Run(reservation, mappings)

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
        index = reservation.place_of(address)
        near = reservation.mappings[max(index - 1, 0) : index + 1]
        taken = [it.start for it in near if it.start < end and it.end > address]
        if taken:
            raise SubAllocatorError(
                f"map({address:#x}): a page is mapped at {taken[-1]:#x} already: unmap it first"
            )

    def mapped(self, run: Run, count: int | None = None) -> None:
        """Record what `plan_map` has returned as mapped: the first `count` pages, or all."""
        self._change(Run(run.reservation, run.mappings[:count]), True)

    def _change(self, run: Run, adds: bool) -> list[Page]:
        """Add mappings or remove them, all or none. Returns the pages that are gone afterwards."""
        counts = [(mapping.page, mapping.page.mappings) for mapping in run.mappings]
        length, total = len(run.reservation.mappings), self.page_bytes
        try:
            return self._changed(run, adds)
        except BaseException:
            for page, count in counts:
                page.mappings = count
            self.page_bytes = total
            if len(run.reservation.mappings) != length:
                self._list(run, not adds)
            raise

    def _changed(self, run: Run, adds: bool) -> list[Page]:
        before = sum(page.nbytes for page in run.gone)
        self._list(run, adds)
        for mapping in run.mappings:
            mapping.page.mappings += 1 if adds else -1
        gone = run.gone
        self.page_bytes += before - sum(page.nbytes for page in gone)
        return gone

    def _list(self, run: Run, adds: bool) -> None:
        place = run.reservation.place_of(run.start)
        if adds:
            run.reservation.mappings[place:place] = run.mappings
        else:
            del run.reservation.mappings[place : place + len(run.mappings)]

    def find_run(self, address: int, nbytes: int, call: str) -> Run:
        """The mappings that begin at an address and have `nbytes` bytes. Nothing changes."""
        reservation = self.find(address)
        if reservation is not None and nbytes > 0:
            index = end = reservation.place_of(address)
            at, listed = address, reservation.mappings
            while at < address + nbytes and end < len(listed) and listed[end].start == at:
                at = listed[end].end
                end += 1
            if at == address + nbytes:
                return Run(reservation, listed[index:end])
        raise SubAllocatorError(
            f"{call}({address:#x}, {nbytes}): these are not whole pages that are mapped end to end"
        )

    def accessible(self, run: Run) -> None:
        """Record that `set_access` was called. The run still says where it was called before."""
        self._put_access(run, [True] * len(run.mappings))

    def put_access_back(self, run: Run) -> None:
        """Restore the access that a run had before `accessible`."""
        now = self.find_run(run.start, run.nbytes, "set_access")
        self._put_access(now, [mapping.has_access for mapping in run.mappings])

    def _put_access(self, run: Run, access: list[bool]) -> None:
        changed = [
            mapping._replace(has_access=has_access)
            for mapping, has_access in zip(run.mappings, access, strict=False)
        ]
        place = run.reservation.place_of(run.start)
        run.reservation.mappings[place : place + len(changed)] = changed

    def unmapped(self, run: Run) -> list[Page]:
        """Remove mappings. Returns the pages that are released, and mapped nowhere now."""
        return self._change(run, False)

    def restored(self, run: Run) -> None:
        """Add again what `unmapped` has removed."""
        self._change(run, True)

    def mappings(self) -> Iterator[tuple[int, int]]:
        """(address, page number) of each mapping, in the order of addresses."""
        for start in self._order:
            for mapping in self.reservations[start].mappings:
                yield mapping.start, mapping.page.number

    def accessible_runs(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of memory with access, in order; neighbours are joined."""
        for start in self._order:
            begun = end = 0
            for mapping in self.reservations[start].mappings:
                if not mapping.has_access:
                    continue
                if mapping.start != end:
                    if end:
                        yield begun, end - begun
                    begun = mapping.start
                end = mapping.end
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
