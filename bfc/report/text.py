"""Snapshots as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfc.units import format_bytes

if TYPE_CHECKING:
    from bfc.report.snapshot import RegionInfo, Snapshot

FREE, SLACK, ASKED = "_", "x", "*"
ROWS = 16
WIDTH = 72
CHUNKS_A_ROW = 8


def occupancy(snapshot: Snapshot, width: int = 100) -> str:
    """One line over all regions end to end; what was asked for wins a cell over slack, slack over
    free memory.

    Cell by cell as TensorFlow's RenderOccupancy at its width of 100 (TensorFlow's behaviour, 2.13).
    """
    return _cells(snapshot.regions, width) or "The allocator contains no memory."


def _cells(regions: tuple[RegionInfo, ...], width: int) -> str:
    total = sum(region.size for region in regions)
    if not total:
        return ""
    cells = [FREE] * width

    def draw(mark: str, offset: int, size: int) -> None:
        if size:
            first, last = offset * width // total, (offset + size - 1) * width // total
            cells[first : last + 1] = mark * (last + 1 - first)

    start = 0
    for region in regions:
        for chunk in region.chunks:
            if chunk.in_use:
                offset = start + chunk.ptr - region.ptr
                draw(SLACK, offset + chunk.requested_size, chunk.size - chunk.requested_size)
                draw(ASKED, offset, chunk.requested_size)
        start += region.size
    return "".join(cells)


def picture(snapshot: Snapshot) -> str:
    """The figures, then the regions; where there are many, those with most in use, and what is in
    use in the others as one line. A large region takes several lines.

    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 KiB"))
    >>> kept = allocator.allocate_raw(20000)
    >>> print(allocator.snapshot())
    simulated:0  19.8 KiB in use (1 chunk), 64.0 KiB reserved, limit 64.0 KiB
    free 44.2 KiB in 1 chunk, the largest 44.2 KiB, fragmentation 0.0%
    0x10000000000    64.0 KiB |**********************x_________________________________________________|
                              * asked for   x slack   _ free
    """  # noqa: E501 - a row of the picture is 104 characters wide
    stats = snapshot.stats
    live, free = snapshot.live_chunks(), snapshot.free_chunks()
    free_bytes = sum(chunk.size for chunk in free)
    lines = [
        (
            f"{snapshot.device}  {format_bytes(stats.bytes_in_use)} in use "
            f"({_count(len(live), 'chunk')}), {format_bytes(stats.pool_bytes)} reserved, "
            f"limit {format_bytes(stats.bytes_limit)}"
        )
    ]
    if free:
        lines.append(
            f"free {format_bytes(free_bytes)} in {_count(len(free), 'chunk')}, the largest "
            f"{format_bytes(max(chunk.size for chunk in free))}, "
            f"fragmentation {stats.fragmentation:.1%}"
        )
    ranked = sorted(snapshot.regions, key=lambda region: (-_in_use(region), -region.size))
    lines += _drawn(ranked[:ROWS])
    others = [region for region in ranked[ROWS:] if _in_use(region)]
    idle = ranked[ROWS + len(others) :]
    if others:
        lines.append(_others(sorted(others, key=lambda region: region.ptr)))
    if idle:
        size = format_bytes(sum(region.size for region in idle))
        lines.append(f"and {size} in {_count(len(idle), 'region')} with nothing in use")
    if ranked:
        lines.append(f"{'':25} {ASKED} asked for   {SLACK} slack   {FREE} free")
    return "\n".join(lines)


def _in_use(region: RegionInfo) -> int:
    return sum(chunk.size for chunk in region.chunks if chunk.in_use)


def _drawn(regions: list[RegionInfo]) -> Iterator[str]:
    total = sum(region.size for region in regions)
    for region in sorted(regions, key=lambda region: region.ptr):
        share, detail = ROWS * region.size // total, len(region.chunks) // CHUNKS_A_ROW
        yield from _rows(region, min(share, detail) or 1)


def _others(regions: list[RegionInfo]) -> str:
    """Regions end to end on one line."""
    size = format_bytes(sum(region.size for region in regions))
    return f"{f'{len(regions)} more':>13} {size:>11} |{_cells(tuple(regions), WIDTH)}|"


def _rows(region: RegionInfo, rows: int) -> list[str]:
    """A region over one or more lines of equal bytes; the first bears its size."""
    cells = _cells((region,), rows * WIDTH)
    lines = []
    for row in range(rows):
        address = region.ptr + region.size * row // rows
        size = format_bytes(region.size) if row == 0 else ""
        lines.append(f"{address:#013x} {size:>11} |{cells[row * WIDTH : (row + 1) * WIDTH]}|")
    return lines


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
