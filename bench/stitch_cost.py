"""What stitching costs in time: `python -m bench.stitch_cost`.

The first table has the recorded traces, each on one stream, after six passes: by then no request
calls the driver. BFC with `virtual_memory` takes turns with BFC as TensorFlow has it, and with BFC
that splits every chunk, as stitching does. The second has one request that is stitched, by the
number of its pages, on a source that does nothing; its pages lie apart, each for itself, which is
the dearest case.
"""

from __future__ import annotations

import functools
import itertools
import operator
import statistics
import time
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


def main() -> None:
    say(machine())
    report_hits()
    report_stitches()


if __name__ == "__main__":
    main()
