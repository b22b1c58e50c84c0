"""The few figures of an allocator that a dashboard shows. They may be read every second."""

from __future__ import annotations

from bfc.snapshots.snapshot import Stats

#: The names for memory without an owner, and for owners that are not listed.
NOBODY, OTHERS = "(no owner)", "(other owners)"


def figures(stats: Stats) -> dict[str, int]:
    """The figures that monitoring shows, in bytes: "used", the chunks in use; "reserved", what was
    taken from the device; "peak", the most that was used; "limit", the allocator's memory limit;
    "largest_free", the largest free chunk.

    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
    >>> figures(allocator.stats())
    {'used': 0, 'reserved': 1048576, 'peak': 1024, 'limit': 1048576, 'largest_free': 1048576}
    """
    return {
        "used": stats.bytes_in_use,
        "reserved": stats.pool_bytes,
        "peak": stats.peak_bytes_in_use,
        "limit": stats.bytes_limit,
        "largest_free": stats.largest_free_block_bytes,
    }


def largest_owners(by_owner: dict[str, int], most: int) -> dict[str, int]:
    """The bytes of the `most` largest owners, and of all others together under "(other owners)".

    Memory without an owner stands under "(no owner)", and is not counted as one of them. The last
    two are there only if they have memory.

    >>> largest_owners({"kv cache": 4096, "": 300, "weights": 512, "maps": 256}, 2)
    {'kv cache': 4096, 'weights': 512, '(no owner)': 300, '(other owners)': 256}
    """
    named = sorted(((name, held) for name, held in by_owner.items() if name), key=lambda it: -it[1])
    listed = dict(named[:most])
    rest = {NOBODY: by_owner.get("", 0), OTHERS: sum(held for _, held in named[most:])}
    for name, held in rest.items():
        if held:
            listed[name] = listed.get(name, 0) + held
    return listed
