"""What an allocator says when it refuses: the figures, and what to try."""

from __future__ import annotations

from bfc.errors import OutOfMemoryError, PagesInUse
from bfc.snapshots.snapshot import Stats
from bfc.units import format_bytes

#: No device maps smaller pages.
SMALLEST_PAGE = 2 << 20


def out_of_memory(
    requested: int,
    stats: Stats,
    total_bytes: int,
    refused_by: str = "",
    largest_block: int | None = None,
    against_pieces: str = "",
    pages: PagesInUse | None = None,
) -> OutOfMemoryError:
    """The error for a request without room, and what to try. The device has `total_bytes`, and
    gives at most `largest_block` at a time. `against_pieces`: an option of the policy
    against fragmentation that is not in use. `pages`: the use of pages, if pages are stitched."""
    in_use = max(0, stats.bytes_in_use - stats.bytes_asleep)
    not_taken = format_bytes(max(0, stats.bytes_limit - stats.pool_bytes))
    return OutOfMemoryError(
        requested,
        in_use,
        stats.pool_bytes,
        stats.bytes_limit,
        stats.largest_free_block_bytes,
        stats.fragmentation,
        refused=refused_by or f"the memory limit, of which {not_taken} are not taken yet",
        advice=_advice(requested, stats, total_bytes, largest_block, against_pieces, pages),
        pages=pages,
        by_owner=stats.by_owner,
    )


def _advice(
    requested: int,
    stats: Stats,
    total_bytes: int,
    largest_block: int | None,
    against_pieces: str,
    pages: PagesInUse | None,
) -> tuple[str, ...]:
    lines = []
    if largest_block is not None and requested > largest_block:
        lines.append(
            f"several smaller requests: one allocation on this device holds at most "
            f"{format_bytes(largest_block)} ({largest_block} bytes), however much is free"
        )
    limit, waiting = format_bytes(stats.bytes_limit), stats.bytes_waiting_for_streams
    if requested > stats.bytes_limit:
        lines.append(f"a smaller request: it is above the limit of {limit}")
    if requested <= stats.pool_bytes - stats.bytes_in_use:
        lines.append(
            "less fragmentation: enough is free, but in pieces; "
            "print(allocator.snapshot()) shows what stands between them"
        )
        if against_pieces:
            lines.append(f"{against_pieces}, which joins such pieces")
        if pages is not None and pages.page_size > SMALLEST_PAGE:
            size = format_bytes(pages.page_size)
            lines.append(f"a page_size below {size}: only pages that are wholly free can be joined")
    if stats.bytes_limit < total_bytes:
        lines.append(f"a higher memory_limit: the device has {format_bytes(total_bytes)}")
    if waiting:
        lines.append(f"synchronising: {format_bytes(waiting)} wait for other streams")
    if not lines:
        lines.append("freeing something first: print(allocator.snapshot()) shows what is live")
    return tuple(lines)
