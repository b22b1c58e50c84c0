"""The arithmetic of sizes in C++ is that of the settings in Python, up to the largest numbers."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import cpp
import pytest

import bfc
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.sizes import ENTRIES, MIB

TOP = 1 << 64
#: From here on a request is refused unread.
TOO_LARGE = 1 << 60


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpp.built(Path(__file__).with_suffix(".cpp"), tmp_path_factory.mktemp("sizes"))


def in_cpp(program: Path, settings: CachingSettings, sizes: list[int]) -> list[tuple[int, int]]:
    lines = [f"large {settings.large_segment_size}"]
    for interval, divisions in enumerate(settings.roundup_power2_divisions):
        lines.append(f"bits {interval} {max(0, divisions.bit_length() - 1)}")
    text = "\n".join([*lines, *map(str, sizes)])
    run = subprocess.run(
        [str(program)], input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr[-4000:]
    pairs = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert len(pairs) == len(sizes)
    return pairs


def some_sizes(dice: random.Random) -> list[int]:
    edges = [512, MIB, 10 * MIB, 20 * MIB, *(1 << power for power in range(61))]
    sizes = [edge + change for edge in edges for change in (-513, -1, 0, 1, 512)]
    sizes += [dice.randrange(1 << dice.randrange(1, 61)) for _ in range(400)]
    return [size for size in sizes if 0 < size < TOO_LARGE]


@pytest.mark.parametrize("large", [11 * MIB, 20 * MIB, TOP - MIB])
@pytest.mark.parametrize(
    "divisions",
    [(0,), (1,), (2,), (8,), (1 << 54,), (1 << 55,), (1 << 63,), (0, 1 << 62, 4, 1 << 55)],
)
def test_sizes_in_cpp_are_those_in_python(program: Path, large: int, divisions: tuple[int, ...]):
    settings = CachingSettings(
        roundup_power2_divisions=(divisions * ENTRIES)[:ENTRIES],
        large_segment_size=large,
        max_non_split_rounding=large,
    )
    sizes = some_sizes(random.Random(1))
    expected = [(settings.round_size(size), settings.segment_size(size)) for size in sizes]
    found = in_cpp(program, settings, sizes)
    assert [(n, *e) for n, e in zip(sizes, found, strict=True)] == [
        (n, *e) for n, e in zip(sizes, expected, strict=True)
    ]


def test_what_would_wrap_is_the_largest_number(program: Path):
    """No request is so large; a smaller block than asked for must not come of one."""
    sizes = [TOP - 1, TOP - 511, TOP - 512, TOP - (2 << 20), TOP - (2 << 20) + 1, TOP // 2 + 1]
    divided = CachingSettings(roundup_power2_divisions=(2,) * ENTRIES)
    for settings in (CachingSettings(), divided):
        for size, (block, segment) in zip(sizes, in_cpp(program, settings, sizes), strict=True):
            assert size <= block <= segment < TOP


@pytest.mark.parametrize("divisions", [1 << 54, 1 << 55, 1 << 63])
def test_a_block_of_absurd_divisions_is_a_power_of_two(divisions: int):
    settings = CachingSettings().apply(f"roundup_power2_divisions:{divisions}")
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings=settings) as allocator:
        for size in (700, 5 * MIB):
            address = allocator.allocate_raw(size)
            assert allocator.allocated_size(address) == settings.round_size(size)
            allocator.deallocate_raw(address)
    if divisions > 1 << 54:
        assert settings.round_size(5 * MIB) == 8 * MIB


def largest() -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator(TOP // 2 - 1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [bfc.HostSubAllocator, largest])
def test_the_largest_settings_wrap_nowhere(strict: bool, make):
    """A segment of 2**64 - 2**20 bytes is refused, an oversize block with so much slack is used."""
    top = TOP // MIB - 1
    text = f"large_segment_size_mb:{top},max_split_size_mb:{top},max_non_split_rounding_mb:{top}"
    with bfc.CachingAllocator(make(), settings=text, strict=strict) as allocator:
        small = allocator.allocate_raw(1000)  # the pool is not empty then
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(5 * MIB)
        stats = allocator.stats()
        assert (stats.pool_bytes, stats.bytes_in_use) == (2 * MIB, 1024)
        allocator.deallocate_raw(small)
    text = f"max_split_size_mb:20,max_non_split_rounding_mb:{top}"
    with bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("1 GiB"), settings=text, strict=strict
    ) as allocator:
        large = allocator.allocate_raw(400 * MIB)
        allocator.deallocate_raw(large)
        assert allocator.allocate_raw(30 * MIB) == large
        allocator.deallocate_raw(large)
