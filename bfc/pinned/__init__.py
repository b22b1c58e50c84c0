"""Pinned host memory: the allocator, and look-ups by address. In order:

_blocks.pyx       the blocks, in integers: stacks, sums, and what the sub-allocator gave
_allocator.pyx    PyTorch's policy for pinned memory
"""

from __future__ import annotations

from typing import SupportsIndex

from bfc.drivers.cuda import _device
from bfc.errors import DeviceUnavailableError, DriverError
from bfc.pinned._allocator import PinnedAllocator, PinnedBlock, open_allocators
from bfc.units import as_int

__all__ = ["PinnedAllocator", "PinnedBlock", "find", "is_pinned"]


def find(address: SupportsIndex) -> tuple[PinnedAllocator, PinnedBlock] | None:
    """Find the `PinnedAllocator`, and the live block of it, that a host address lies in.

    Parameters
    ----------
    address : int
        Any address of the block.

    Returns
    -------
    tuple of (PinnedAllocator, PinnedBlock), or None
        None if no open allocator has such a block.

    Raises
    ------
    TypeError
        If `address` is not an int.
    InvalidPointerError
        If `address` is negative or above 2**64 - 2.

    Notes
    -----
    Cost: O(log n) in the blocks of each open allocator, no driver call.

    Examples
    --------
    >>> import bfc
    >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
    ...     ptr = allocator.allocate_raw(4096)
    ...     owner, block = bfc.pinned.find(ptr + 100)
    ...     owner is allocator, block.ptr == ptr, block.nbytes
    (True, True, 4096)
    """
    for allocator in open_allocators():
        block = allocator.find(address)
        if block is not None:
            return allocator, block
    return None


def is_pinned(address: SupportsIndex) -> bool:
    """Whether the host memory at an address is pinned, no matter who pinned it.

    Parameters
    ----------
    address : int
        Any address of the memory.

    Returns
    -------
    bool
        False if there is no CUDA.

    Raises
    ------
    TypeError
        If `address` is not an int.
    InvalidPointerError
        If `address` is negative or above 2**64 - 2.

    Notes
    -----
    Cost: asks the driver (cuPointerGetAttribute), unless a `PinnedAllocator` holds the address. It
    makes no context on any device. Source: PyTorch's behaviour, 4.3.

    Examples
    --------
    >>> import bfc
    >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
    ...     bfc.pinned.is_pinned(allocator.allocate_raw(4096))
    False
    """
    found = find(address)
    if found is not None:
        return found[0].is_pinned
    try:
        return _device.is_host_memory(as_int(address))
    except (DeviceUnavailableError, DriverError):
        return False
