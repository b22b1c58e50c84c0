"""What stitching costs in time: `python -m bench.stitch_cost`.

The first table has the recorded traces, each on one stream, after six passes: by then no request
calls the driver. BFC with `virtual_memory` takes turns with BFC as TensorFlow has it, and with BFC
that splits every chunk, as stitching does. The second has one request that is stitched, by the
number of its pages, on a source that does nothing; its pages lie apart, each for itself, which is
the dearest case. The third has requests of seven pages that are stitched on the emulated CUDA
driver, where each also unmaps the view of an earlier one: the whole request, the same calls alone,
and the request beside a thread that runs Python; and an expandable segment that grows by seven
pages, alone and beside such a thread. They take turns, so look at the ratios of the least times,
and at how many take a millisecond: the emulator's maps are cheaper than a GPU's.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import bfc
from bench.histories import traces
from bench.report import geometric_mean, machine, say, spread
from bfc.devices import Availability

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB
ROOM = 80 * GIB
PASSES, REPEATS = 6, 9
PAGES = (4, 16, 64, 128, 256, 512)
STITCHES = 60
SEVEN, TURNS = 7, 100
PYTORCH_PAGE = 20 * MIB  # of an expandable segment
CONTENDERS: dict[str, dict[str, Any]] = {
    "BFC": {},
    "BFC, always split": {"fragmentation_fraction": 1e-12},
    "stitching": {"virtual_memory": True, "page_size": PAGE},
}


class Nothing(bfc.SubAllocator):
    """A source whose calls do nothing, and are builtins: what is left is the allocator's own."""

    total_bytes = 1 << 40
    supports_virtual_memory = Availability(True, "")
    mapping_granularity = PAGE

    def __init__(self) -> None:
        addresses, pages = itertools.count(1 << 44, 1 << 38), itertools.count(1)
        self.reserve = functools.partial(next, addresses)  # type: ignore[method-assign]
        self.create = functools.partial(next, pages)  # type: ignore[method-assign]
        for name in ("map", "set_access", "unmap", "unreserve", "order"):
            setattr(self, name, operator.is_)  # it takes two arguments, and keeps neither
        self.release = self.wait = [].append  # type: ignore[assignment,method-assign]

    def alloc(self, alignment: int, nbytes: int) -> None:
        return None

    def free(self, address: int, nbytes: int) -> None:
        pass


def report_hits() -> None:
    columns = "".join(f"{name:>26}" for name in CONTENDERS)
    say(f"{'ns an event':24}{columns}{'to BFC':>8}{'to split':>10}")
    ratios: list[list[float]] = []
    for name, recorded in traces():
        trace = bfc.Trace(recorded.op, recorded.id, recorded.size).closed()
        samples = settled(trace)
        middle = [statistics.median(each) for each in samples]
        ratios.append([middle[2] / middle[0], middle[2] / middle[1]])
        cells = "".join(f"{spread(each):>26}" for each in samples)
        say(f"{name:24}{cells}{ratios[-1][0]:8.2f}{ratios[-1][1]:10.2f}")
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    say(f"{'geometric mean':102}{means[0]:8.2f}{means[1]:10.2f}")


def settled(trace: bfc.Trace) -> list[list[float]]:
    """The times of an event, in turns, after the passes in which views are made."""
    allocators = []
    for options in CONTENDERS.values():
        allocators.append(bfc.BFCAllocator(bfc.SimulatedSubAllocator(ROOM), **options))
        for _ in range(PASSES):
            trace.replay(allocators[-1])
    samples: list[list[float]] = [[] for _ in allocators]
    for _ in range(REPEATS):
        for allocator, times in zip(allocators, samples, strict=True):
            times.append(trace.replay(allocator).seconds * 1e9 / len(trace.op))
    for allocator in allocators:
        allocator.close()
    return samples


def report_stitches() -> None:
    say()
    say(f"{'pages of the request':24}{'us a stitch':>26}{'ns a page more':>18}")
    before: tuple[int, float] | None = None
    for pages in PAGES:
        times = stitch(pages)
        more = "" if before is None else f"{slope(before, pages, min(times)):.0f}"
        say(f"{pages:<24}{spread(times):>26}{more:>18}")
        before = pages, min(times)


def slope(before: tuple[int, float], pages: int, least: float) -> float:
    return (least - before[1]) * 1e3 / (pages - before[0])


def stitch(pages: int) -> list[float]:
    """The microseconds of requests that are stitched, each of one page more than the one before."""
    allocator = bfc.BFCAllocator(
        Nothing(), virtual_memory=True, page_size=PAGE, memory_limit=1 << 36
    )
    blocks = [allocator.allocate_raw(PAGE) for _ in range(8 * pages + 4 * STITCHES)]
    for block in blocks[::2]:
        allocator.deallocate_raw(block)
    times = []
    for more in range(STITCHES):
        stitches = allocator.page_stats()["stitches"]
        begun = time.perf_counter()
        address = allocator.allocate_raw((pages + more) * PAGE)
        times.append((time.perf_counter() - begun) * 1e6)
        if allocator.page_stats()["stitches"] != stitches + 1:
            raise AssertionError("this request was not stitched")
        allocator.deallocate_raw(address)
    allocator.close()
    return times


class Stitched:
    """A full allocator on the emulated driver, of blocks of two pages."""

    def __init__(self) -> None:
        self.source = bfc.CUDASubAllocator()
        self.pool = bfc.CachingAllocator(
            self.source, stitch=True, page_size=PAGE, memory_limit=120 * PAGE
        )
        self.chosen = random.Random(1)
        self.blocks = [self.pool.allocate_raw(2 * PAGE) for _ in range(60)]

    def requests(self) -> list[float]:
        """The microseconds of some requests, each of which is stitched."""
        times = []
        for _ in range(TURNS):
            for _ in range(4):
                place = self.chosen.randrange(len(self.blocks))
                self.pool.deallocate_raw(self.blocks.pop(place))
            stitches = self.pool.page_stats()["stitches"]
            begun = time.perf_counter()
            address = self.pool.allocate_raw(SEVEN * PAGE)
            took = (time.perf_counter() - begun) * 1e6
            if self.pool.page_stats()["stitches"] > stitches:
                times.append(took)
            self.pool.deallocate_raw(address)
            self.blocks += [self.pool.allocate_raw(2 * PAGE) for _ in range(4)]
        return times

    def calls(self) -> list[float]:
        """The microseconds of the same calls of the source, made one by one."""
        source, times = self.source, []
        pages = [source.create(PAGE) for _ in range(SEVEN)]
        for _ in range(TURNS):
            begun = time.perf_counter()
            fence = source.fence(0)
            address = source.reserve(SEVEN * PAGE)
            source.map(address, pages)  # type: ignore[arg-type]
            source.set_access(address, SEVEN * PAGE)  # type: ignore[arg-type]
            assert fence is not None
            fence.done()
            source.unmap(address, SEVEN * PAGE)  # type: ignore[arg-type]
            source.unreserve(address, SEVEN * PAGE)  # type: ignore[arg-type]
            times.append((time.perf_counter() - begun) * 1e6)
        for page in pages:
            source.release(page)  # type: ignore[arg-type]
        return times


class Expandable:
    """An expandable segment on the emulated driver, whose memory goes back each time."""

    def __init__(self) -> None:
        self.pool = bfc.CachingAllocator(
            bfc.CUDASubAllocator(), settings="expandable_segments:True"
        )
        self.block = self.pool.allocate_raw(PYTORCH_PAGE)

    def requests(self) -> list[float]:
        """The microseconds of some requests, each of which maps seven pages."""
        times = []
        for _ in range(TURNS):
            begun = time.perf_counter()
            address = self.pool.allocate_raw(SEVEN * PYTORCH_PAGE)
            times.append((time.perf_counter() - begun) * 1e6)
            self.pool.deallocate_raw(address)
            self.pool.release_free_regions()
        return times


def beside_python(requests: Callable[[], list[float]]) -> list[float]:
    """The microseconds of requests while another thread runs Python all the time."""
    stops = threading.Event()

    def count() -> None:
        counted = 0
        while not stops.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        return requests()
    finally:
        stops.set()
        thread.join()


def report_seven() -> None:
    from bfc.testing import cuda_emulator

    cuda_emulator.load().reset(devices=1, total=1 << 30)
    stitched, expandable = Stitched(), Expandable()
    stitched.requests()
    measured: dict[str, Callable[[], list[float]]] = {
        "a view is stitched": stitched.requests,
        "its calls alone": stitched.calls,
        "stitched beside Python": functools.partial(beside_python, stitched.requests),
        "a segment grows": expandable.requests,
        "it grows beside Python": functools.partial(beside_python, expandable.requests),
    }
    samples: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(REPEATS):
        for name, measure in measured.items():
            samples[name] += measure()
    say()
    say(f"{'seven pages, emulated':24}{'us':>26}{'% above a millisecond':>24}")
    for name, times in samples.items():
        late = 100 * sum(taken > 1000 for taken in times) / len(times)
        say(f"{name:24}{spread(times):>26}{late:24.1f}")


def main() -> None:
    say(machine())
    report_hits()
    report_stitches()
    report_seven()


if __name__ == "__main__":
    main()
