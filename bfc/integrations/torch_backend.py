"""A pool of bfc under a back end of PyTorch that somebody else has written.

Back ends outside of PyTorch (PrivateUse1) bring an allocator of their own. The header
`bfc_torch_allocator.hpp` in `bfc.get_include()` is one: a `c10::DeviceAllocator` with a cache,
statistics and streams, over a table of C functions. This module makes the table from pools of bfc.
"""

from __future__ import annotations

from collections.abc import Sequence

from bfc.allocators._allocator import Allocator
from bfc.integrations._torch_table import Table

__all__ = ["capsule"]


def capsule(pools: Sequence[Allocator]) -> object:
    """The C functions of some pools, for `bfc::DeviceAllocator::serve`.

    Parameters
    ----------
    pools : sequence of Allocator
        One for each device of the back end, in the order of their numbers. They are kept alive. No
        two may have the same addresses, as those over simulated devices do.

    Returns
    -------
    PyCapsule
        Named "bfc.allocator". `bfc_allocator.h` in `bfc.get_include()` says what is in it.

    Raises
    ------
    TypeError
        If one is not an allocator.
    ValueError
        If there are none, or more than 64.

    Notes
    -----
    A request that a free block serves takes no GIL, nor does its free, as long as no history is
    recorded. If a free waits for a stream, both take it, unless the pool is a CachingAllocator over
    CUDA memory and no graph is captured. All else takes the GIL, with no lock held: the back end
    must not hold one that a thread with the GIL may wait for.

    A stream of PyTorch's is a handle as the pool's sub-allocator takes it; 0 is the default one.

    Examples
    --------
    >>> import bfc
    >>> from bfc.integrations.torch_backend import capsule
    >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"))
    >>> type(capsule([pool])).__name__
    'PyCapsule'
    """
    kept = list(pools)
    for pool in kept:
        if not isinstance(pool, Allocator):
            raise TypeError(f"a pool is an allocator of bfc, not {type(pool).__name__}")
    table = Table(kept.__getitem__, len(kept))
    return table.capsule()
