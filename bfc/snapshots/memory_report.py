"""What is in an allocator's memory, as tables: the report of a refused request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from bfc.snapshots.figures import NOBODY
from bfc.snapshots.snapshot import ChunkInfo, Snapshot, bin_index
from bfc.snapshots.text import awake
from bfc.units import format_bytes

#: How many rows of a table stand in an error. A file has all of them.
ROWS = 10
#: So many chunks are listed in an error.
MOST_CHUNKS = 24
LEGEND = "* asked for   x slack   _ free   ~ on its way back"


def chunk_count(snapshot: Snapshot) -> int:
    """How many chunks `report(snapshot, requested)` lists."""
    return sum(len(region.chunks) for region in awake(snapshot).regions)


def report(snapshot: Snapshot, requested: int, *, rows: int | None = ROWS) -> str:
    """What DumpMemoryLog of TensorFlow shows (TensorFlow's behaviour, 2.14), and owners and lines.

    `rows`: how many each table has at most; None: all, and every chunk is listed. Memory that
    sleeps is left out.

    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    >>> kept = [allocator.allocate_raw(300), allocator.allocate_raw(300)]
    >>> print(report(allocator.snapshot(), 2 << 20))
    bins by the size of a chunk; a request of 2.00 MiB looks from bin 13 on
      bin       from  in use      bytes  asked for  free      bytes
        1      512 B       2    1.0 KiB      600 B     0        0 B
       11  512.0 KiB       0        0 B        0 B     1 1023.0 KiB
    in use by size
               2 x      512 B =    1.0 KiB
    free by size
               1 x 1023.0 KiB = 1023.0 KiB
    all regions end to end: * asked for   x slack   _ free   ~ on its way back
      *___________________________________________________________________________________________________
    chunks
      0x10000000000   in use      512 B  asked for 300
      0x10000000200   in use      512 B  asked for 300
      0x10000000400     free 1023.0 KiB
    """
    shown = awake(snapshot)
    chunks = list(shown.chunks())
    live = [chunk for chunk in chunks if chunk.in_use]
    lines = [_heading(requested), *_bins(shown)]
    lines += ["in use by size", *_sizes(live, rows)]
    lines += ["free by size", *_sizes((chunk for chunk in chunks if not chunk.in_use), rows)]
    lines += [f"all regions end to end: {LEGEND}", f"  {shown.occupancy()}"]
    if any(chunk.owner for chunk in live):
        lines += ["in use by owner", *_groups(((it.owner or NOBODY, it) for it in live), rows)]
    if any(chunk.frames for chunk in live):
        lines += ["in use by line", *_groups(((_line_of(it), it) for it in live), rows)]
    if rows is None or len(chunks) <= MOST_CHUNKS:
        lines += ["chunks", *map(_row, chunks)]
    return "\n".join(lines)


def _heading(requested: int) -> str:
    return (
        f"bins by the size of a chunk; a request of {format_bytes(requested)} looks from bin "
        f"{bin_index(requested)} on"
    )


def _bins(snapshot: Snapshot) -> Iterator[str]:
    yield "  bin       from  in use      bytes  asked for  free      bytes"
    for it in snapshot.bins:
        if it.total_chunks_in_bin:
            free = it.total_chunks_in_bin - it.total_chunks_in_use
            yield (
                f"  {it.bin:3} {format_bytes(256 << it.bin):>10} {it.total_chunks_in_use:7} "
                f"{format_bytes(it.total_bytes_in_use):>10} "
                f"{format_bytes(it.total_requested_bytes_in_use):>10} {free:5} "
                f"{format_bytes(it.total_bytes_in_bin - it.total_bytes_in_use):>10}"
            )


def _sizes(chunks: Iterable[ChunkInfo], rows: int | None) -> Iterator[str]:
    """How many chunks there are of each size, those with the most bytes first."""
    counts = Counter(chunk.size for chunk in chunks)
    ordered = sorted(counts.items(), key=lambda item: (-item[0] * item[1], item[0]))
    for size, count in ordered[:rows]:
        total = format_bytes(size * count)
        yield f"  {count:10} x {format_bytes(size):>10} = {total:>10}"
    yield from _rest([size * count for size, count in ordered[len(ordered[:rows]) :]], "sizes")
    if not ordered:
        yield "           none"


def _groups(named: Iterable[tuple[str, ChunkInfo]], rows: int | None) -> Iterator[str]:
    """The bytes and the number of chunks of each name, the most bytes first."""
    held: defaultdict[str, list[int]] = defaultdict(list)
    for name, chunk in named:
        held[name].append(chunk.size)
    ordered = sorted(held.items(), key=lambda item: -sum(item[1]))
    for name, sizes in ordered[:rows]:
        text = " ".join(name.split())
        yield f"  {format_bytes(sum(sizes)):>10} in {len(sizes):6}  {text}"
    yield from _rest([sum(sizes) for _name, sizes in ordered[len(ordered[:rows]) :]], "more")


def _rest(left_out: Sequence[int], what: str) -> list[str]:
    """The line for the rows of a table that are left out."""
    if not left_out:
        return []
    return [f"  {format_bytes(sum(left_out)):>10} in {len(left_out)} {what}, left out here"]


def _line_of(chunk: ChunkInfo) -> str:
    """The line of the program that allocated a chunk, with the line that called it."""
    places = (f"{it.filename}:{it.line} {it.name}" for it in chunk.frames[:2])
    return ", called at ".join(places) or "(line not known)"


def _row(chunk: ChunkInfo) -> str:
    row = f"  {chunk.ptr:#013x} {chunk.state:>8} {format_bytes(chunk.size):>10}"
    if chunk.in_use:
        row += f"  asked for {chunk.requested_size}"
    if chunk.stream:
        row += f"  stream {chunk.stream:#x}"
    if chunk.owner:
        row += f"  {' '.join(chunk.owner.split())}"
    return row
