"""The table of a caching allocator's figures."""

from __future__ import annotations

import pytest

from bench.peers.torch import FIELDS, GROUPS, STATS
from bfc.snapshots.summary import BYTES, COUNTS, OVERSIZE, POOLS, WIDTH, summary

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def cells(table: str, title: str) -> list[str]:
    """The four figures of the first row with this title."""
    row = next(line for line in table.splitlines() if line.startswith(f"| {title:21} |"))
    return [" ".join(cell.split()) for cell in row.strip("|").split("|")[1:]]


def first(value: int, group: str = "allocated_bytes") -> str:
    title = (BYTES | COUNTS)[group]
    return cells(summary({f"{group}.all.current": value}, 0), title)[0]


SMALL = {
    "num_ooms": 1,
    "num_alloc_retries": 2,
    "allocated_bytes.all.current": 800 * KIB,
    "allocated_bytes.all.peak": 2 * MIB,
    "allocated_bytes.all.allocated": 3 * GIB,
    "allocated_bytes.all.freed": 700,
    "allocated_bytes.large_pool.allocated": 2 * GIB + MIB - 1,
    "allocated_bytes.small_pool.current": 1535,
    "allocation.all.allocated": 1_234_567,
    "allocation.large_pool.allocated": 1999,
    "oversize_segments.peak": 4,
}
SMALL_TABLE = """\
|===========================================================================|
|                    bfc caching allocator, simulated:0                     |
|---------------------------------------------------------------------------|
|          Out of memory: 1          |          Growth retries: 2           |
|===========================================================================|
|                       |    Now     |    Peak    |   Added    |  Removed   |
|---------------------------------------------------------------------------|
| Bytes handed out      |    800 KiB |   2048 KiB |   3072 MiB |    700 B   |
|     in the large pool |      0 KiB |      0 KiB |   2048 MiB |      0 B   |
|     in the small pool |      1 KiB |      0 KiB |      0 MiB |      0 B   |
|---------------------------------------------------------------------------|
| Bytes active          |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the large pool |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the small pool |      0 B   |      0 B   |      0 B   |      0 B   |
|---------------------------------------------------------------------------|
| Bytes asked for       |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the large pool |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the small pool |      0 B   |      0 B   |      0 B   |      0 B   |
|---------------------------------------------------------------------------|
| Bytes reserved        |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the large pool |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the small pool |      0 B   |      0 B   |      0 B   |      0 B   |
|---------------------------------------------------------------------------|
| Bytes free in splits  |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the large pool |      0 B   |      0 B   |      0 B   |      0 B   |
|     in the small pool |      0 B   |      0 B   |      0 B   |      0 B   |
|---------------------------------------------------------------------------|
| Blocks handed out     |       0    |       0    |    1234 K  |       0    |
|     in the large pool |       0    |       0    |       1 K  |       0    |
|     in the small pool |       0    |       0    |       0 K  |       0    |
|---------------------------------------------------------------------------|
| Blocks active         |       0    |       0    |       0    |       0    |
|     in the large pool |       0    |       0    |       0    |       0    |
|     in the small pool |       0    |       0    |       0    |       0    |
|---------------------------------------------------------------------------|
| Regions               |       0    |       0    |       0    |       0    |
|     in the large pool |       0    |       0    |       0    |       0    |
|     in the small pool |       0    |       0    |       0    |       0    |
|---------------------------------------------------------------------------|
| Blocks free in splits |       0    |       0    |       0    |       0    |
|     in the large pool |       0    |       0    |       0    |       0    |
|     in the small pool |       0    |       0    |       0    |       0    |
|---------------------------------------------------------------------------|
| Oversize blocks       |       0    |       0    |       0    |       0    |
|---------------------------------------------------------------------------|
| Oversize regions      |       0    |       4    |       0    |       0    |
|===========================================================================|"""


def test_the_whole_table():
    assert summary(SMALL, "simulated:0") == SMALL_TABLE


def test_the_short_table_is_the_whole_one_without_the_pools():
    kept = [line for line in SMALL_TABLE.splitlines() if "pool" not in line]
    assert summary(SMALL, "simulated:0", abbreviated=True).splitlines() == kept


def test_every_figure_finds_its_place():
    stats = {name: index for index, name in enumerate(STATS)}
    lines = summary(stats, 0).splitlines()
    groups = BYTES | COUNTS
    assert set(groups) == set(GROUPS)
    prefixes = [f"{group}.{pool}." for group in groups for pool in ("all", *POOLS)]
    prefixes += [f"{group}." for group in OVERSIZE]
    rows = [line.strip("|").split("|")[1:] for line in lines[7:] if line[1] == " "]
    shown = [[int(cell.split()[0]) for cell in row] for row in rows]
    assert shown == [[stats[prefix + field] for field in FIELDS] for prefix in prefixes]


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (768 * KIB - 1, "786431 B"),
        (768 * KIB, "768 KiB"),
        (768 * MIB - 1, "786431 KiB"),
        (768 * MIB, "768 MiB"),
        (768 * GIB, "768 GiB"),
        (768 * GIB * KIB, "768 TiB"),
        (768 * GIB * MIB, "768 PiB"),
        (2**63 - 1, "8191 PiB"),
    ],
)
def test_bytes_change_their_unit_at_768(nbytes: int, shown: str):
    assert first(nbytes) == shown


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (749_999, "749999"),
        (750_000, "750 K"),
        (749_999_999, "749999 K"),
        (750_000_000, "750 M"),
        (10**12, "1000000 M"),
    ],
)
def test_counts_change_their_unit_at_750(n: int, shown: str):
    assert first(n, "allocation") == shown


def test_each_column_has_a_unit_of_its_own():
    stats = {"reserved_bytes.all.current": MIB, "reserved_bytes.all.peak": GIB}
    assert cells(summary(stats, 0), "Bytes reserved") == ["1024 KiB", "1024 MiB", "0 B", "0 B"]


@pytest.mark.parametrize("device", [0, 15, "simulated:0", "x" * 200])
@pytest.mark.parametrize("abbreviated", [False, True])
@pytest.mark.parametrize("value", [0, 10**9, 2**62])
def test_every_line_is_as_wide_as_the_others(device: str | int, abbreviated: bool, value: int):
    stats = {name: value if "_bytes" in name or "num" in name else value % 10**12 for name in STATS}
    lines = summary(stats, device, abbreviated).splitlines()
    assert {len(line) for line in lines} == {WIDTH + 2}
    assert all(line[0] == line[-1] == "|" for line in lines)


def test_the_device_is_named():
    assert "device 3 " in summary({}, 3)
    assert "cuda:1 " in summary({}, "cuda:1")
