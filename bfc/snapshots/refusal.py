"""What an allocator says when it refuses: the figures, what to try, and what is in its memory."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Sequence

from bfc.errors import OutOfMemoryError, PagesInUse
from bfc.snapshots.memory_report import MOST_CHUNKS, chunk_count, report
from bfc.snapshots.snapshot import Snapshot, Stats
from bfc.units import format_bytes

#: No device maps smaller pages.
SMALLEST_PAGE = 2 << 20
MODES = ("short", "full")
#: A program that catches its errors may be refused without end.
MOST_FILES = 10

_VARIABLE = "BFC_OOM_REPORT"
_chosen: str | None = None
_file_numbers = itertools.count(1)


def set_oom_report(mode: str | None) -> str:
    """Choose how much an `OutOfMemoryError` says, in every allocator of the process.

    Parameters
    ----------
    mode : {"short", "full", None}
        "short", the default, is the figures and what to try. "full" adds what is in the memory:
        bins, chunks by size, a picture, owners, and the lines of the program where `record_history`
        keeps them. None leaves it to the environment variable `BFC_OOM_REPORT`, as at the start.

    Returns
    -------
    str
        The mode that was in force before.

    Raises
    ------
    ValueError
        If `mode` is not one of these.

    Notes
    -----
    If the allocator has more than 24 chunks, the error names a file in the folder for temporary
    files (`tempfile.gettempdir()`, set by `TMPDIR`) with every chunk and all rows of the tables. A
    process writes at most 10 such files, which nobody deletes. If one cannot be written, the error
    says so. If the host has no memory for a report, the error is the short one.

    Requests that do not raise get no report: `try_allocate`, a replay, and PyTorch's requests
    without the GIL.

    Cost: nothing until a request is refused; then some microseconds for each chunk.

    Source: TensorFlow's `DumpMemoryLog` (TensorFlow's behaviour, 2.14), which goes to the log.

    Examples
    --------
    >>> import bfc
    >>> before = bfc.set_oom_report("full")
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("2 MiB"))
    >>> with bfc.owner("weights"):
    ...     kept = allocator.allocate("600 KiB")
    >>> try:
    ...     allocator.allocate("1500 KiB")
    ... except bfc.OutOfMemoryError as error:
    ...     print(error.report)  # the end of str(error)
    bins by the size of a chunk; a request of 1.46 MiB looks from bin 12 on
      bin       from  in use      bytes  asked for  free      bytes
       11  512.0 KiB       1  600.0 KiB  600.0 KiB     0        0 B
       12   1.00 MiB       0        0 B        0 B     1   1.41 MiB
    in use by size
               1 x  600.0 KiB =  600.0 KiB
    free by size
               1 x   1.41 MiB =   1.41 MiB
    all regions end to end: * asked for   x slack   _ free   ~ on its way back
      ******************************______________________________________________________________________
    in use by owner
       600.0 KiB in      1  weights
    chunks
      0x10000000000   in use  600.0 KiB  asked for 614400  weights
      0x10000096000     free   1.41 MiB
    >>> bfc.set_oom_report(before)
    'full'
    """
    global _chosen
    if mode is not None and mode not in MODES:
        raise ValueError(f"an out-of-memory report is 'short' or 'full', not {mode!r}")
    before, _chosen = _mode(), mode
    return before


def _mode() -> str:
    chosen = _chosen or os.environ.get(_VARIABLE, "").strip().lower()
    return chosen if chosen in MODES else MODES[0]


def with_report(error: OutOfMemoryError, look: Callable[[], Snapshot]) -> OutOfMemoryError:
    """The error with what is in the memory, if that was asked for and can be had. `look` takes a
    snapshot."""
    try:
        if _mode() != "full":
            return _remarked(error)
        shown = look()
        written = _written(error, shown) if chunk_count(shown) > MOST_CHUNKS else ("", None)
        return error.reported(report(shown, error.requested), *written)
    except (MemoryError, RecursionError):
        return error
    except Exception as fault:  # the request is refused all the same, and for another reason
        return error.reported(f"the memory cannot be shown: {type(fault).__name__}: {fault}")


def _remarked(error: OutOfMemoryError) -> OutOfMemoryError:
    """The error, which says so if the environment asks for a mode that there is not."""
    asked = os.environ.get(_VARIABLE, "").strip()
    if _chosen or not asked or asked.lower() in MODES:
        return error
    return error.reported("", f"{_VARIABLE} is 'short' or 'full', not {asked!r}")


def _written(error: OutOfMemoryError, shown: Snapshot) -> tuple[str, str | None]:
    """Writes the whole report to a file. Returns a remark on it, and the file's name."""
    if next(_file_numbers) > MOST_FILES:
        return f"no file: this process has written {MOST_FILES} of them", None
    text = f"{error}\n\n{report(shown, error.requested, rows=None)}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            prefix=f"bfc-oom-{os.getpid()}-",
            suffix=".txt",
            delete=False,
        ) as file:
            file.write(text)
    except OSError as fault:
        return f"no file: {fault}", None
    return f"all {chunk_count(shown)} chunks in {file.name}", file.name


def out_of_memory(
    requested: int,
    stats: Stats,
    total_bytes: int,
    refused_by: str = "",
    largest_block: int | None = None,
    against_pieces: str = "",
    pages: PagesInUse | None = None,
    look: Callable[[], Snapshot] | None = None,
    waking: Sequence[str] = (),
) -> OutOfMemoryError:
    """The error for a request without room, and what to try. The device has `total_bytes`, and
    gives at most `largest_block` at a time. `against_pieces`: an option of the policy
    against fragmentation that is not in use. `pages`: the use of pages, if pages are stitched.
    `look` takes a snapshot, where the error may show one. `waking`: tags that were to wake."""
    in_use = max(0, stats.bytes_in_use - stats.bytes_asleep)
    not_taken = format_bytes(limit_left(stats))
    advice = _advice(
        requested, stats, total_bytes, largest_block, against_pieces, pages, bool(refused_by)
    )
    if waking:
        again = f"wake({', '.join(map(repr, waking))}) again"
        advice = (f"letting other tags sleep, or freeing something, and {again}", *advice)
    error = OutOfMemoryError(
        requested,
        in_use,
        stats.pool_bytes,
        stats.bytes_limit,
        stats.largest_free_block_bytes,
        stats.fragmentation,
        refused=refused_by or f"the memory limit, of which {not_taken} are not taken yet",
        advice=advice,
        pages=pages,
        by_owner=stats.by_owner,
    )
    return error if look is None else with_report(error, look)


def _advice(
    requested: int,
    stats: Stats,
    total_bytes: int,
    largest_block: int | None,
    against_pieces: str,
    pages: PagesInUse | None,
    by_device: bool,
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
    free_pages = pages.pages - pages.in_use if pages is not None else 0
    if pages is not None and 0 < requested <= free_pages * pages.page_size:
        lines.append(
            f"memory that others keep: {free_pages} pages are wholly free, but belong to a stream "
            f"that captures a graph, to a tag, or to a plan; release_free_regions() and "
            f"use_plan(None) give up what nothing lives in"
        )
    elif requested <= stats.pool_bytes - stats.bytes_in_use:
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
    is_short = by_device and largest_block is None and 0 < requested <= limit_left(stats)
    if not lines and not (is_short and stats.bytes_in_use <= stats.bytes_asleep):
        lines.append("freeing something first: print(allocator.snapshot()) shows what is live")
    if is_short:
        lines.append(
            f"what others hold: this pool has taken {format_bytes(stats.pool_bytes)} of its limit "
            f"of {limit}, and the device has no {format_bytes(requested)} left; "
            "release_free_regions() of other pools on it gives back what they cache, and other "
            "programs may use some"
        )
    return tuple(lines)


def limit_left(stats: Stats) -> int:
    """The bytes that a pool may still take."""
    return max(0, stats.bytes_limit - stats.pool_bytes)
