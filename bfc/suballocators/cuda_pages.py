"""Mapped memory of a CUDA device: the driver's calls, and the books that are kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from bfc.drivers.cuda import _device
from bfc.errors import SubAllocatorError
from bfc.interpreter._process import ForkSafeLock
from bfc.suballocators.virtual import MappingBooks, still_mapped


class CUDAPages:
    """Reserved addresses and pages of one `CUDASubAllocator`, with its `handle_type`.

    A page's number is the driver's handle. The lock guards the books, and is never held while the
    driver is called. Meanwhile nobody else may use what is being mapped or unmapped.
    """

    def __init__(self, memory: _device.DeviceMemory, handle_type: str) -> None:
        self.driver = _device.VirtualMemory(memory, handle_type)
        self.books = MappingBooks(self.driver.granularity)
        self._lock = ForkSafeLock()
        self._device = memory.ordinal
        self._peers: tuple[int, ...] = ()

    def reserve(self, nbytes: int) -> int | None:
        self.books.check_size(nbytes, "reserve")
        address = self.driver.reserve(nbytes)
        if address is None:
            return None
        try:
            with self._lock:
                self.books.reserved(address, nbytes)
        except BaseException:
            self.driver.unreserve(address, nbytes)
            raise
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._lock:
            self.books.check_unreserve(address, nbytes)
        self.driver.unreserve(address, nbytes)
        with self._lock:
            self.books.unreserved(address)

    def holds(self, address: int) -> bool:
        """Whether an address is reserved here."""
        with self._lock:
            return self.books.find(address) is not None

    def create(self, nbytes: int) -> int | None:
        self.books.check_size(nbytes, "create")
        handle = self.driver.create(nbytes)
        if handle is None:
            return None
        try:
            with self._lock:
                self.books.created(handle, nbytes)
        except BaseException:
            self.driver.release(handle)
            raise
        return handle

    def release(self, handle: int) -> None:
        with self._lock:
            page = self.books.check_release(handle)
            self.books.released(page)
        try:
            self.driver.release(handle)
        except BaseException:
            with self._lock:
                self.books.held_again(page)
            raise

    def map(self, address: int, handles: Sequence[int]) -> None:
        with self._lock:
            plan = self.books.plan_map(address, handles)
            numbers = [mapping.page.number for mapping in plan.mappings]
            sizes = [mapping.page.nbytes for mapping in plan.mappings]
            self.books.mapped(plan)  # or another thread might map there, too
        wrong: tuple[SubAllocatorError, SubAllocatorError | None, int] | None
        try:
            wrong = self.driver.map(address, numbers, sizes)
        except BaseException:  # no memory for an error, which has been undone
            self._forget(address, plan.nbytes)
            raise
        if wrong is not None:
            error, undoing, left = wrong
            self._forget(address + left, plan.nbytes - left)
            raise still_mapped(error, undoing, [(address, left)]) if undoing is not None else error

    def _forget(self, address: int, nbytes: int) -> None:
        with self._lock:
            self.books.unmapped(self.books.find_run(address, nbytes, "map"))

    def set_access(self, address: int, nbytes: int) -> None:
        given: tuple[int, ...] | None = None
        while given != self._peers:  # again if a peer was enabled meanwhile
            with self._lock:
                run = self.books.find_run(address, nbytes, "set_access")
                given = self._peers
                self.books.accessible(run)
            try:
                self.driver.set_access(address, nbytes, (self._device, *given))
            except BaseException:
                with self._lock:
                    self.books.put_access_back(run)
                raise

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            run = self.books.find_run(address, nbytes, "unmap")
            self.books.unmapped(run)
        try:
            self.driver.unmap(address, nbytes)
        except BaseException:
            with self._lock:
                self.books.restored(run)
            raise

    # -- peers ------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[int, ...]:
        return self._peers

    def enable_peer(self, peer: int) -> None:
        """Give a device access to all memory that is accessible now, or becomes so later."""
        with self._lock:
            if peer == self._device or peer in self._peers:
                return
            before, self._peers = self._peers, (*self._peers, peer)
            runs = list(self.books.accessible_runs())
        done: list[tuple[int, int]] = []
        try:
            for run in runs:
                self.driver.set_access(*run, [peer])
                done.append(run)
        except BaseException as error:
            self._peers = before
            self._take_back(peer, done, error)
            raise

    def _take_back(self, peer: int, runs: list[tuple[int, int]], error: BaseException) -> None:
        for address, nbytes in runs:
            try:
                self.driver.set_access(address, nbytes, [peer], False)
            except SubAllocatorError as undoing:
                error.add_note(
                    f"device {peer} keeps access to {nbytes} bytes at {address:#x}: {undoing}"
                )
