"""The temporary storage of CUB's algorithms on a device.

From CCCL's cub/device/dispatch/dispatch_radix_sort.cuh, dispatch_scan.cuh, dispatch_reduce.cuh,
dispatch_unique_by_key.cuh, dispatch_select_if.cuh, the tables in dispatch/tuning, and
cub/agent/single_pass_scan_operators.cuh (release 3.0.1, which comes with CUDA 13.0).
PyTorch counts the items in 64 bits. Sizes in recordings agree to the byte: 4096 and 8192 pairs
of 8 bytes and 8, sorted by 14 bits on a GPU of compute capability 8, take 72191 and 138751, and
what an H200 took for scans, sums and selections of 640 to 1048576 elements is in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.rules.interface import Doubt, Release, Workspace
from bfc_tools.predicting.rules.tensors import div_up

ALIGNMENT = 256
SHARED_MEMORY = 48 << 10
RADIX_BITS = 8
DIGITS = 1 << RADIX_BITS
OFFSET = 8
#: The bytes of the counters of a block that looks back, and of a portion.
ATOMIC_OFFSET = 4
MOST_IN_A_PORTION = (1 << 28) - 1
#: What CUB asks for where it needs nothing, so that a pointer is not null.
NOTHING = 1
#: A padding of one descriptor for each thread of a warp.
PADDING = 32
#: Threads and elements of 4 bytes of the sort of a single tile.
SINGLE_TILE = (256, 19)


def aliased(*sizes: int) -> int:
    """Several arrays in one allocation, each aligned."""
    total = sum(div_up(size, ALIGNMENT) * ALIGNMENT for size in sizes)
    return total + ALIGNMENT - 1 if total else NOTHING


def scaled(threads: int, items: int, size: int) -> int:
    """The elements of a tile, whose registers hold so many elements of 4 bytes."""
    items = max(1, items * 4 // max(4, size))
    return items * min(threads, div_up(SHARED_MEMORY // (size * items), 32) * 32)


def _onesweep(capability: tuple[int, int], key: int, value: int) -> tuple[int, int]:
    """Threads, and elements of 4 bytes a thread, of one sweep of the sort."""
    if capability >= (9, 0):
        if key == 8:
            return 384, 30 if 0 < value < 8 or not value else 24
        if key == 4:
            return 384, 19 if not value else 17 if value < 8 else 29
        return (512, 19) if not value else (512, 23) if key == 2 else (384, 18)
    if capability >= (8, 0):
        return 384, 17 if key == 4 and value else 21
    if capability >= (7, 0):
        return 256, 46 if key == value == 4 else 23
    return 256, 30


def radix_sort(count: int, key: int, value: int, bits: int, capability: tuple[int, int]) -> int:
    """The temporary storage of a radix sort, in bytes, of pairs of so many bytes, or of keys alone
    where `value` is 0. `bits` of the key are compared.

    Before compute capability 9.0, keys of 1 and 2 bytes are sorted by another algorithm, whose
    histograms depend on how many blocks fit on a multiprocessor: they are left out.

    >>> radix_sort(8192, 8, 8, 14, (8, 0)), radix_sort(2048, 8, 8, 14, (8, 0))
    (138751, 1)
    """
    dominant = max(key, value)
    if count <= scaled(*SINGLE_TILE, dominant):
        return NOTHING
    passes = div_up(bits, RADIX_BITS)
    others = (count * key, count * value) if passes > 1 else (0, 0)
    if key < 4 and capability < (9, 0):
        return aliased(*others, DIGITS * OFFSET)
    tile = scaled(*_onesweep(capability, key, value), dominant)
    portion = MOST_IN_A_PORTION // tile * tile
    portions = div_up(count, portion)
    blocks = div_up(min(count, portion), tile)
    return aliased(
        portions * passes * DIGITS * OFFSET,
        blocks * DIGITS * ATOMIC_OFFSET,
        *others,
        portions * passes * ATOMIC_OFFSET,
    )


#: What Thrust aligns arrays to.
THRUST_ALIGNMENT = 128


def thrust_sort(count: int, key: int, value: int, capability: tuple[int, int]) -> int:
    """The same for Thrust, which sorts numbers from one pair of arrays into another.

    >>> thrust_sort(5000, 8, 8, (9, 0)), thrust_sort(100_000, 8, 8, (9, 0))
    (99071, 1639423)
    """
    others = sum(div_up(count * size, ALIGNMENT) * ALIGNMENT for size in (key, value))
    storage = max(radix_sort(count, key, value, key * 8, capability) - others, NOTHING)
    arrays = (div_up(count * size, THRUST_ALIGNMENT) for size in (key, value))
    return storage + THRUST_ALIGNMENT * sum(arrays)


#: Threads of a block that sorts by merging, and the elements of 4 bytes of each.
MERGE_TILE = (256, 17)


def merge_sort(count: int, key: int, value: int) -> int:
    """The temporary storage of a sort by a comparison, in bytes: all once more, and where the
    blocks begin to merge.

    >>> merge_sort(81920, 8, 8), merge_sort(1_000_000, 8, 8)
    (1311231, 16002303)
    """
    threads, items = MERGE_TILE
    tile = threads * max(1, items * 4 // key)
    return aliased((div_up(count, tile) + 1) * ATOMIC_OFFSET, count * key, count * value)


def tiles(count: int, threads: int, items: int, size: int) -> int:
    """How many tiles a scan has, whose elements are scaled to what memory can deliver."""
    items = max(1, min(items * 4 // size, items * 2))
    threads = min(threads, div_up(SHARED_MEMORY // (size * items), 32) * 32)
    return div_up(count, threads * items)


def _described(tiles: int, size: int, cccl: int) -> int:
    """A descriptor for each tile, and a warp's of padding.

    A descriptor of values up to 8 bytes has the size of two of them; larger ones lie in arrays of
    their own. CCCL 3 aligns them for themselves, and then once more.
    """
    number = tiles + PADDING
    if size > 8:
        return aliased(aliased(number * 4, number * size, number * size))
    together = number * max(2 * size, 4)
    return aliased(aliased(together) if cccl >= 3 else together)


def scan(count: int, size: int, cccl: int) -> int:
    """The temporary storage of a scan of elements of `size` bytes, by the release of CCCL.

    >>> scan(81920, 8, 3), scan(81920, 8, 2)
    (2559, 2303)
    """
    return _described(tiles(count, 128, 15, size), size, cccl)


#: The elements of a tile where marks are summed up, of the lengths of runs, and of Thrust's runs.
MARKS, LENGTHS, RUNS = 3072, 768, 2304


def sum_of_marks(count: int) -> int:
    """The temporary storage of the places of elements among those that differ.

    >>> sum_of_marks(1000), sum_of_marks(1_000_000)
    (1023, 3583)
    """
    return aliased(aliased((div_up(count, MARKS) + PADDING) * 8))


def run_lengths(count: int) -> int:
    """The temporary storage of counting equal elements side by side.

    >>> run_lengths(1000), run_lengths(1_000_000)
    (1023, 21759)
    """
    return aliased((div_up(count, LENGTHS) + PADDING) * 16)


def runs(count: int) -> int:
    """The same as Thrust does it, by sums for each key.

    >>> runs(5000), runs(5_000_000)
    (1535, 36095)
    """
    return aliased(aliased((div_up(count, RUNS) + PADDING) * 16), 8)


def scan_in_order(count: int, size: int, sms: int) -> int:
    """What PyTorch's own scan takes that adds up in a fixed order: a sum for each block
    (ATen/cuda/cub.cuh, inclusive_deterministic_scan).

    >>> scan_in_order(300_000, 4, 132), scan_in_order(4_000_000, 4, 132)
    (148, 528)
    """
    threads = 128 if size >= 16 else 256 if size >= 8 else 512
    return min(sms, div_up(count, threads * 16)) * size


def scan_by_key(count: int, key: int, size: int) -> int:
    """The temporary storage of a scan of rows, each of which has a key of its own.

    A descriptor has a value and a flag, as two words of 8 bytes; the last key of each tile is kept.
    """
    number = tiles(count, 128, 8, size)  # or more: 16384 rows took 1279 bytes on an H100
    return aliased((number + PADDING) * 16, (number + 1) * key)


def _tuned(
    capability: tuple[int, int],
    of_10: tuple[int, int],
    of_9: tuple[int, int],
    of_8: tuple[int, int],
) -> tuple[int, int] | None:
    """Threads and elements of a thread, where there is a table; none for 8.6 to 8.9."""
    if capability >= (8, 6):
        return None if capability < (9, 0) else of_9 if capability < (10, 0) else of_10
    return of_8 if capability >= (8, 0) else None


def unique_by_key(
    count: int,
    key: int,
    cccl: int,
    capability: tuple[int, int],
    offset: int = OFFSET,
) -> int:
    """The temporary storage of finding the first of each run of keys, whose values have 4 bytes.
    What is counted has the size `offset`."""
    if key == 8:
        found = _tuned(capability, (384, 10), (640, 7), (256, 7))
    else:
        found = _tuned(capability, (512, 14), (512, 14), (256, 11))
    threads, items = found or (64, max(1, 44 // key))
    return _described(div_up(count, threads * items), offset, cccl)


def select_flagged(count: int, cccl: int, capability: tuple[int, int]) -> int:
    """The temporary storage of choosing those of `count` numbers of 8 bytes that are flagged."""
    threads, items = _tuned(capability, (320, 11), (384, 11), (384, 6)) or (128, 5)
    return _described(div_up(count, threads * items), 4, cccl)


#: Threads of a block that sums up, and the elements of each; up to one tile needs no second pass.
SUM_THREADS, SUM_ITEMS, BLOCKS_FOR_EACH = 256, 16, 5


def total(count: int, size: int, gpu: GPU) -> int:
    """The temporary storage of a sum in numbers of 4 bytes or less: one for each block."""
    if count <= SUM_THREADS * SUM_ITEMS:
        return NOTHING
    return aliased(gpu.sms * (gpu.threads_per_sm // SUM_THREADS) * BLOCKS_FOR_EACH * size)


def for_a_moment(size: int, what: str, doubt: Doubt | None = None) -> Iterator[Workspace | Release]:
    """Temporary storage, which is given back as soon as the algorithm was started."""
    workspace = Workspace(size, what=what, doubt=doubt)
    yield workspace
    yield Release(workspace)
