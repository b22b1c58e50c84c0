"""Snapshots as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bfc.units import format_bytes

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import RegionInfo, Snapshot, TagInfo

FREE, SLACK, ASKED = "_", "x", "*"
UNMAPPED, LEAVING = ".", "~"
ROWS = 16
WIDTH = 72
CHUNKS_A_ROW = 8


class Extent(NamedTuple):
    """Memory that is drawn as one: a region, or all mapped memory of one reservation, together with
    the unmapped addresses before and between it."""

    start: int
    size: int
    regions: tuple[RegionInfo, ...]

    @property
    def bytes_reserved(self) -> int:
        return sum(region.size for region in self.regions)

    @property
    def bytes_in_use(self) -> int:
        chunks = (chunk for region in self.regions for chunk in region.chunks)
        return sum(chunk.size for chunk in chunks if chunk.in_use)

    @property
    def piece_count(self) -> int:
        return sum(1 + len(region.chunks) for region in self.regions)


def occupancy(snapshot: Snapshot, width: int = 100) -> str:
    """One line over all regions end to end. In a cell, requested bytes hide slack, and slack hides
    free memory.

    At a width of 100 each cell is as in TensorFlow's RenderOccupancy (TensorFlow's behaviour,
    2.13). Unmapped addresses are left out.
    """
    regions = awake(snapshot).regions
    extents = [Extent(region.ptr, region.size, (region,)) for region in regions]
    return _cells(extents, width) or "The allocator contains no memory."


def _cells(extents: Sequence[Extent], width: int) -> str:
    total = sum(extent.size for extent in extents)
    if not total:
        return ""
    cells = [UNMAPPED] * width

    def draw(mark: str, offset: int, size: int) -> None:
        if size:
            first, last = offset * width // total, (offset + size - 1) * width // total
            cells[first : last + 1] = mark * (last + 1 - first)

    placed = []
    start = 0
    for extent in extents:
        placed += [(start + region.ptr - extent.start, region) for region in extent.regions]
        start += extent.size
    for offset, region in placed:
        draw(FREE, offset, region.size)
    for mark in (LEAVING, ASKED):
        for offset, region in placed:
            for chunk in region.chunks:
                at = offset + chunk.ptr - region.ptr
                if mark == LEAVING and chunk.state == "leaving":
                    draw(LEAVING, at, chunk.size)
                elif mark == ASKED and chunk.in_use:
                    draw(SLACK, at + chunk.requested_size, chunk.size - chunk.requested_size)
                    draw(ASKED, at, chunk.requested_size)
    return "".join(cells)


def picture(snapshot: Snapshot) -> str:
    """The figures, then the regions. If there are many, it shows those with most in use, and the
    other ones in use on one line. A large region takes several lines. Mapped memory of one
    reservation is drawn together, with the addresses in between that are unmapped, or whose pages
    are used at other addresses. A view, whose pages were stitched together, has lines of its own.

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
    whole, snapshot = snapshot, awake(snapshot)
    live, free = whole.live_chunks(), snapshot.free_chunks()
    free_bytes = sum(chunk.size for chunk in free)
    lines = [_figures(whole, len(live))]
    if free:
        lines.append(
            f"free {format_bytes(free_bytes)} in {_count(len(free), 'chunk')}, the largest "
            f"{format_bytes(max(chunk.size for chunk in free))}, "
            f"fragmentation {stats.fragmentation:.1%}"
        )
    if whole.tags:
        lines.append("tags: " + ", ".join(map(_tag, whole.tags)))
    extents = _extents(snapshot.regions)
    ranked = sorted(extents, key=lambda extent: (-extent.bytes_in_use, -extent.bytes_reserved))
    lines += _drawn(ranked[:ROWS])
    others = [extent for extent in ranked[ROWS:] if extent.bytes_in_use]
    idle = ranked[ROWS + len(others) :]
    if others:
        lines.append(_others(sorted(others, key=lambda extent: extent.start)))
    if idle:
        size = format_bytes(sum(extent.bytes_reserved for extent in idle))
        lines.append(f"and {size} in {_count(len(idle), 'region')} with nothing in use")
    if ranked:
        lines.append(_legend(snapshot))
    return "\n".join(lines)


def awake(snapshot: Snapshot) -> Snapshot:
    """The snapshot without regions that sleep."""
    return snapshot._with_regions(tuple(it for it in snapshot.regions if not it.asleep))


def _figures(snapshot: Snapshot, live: int) -> str:
    stats = snapshot.stats
    figures = (
        f"{snapshot.device}  {format_bytes(stats.bytes_in_use)} in use "
        f"({_count(live, 'chunk')}), {format_bytes(stats.pool_bytes)} reserved, "
        f"limit {format_bytes(stats.bytes_limit)}"
    )
    if stats.bytes_asleep:
        figures += f", {format_bytes(stats.bytes_asleep)} asleep"
    ranges = {region.reserved for region in snapshot.regions if region.reserved is not None}
    if ranges:
        figures += f", {format_bytes(sum(nbytes for _, nbytes in ranges))} of addresses reserved"
    pages = sum(len(region.pages) for region in snapshot.regions)
    views = sum(region.is_view and not region.asleep for region in snapshot.regions)
    if pages:
        figures += f", {_count(pages, 'page')} of {format_bytes(stats.pool_bytes // pages)}"
    if views:
        figures += f", {_count(views, 'view')} in use"
    return figures


def _tag(tag: TagInfo) -> str:
    asleep = ", asleep" if tag.asleep else ""
    return f"{tag.name!r} ({format_bytes(tag.bytes_in_use)} in use{asleep})"


def _legend(snapshot: Snapshot) -> str:
    legend = f"{'':25} {ASKED} asked for   {SLACK} slack   {FREE} free"
    if any(region.reserved is not None for region in snapshot.regions):
        legend += f"   {UNMAPPED} unmapped"
    if any(region.pages for region in snapshot.regions):
        legend += ", or used at other addresses"
    if any(chunk.state == "leaving" for chunk in snapshot.chunks()):
        legend += f"   {LEAVING} on its way back"
    return legend


def _extents(regions: Iterable[RegionInfo]) -> list[Extent]:
    """The extents in address order. That of a reservation ends with the last memory in it."""
    joined: dict[object, list[RegionInfo]] = {}
    for region in regions:
        joined.setdefault(region.reserved or region.ptr, []).append(region)
    extents = []
    for runs in joined.values():
        reserved = runs[0].reserved
        start = runs[0].ptr if reserved is None else reserved[0]
        extents.append(Extent(start, runs[-1].end - start, tuple(runs)))
    return extents


def _drawn(extents: list[Extent]) -> Iterator[str]:
    total = sum(extent.size for extent in extents)
    for extent in sorted(extents, key=lambda extent: extent.start):
        share, detail = ROWS * extent.size // total, extent.piece_count // CHUNKS_A_ROW
        yield from _rows(extent, min(share, detail) or 1)


def _others(extents: list[Extent]) -> str:
    """Regions end to end on one line."""
    size = format_bytes(sum(extent.bytes_reserved for extent in extents))
    return f"{f'{len(extents)} more':>13} {size:>11} |{_cells(extents, WIDTH)}|"


def _rows(extent: Extent, rows: int) -> list[str]:
    """An extent on one or more lines of equal bytes. The first line shows the bytes that have
    memory."""
    cells = _cells([extent], rows * WIDTH)
    lines = []
    for row in range(rows):
        address = extent.start + extent.size * row // rows
        size = format_bytes(extent.bytes_reserved) if row == 0 else ""
        line = f"{address:#013x} {size:>11} |{cells[row * WIDTH : (row + 1) * WIDTH]}|"
        lines.append(f"{line} view" if extent.regions[0].is_view else line)
    return lines


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
