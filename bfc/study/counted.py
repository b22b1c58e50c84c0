"""Sources of memory that count the regions taken from them."""

from __future__ import annotations

from bfc.suballocators import (
    HostSubAllocator,
    OpenCLSubAllocator,
    SimulatedSubAllocator,
    SubAllocator,
)


class Counted(SubAllocator):
    """Put it before a source's class to count what that source gives.

    Attributes
    ----------
    regions_taken : int
        How often `alloc` returned a region.

    Examples
    --------
    >>> class CountedHost(Counted, HostSubAllocator):
    ...     pass
    """

    regions_taken = 0

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block = super().alloc(alignment, nbytes)  # type: ignore[safe-super]  # a source's own
        self.regions_taken += block is not None
        return block


class CountedSimulated(Counted, SimulatedSubAllocator):
    """A GPU made of integers."""


class CountedHost(Counted, HostSubAllocator):
    """Host memory."""


class CountedOpenCL(Counted, OpenCLSubAllocator):
    """Memory of an OpenCL device."""
