"""The figures of a caching allocator as a table."""

from __future__ import annotations

from collections.abc import Mapping

from bfc.pytorch.words import FIELDS

WIDTH = 75
HEADINGS = ("Now", "Peak", "Added", "Removed")
POOLS = {"large_pool": "in the large pool", "small_pool": "in the small pool"}

BYTES = {
    "allocated_bytes": "Bytes handed out",
    "active_bytes": "Bytes active",
    "requested_bytes": "Bytes asked for",
    "reserved_bytes": "Bytes reserved",
    "inactive_split_bytes": "Bytes free in splits",
}
COUNTS = {
    "allocation": "Blocks handed out",
    "active": "Blocks active",
    "segment": "Regions",
    "inactive_split": "Blocks free in splits",
}
OVERSIZE = {
    "oversize_allocations": "Oversize blocks",
    "oversize_segments": "Oversize regions",
}

#: What PyTorch 2.13 and later count for each private pool.
BY_POOL = "reserved_bytes_by_private_pools"

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COUNT_UNITS = ("", "K", "M")


def summary(stats: Mapping[str, int], device: str | int, abbreviated: bool = False) -> str:
    """`memory_stats()` as a table, each line WIDTH characters between its two bars.

    First the bytes, then the counts, each in total and by pool; `abbreviated` leaves the pools out.
    "Active" is what is handed out or waits for a stream. "Free in splits" is what cannot be given
    back, because its neighbours are in use. `device` is its name, or its number. The total in a
    column chooses the unit, also for the rows below it. Fractions of a unit are cut off (PyTorch's
    behaviour, 3.2). A figure that is missing counts as 0. At the end are what each private pool has
    reserved, and the requests that were refused before the device was asked, where there are any.

    >>> print("\\n".join(summary({"num_ooms": 2}, "simulated:0").splitlines()[:4]))
    |===========================================================================|
    |                    bfc caching allocator, simulated:0                     |
    |---------------------------------------------------------------------------|
    |          Out of memory: 2          |          Growth retries: 0           |
    """
    name = f"device {device}" if isinstance(device, int) else device
    ooms = f"Out of memory: {stats.get('num_ooms', 0)}"
    retries = f"Growth retries: {stats.get('num_alloc_retries', 0)}"
    rows = [
        "=" * WIDTH,
        f"{f'bfc caching allocator, {name}':^{WIDTH}.{WIDTH}}",
        "-" * WIDTH,
        f"{ooms:^36}|{retries:^38}",
        "=" * WIDTH,
        _row("", [f"{heading:^10}" for heading in HEADINGS]),
    ]
    pools = {} if abbreviated else POOLS
    for groups, is_bytes in ((BYTES, True), (COUNTS, False)):
        for group, title in groups.items():
            totals = _figures(stats, f"{group}.all")
            rows += ["-" * WIDTH, _row(title, _cells(totals, totals, is_bytes))]
            for pool, where in pools.items():
                figures = _figures(stats, f"{group}.{pool}")
                rows.append(_row(f"{where:>21}", _cells(figures, totals, is_bytes)))
    for group, title in OVERSIZE.items():
        totals = _figures(stats, group)
        rows += ["-" * WIDTH, _row(title, _cells(totals, totals, False))]
    for pool in {} if abbreviated else _pools(stats):
        totals = _figures(stats, f"{BY_POOL}.{pool}.all")
        rows += ["-" * WIDTH, _row(f"Reserved by pool {pool}"[:21], _cells(totals, totals, True))]
    if rejected := stats.get("num_oom_rejections", 0):
        rows += ["-" * WIDTH, f"{f'Refused before the device was asked: {rejected}':^{WIDTH}}"]
    return "\n".join(f"|{row}|" for row in [*rows, "=" * WIDTH])


def _pools(stats: Mapping[str, int]) -> dict[str, None]:
    """The ids of the private pools that the figures name, in their order."""
    first = f"{BY_POOL}."
    found = (name[len(first) :] for name in stats if name.startswith(first))
    return dict.fromkeys(name.split(".")[0] for name in found)


def _figures(stats: Mapping[str, int], prefix: str) -> list[int]:
    return [stats.get(f"{prefix}.{field}", 0) for field in FIELDS]


def _row(title: str, cells: list[str]) -> str:
    return "|".join(f" {cell} " for cell in [f"{title:21}", *cells])


def _cells(figures: list[int], totals: list[int], is_bytes: bool) -> list[str]:
    write = _bytes if is_bytes else _count
    return [write(figure, total) for figure, total in zip(figures, totals, strict=True)]


def _bytes(nbytes: int, total: int) -> str:
    """Ten characters, in the unit that suits the total."""
    figure, unit = _scaled(nbytes, total, BYTE_UNITS, 1024, 768 * 1024)
    return f"{figure:6} {unit:3}"


def _count(n: int, total: int) -> str:
    figure, unit = _scaled(n, total, COUNT_UNITS, 1000, 750 * 1000)
    return f"{figure:7} {unit:1} "


def _scaled(
    figure: int, total: int, units: tuple[str, ...], step: int, most: int
) -> tuple[int, str]:
    """The figure in the unit in which the total is below `most`, and that unit."""
    at = 0
    while total >= most and at + 1 < len(units):
        figure, total, at = figure // step, total // step, at + 1
    return figure, units[at]
