"""Sub-allocators that count the calls made to them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from bfc.suballocators import (
    CUDASubAllocator,
    HostSubAllocator,
    OpenCLSubAllocator,
    SimulatedSubAllocator,
    SubAllocator,
)
from bfc.suballocators.simulated import CUDA_CHUNK, CUDA_HIGHEST
from bfc.trace import Trace


class Counted(SubAllocator):
    """A mixin: put it before a sub-allocator's class to count the calls that a driver would get.

    Calls that are refused are counted, too. Pages are mapped one by one: each is a call.
    """

    regions_taken = 0  # how often `alloc` returned a region
    waits = 0  # for a stream, which count as no calls

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls_by_kind: Counter[str] = Counter()

    @property
    def driver_calls(self) -> int:
        """All calls but the waits."""
        return self.calls_by_kind.total()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        self.calls_by_kind["alloc"] += 1
        block = super().alloc(alignment, nbytes)  # type: ignore[safe-super]  # a source's own
        self.regions_taken += block is not None
        return block

    def free(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["free"] += 1
        super().free(address, nbytes)  # type: ignore[safe-super]  # a source's own

    def wait(self, stream: int) -> None:
        self.waits += 1
        super().wait(stream)

    def reserve(self, nbytes: int) -> int | None:
        self.calls_by_kind["reserve"] += 1
        return super().reserve(nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["unreserve"] += 1
        super().unreserve(address, nbytes)

    def create(self, nbytes: int) -> int | None:
        self.calls_by_kind["create"] += 1
        return super().create(nbytes)

    def release(self, page: int) -> None:
        self.calls_by_kind["release"] += 1
        super().release(page)

    def map(self, address: int, pages: Sequence[int]) -> None:
        self.calls_by_kind["map"] += len(pages)
        super().map(address, pages)

    def set_access(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["access"] += 1
        super().set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["unmap"] += 1
        super().unmap(address, nbytes)


class CountedSimulated(Counted, SimulatedSubAllocator):
    """A GPU made of integers."""

    def with_addresses_of_cuda(self, seed: int | None = None) -> CountedSimulated:
        """A new device of this kind and size, with the addresses of CUDA's driver, or those that it
        might have in another process."""
        return CountedSimulated(self.total_bytes, base=CUDA_HIGHEST, chunk=CUDA_CHUNK, seed=seed)


class TooManyPagesError(Exception):
    """A replay that maps more pages than it is worth."""


class NoAddressesError(Exception):
    """There are fewer addresses than an allocator on such a device reserves."""


class CountedPages(Counted, SimulatedSubAllocator):
    """A GPU made of integers for allocators of ours: it keeps no log, and does not check what is
    mapped where, so that a page costs a tenth.

    Raises TooManyPagesError for a page more than `most_pages` at a time, which None allows, and
    NoAddressesError in place of a `reserve` that is refused.
    """

    def __init__(self, *arguments: Any, most_pages: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls = deque(maxlen=0)  # type: ignore[assignment]  # forgets what is appended
        self._page_bytes = 0
        self._sizes: dict[int, int] = {}  # of the pages that were not released
        self._most_pages = most_pages

    def with_addresses_of_cuda(self, seed: int | None = None) -> CountedPages:
        """As a CountedSimulated's."""
        where = {"base": CUDA_HIGHEST, "chunk": CUDA_CHUNK, "seed": seed}
        return CountedPages(self.total_bytes, most_pages=self._most_pages, **where)

    @property
    def live_bytes(self) -> int:
        """The bytes of all blocks and pages that are live."""
        return self._block_bytes + self._page_bytes

    # A replay is one thread, and so nothing here takes the lock.

    def reserve(self, nbytes: int) -> int | None:
        address = super().reserve(nbytes)
        if address is None:
            raise NoAddressesError(f"no {nbytes} bytes of addresses")
        return address

    def create(self, nbytes: int) -> int | None:
        self.calls_by_kind["create"] += 1
        if self._block_bytes + self._page_bytes + nbytes > self.total_bytes:
            return None
        if self._most_pages is not None and len(self._sizes) >= self._most_pages:
            raise TooManyPagesError(f"more than {self._most_pages} pages")
        self._pages_made += 1
        self._sizes[self._pages_made] = nbytes
        self._page_bytes += nbytes
        return self._pages_made

    def release(self, page: int) -> None:
        self.calls_by_kind["release"] += 1
        self._page_bytes -= self._sizes.pop(page)

    def map(self, address: int, pages: Sequence[int]) -> None:
        self.calls_by_kind["map"] += len(pages)

    def set_access(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["access"] += 1

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls_by_kind["unmap"] += 1


class CountedHost(Counted, HostSubAllocator):
    """Host memory."""


class CountedCUDA(Counted, CUDASubAllocator):
    """Memory of a CUDA device."""


class CountedOpenCL(Counted, OpenCLSubAllocator):
    """Memory of an OpenCL device."""


def was_predicted(trace: Trace) -> bool:
    """Whether a run was predicted, not recorded."""
    return isinstance(trace.meta, dict) and isinstance(trace.meta.get("predicted"), dict)


def device_for(trace: Trace, make: Callable[[], Counted]) -> Callable[[], Counted]:
    """What makes the device that a trace is replayed on.

    A simulated one gives a predicted run the addresses that it had in the prediction, as CUDA's
    driver does, or, with a "layout", those of another process: PyTorch takes the lowest of free
    blocks of one size, so that what is reserved depends on them. A recorded run keeps addresses
    that rise: it begins with blocks whose recorded order of addresses the replay has to keep.
    """
    if not was_predicted(trace):
        return make

    def made() -> Counted:
        device = make()
        if (
            isinstance(device, CountedSimulated | CountedPages)
            and 2 * device.total_bytes <= CUDA_HIGHEST
        ):
            layout = trace.meta["predicted"].get("layout")
            return device.with_addresses_of_cuda(layout if isinstance(layout, int) else None)
        return device

    return made
