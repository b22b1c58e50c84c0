"""PyTorch's statistics of a pool of either policy."""

from __future__ import annotations

from bfc.allocators._allocator import Allocator
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.words import FIELDS, GROUPS

_KINDS = ("all", "small_pool", "large_pool")
_GROUPS = (
    *(f"{group}.{kind}" for group in GROUPS for kind in _KINDS),
    "oversize_allocations",
    "oversize_segments",
)
#: The keys of all groups of counters, in the order of `bfc_device_stats`.
STATS = tuple(f"{group}.{field}" for group in _GROUPS for field in FIELDS)


def memory_stats(pool: Allocator) -> dict[str, int]:
    """The counters of a pool by PyTorch's keys.

    Those of a `CachingAllocator` are its `memory_stats()`. TensorFlow's policy counts less, and has
    no small and large pool: what it counts stands under ".all", and the rest is 0.
    """
    if isinstance(pool, CachingAllocator):
        return pool.memory_stats()
    stats = pool.stats()
    found = {
        f"{group}.{kind}.{field}": 0 for group in GROUPS for kind in _KINDS for field in FIELDS
    }
    found["active_bytes.all.current"] = stats.bytes_in_use
    found["active_bytes.all.peak"] = stats.peak_bytes_in_use
    found["allocated_bytes.all.current"] = stats.bytes_in_use - stats.bytes_waiting_for_streams
    found["allocated_bytes.all.peak"] = stats.peak_bytes_in_use
    found["reserved_bytes.all.current"] = stats.pool_bytes
    found["reserved_bytes.all.peak"] = stats.peak_pool_bytes
    found["allocation.all.allocated"] = stats.num_allocs
    return dict(sorted(found.items()))
