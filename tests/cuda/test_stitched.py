"""Pages of a CUDA device that are stitched: each call of the driver fails once, at each place."""

from __future__ import annotations

import gc

import pytest
from raw_cuda import MAPPING

import bfc

PAGE = 2 << 20


def a_life(pool: bfc.CachingAllocator) -> None:
    """Pages are made, stitched, and stitched again, for which a view is taken apart."""
    blocks = [pool.allocate(2 * PAGE) for _ in range(6)]
    for _ in range(3):
        for buffer in blocks[::2]:
            buffer.free()
        del blocks[::2]
        blocks += [pool.allocate(3 * PAGE), pool.allocate(2 * PAGE)]
    for buffer in blocks:
        buffer.free()
    pool.release_free_regions()


@pytest.mark.parametrize("name", MAPPING)
def test_whichever_call_fails_nothing_is_lost(emulated, name: str) -> None:
    places, errors = 0, 0
    reached = True
    while reached:
        source = bfc.CUDASubAllocator()
        pool = bfc.CachingAllocator(source, stitch=True, page_size=PAGE, memory_limit=14 * PAGE)
        emulated.clear()
        emulated.fail(name, "CUDA_ERROR_UNKNOWN", at=places + 1)
        try:
            a_life(pool)
        except (bfc.SubAllocatorError, MemoryError) as error:
            errors += "CUDA_ERROR_UNKNOWN" in str(error)
        reached = emulated.count(name) > places
        places += reached
        emulated.clear()
        gc.collect()
        pool.check()
        a_life(pool)
        pool.release_free_regions()
        assert (pool.stats().bytes_in_use, pool.stats().pool_bytes) == (0, 0)
        assert source.live_bytes == 0
        pool.close()
    assert places > (name != MAPPING[-1])
    assert errors
