"""Pages of a CUDA device that are stitched: each call of the driver fails once, at each
place. No step between the calls needs the GIL."""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import sys
import threading
import time

import pytest
from raw_cuda import MAPPING

import bfc
from bfc_cuda_emulator import Driver

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


SECOND = 1_000_000  # in microseconds
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def is_called_without_gil(emulated: Driver, pool: bfc.CachingAllocator, nbytes: int) -> bool:
    """Whether a request of another thread comes to the end of its calls while this thread keeps the
    GIL. That one asks after it has kept the GIL for longer than this one waits patiently for it: so
    it loses it where it first lets it go, and gets it back after a second at the soonest."""
    addresses: list[int] = []
    keep_gil = functools.partial(ctypes.PyDLL(None).usleep, SECOND + SECOND // 4)
    ask = functools.partial(pool.allocate_raw, nbytes)
    no_python_between = map(operator.call, (keep_gil, ask))
    thread = threading.Thread(target=functools.partial(addresses.extend, no_python_between))
    watched = type(emulated)(ctypes.PyDLL(emulated.library._name))  # its calls keep the GIL, too
    interval, made = sys.getswitchinterval(), 0
    emulated.clear()
    sys.setswitchinterval(1)
    try:
        thread.start()
        begun = time.monotonic()
        while not made and time.monotonic() < begun + 0.9:
            made = watched.count("cuMemSetAccess")
        late = time.monotonic() > begun + 1
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert addresses[1]
    return bool(made and not late)


def holds_pages(pool: bfc.CachingAllocator) -> None:
    for block in [pool.allocate_raw(2 * PAGE) for _ in range(10)][::2]:
        pool.deallocate_raw(block)


@pytest.mark.skipif(not HAS_GIL, reason="this Python has no GIL")
@pytest.mark.parametrize(
    "prepare", [None, holds_pages], ids=["pages are made", "a view is stitched"]
)
def test_pages_are_mapped_while_another_thread_keeps_the_gil(emulated, prepare) -> None:
    done = False
    for _ in range(5):  # this thread may itself not run for a second
        pool = bfc.CachingAllocator(
            bfc.CUDASubAllocator(), stitch=True, page_size=PAGE, memory_limit=20 * PAGE
        )
        pool.deallocate_raw(pool.allocate_raw(PAGE))  # by the first request it learns what maps
        if prepare is not None:
            prepare(pool)
        done = done or is_called_without_gil(emulated, pool, 7 * PAGE)
        assert pool.page_stats()["stitches"] == (prepare is not None)
        pool.close()
        if done:
            break
    assert done


@pytest.mark.skipif(not HAS_GIL, reason="this Python has no GIL")
def test_a_segment_grows_while_another_thread_keeps_the_gil(emulated) -> None:
    done = False
    for _ in range(5):  # as above
        pool = bfc.CachingAllocator(bfc.CUDASubAllocator(), settings="expandable_segments:True")
        held = pool.allocate_raw(11 * PAGE)  # it asks for a range, how long that is to be
        done = done or is_called_without_gil(emulated, pool, 37 * PAGE)
        assert emulated.count("cuMemCreate") == 3  # of 20 MiB, behind the 18 that are left
        pool.deallocate_raw(held)
        pool.close()
        if done:
            break
    assert done
