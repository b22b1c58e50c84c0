"""How stitching settles: `python -m bench.stitching`.

Each trace is played several times in a row with everything freed in between, under both policies:
BFCAllocator(virtual_memory=True) and CachingAllocator(stitch=True). The first table of each has one
stream and pages of 2 MiB: what is reserved for each byte that is live, the calls of the driver in
each pass, and the most calls of one request; then what is reserved with the page size that the
allocator chooses itself, which is for BFCAllocator. The second has the trace of several streams on
a device that is 1 % larger than what is live, and who waits for whom; and the other traces with
their blocks dealt to two streams, on 3 % more than is live. The third has programs without a
rhythm. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import bfc
from bench.histories import chosen, churn, traces
from bench.report import geometric_mean, machine, say
from bfc_tools.study.counting import CountedSimulated

MIB, GIB = 1 << 20, 1 << 30
PASSES = 6
ROOM = 80 * GIB
#: The memory of GPUs that people have, in GiB.
USUAL = (4, 6, 8, 11, 12, 16, 24, 32, 40, 48, 80)
HEADROOMS = (0.0, 0.05)
#: Devices that are full, to the peak of the live bytes: of a trace that has several streams, and of
#: one whose blocks are dealt to so many.
FULL, FULL_DEALT, DEALT = 1.01, 1.03, 2
#: Live blocks, and the smallest and the largest size of random churn.
CHURNS = ((200, 1 * MIB, 256 * MIB), (200, 64 << 10, 256 * MIB), (1000, 256 << 10, 64 * MIB))
CHURN_EVENTS = 20_000


#: Makes an allocator over a device, with pages of so many bytes (None: the policy's own choice) and
#: a headroom.
Make = Callable[[bfc.SubAllocator, int | None, float], bfc.BFCAllocator | bfc.CachingAllocator]


def stitching_bfc(
    device: bfc.SubAllocator, page_size: int | None, headroom: float
) -> bfc.BFCAllocator:
    """BFCAllocator(virtual_memory=True)"""
    return bfc.BFCAllocator(device, virtual_memory=True, page_size=page_size, headroom=headroom)


def stitching_caching(
    device: bfc.SubAllocator, page_size: int | None, _headroom: float
) -> bfc.CachingAllocator:
    """CachingAllocator(stitch=True)"""
    return bfc.CachingAllocator(device, stitch=True, page_size=page_size)


class LateDevice(CountedSimulated):
    """A device on which no stream has ever finished, and which counts who waits for whom."""

    asynchronous = True

    def __init__(self, capacity: int, streams: tuple[int, ...]) -> None:
        super().__init__(capacity)
        self.orders = 0
        for stream in streams:
            self.hold(stream)

    def order(self, first: int, then: int) -> None:
        self.orders += 1

    @property
    def all_waits(self) -> int:
        """Of streams for each other, and of the host."""
        return self.orders + self.waits


class Passes:
    """A trace, so many times in a row on one device."""

    def __init__(
        self,
        trace: bfc.Trace,
        capacity: int,
        make: Make = stitching_bfc,
        *,
        page_size: int | None = 2 * MIB,
        headroom: float = 0.0,
        passes: int = PASSES,
    ) -> None:
        device = LateDevice(capacity, tuple(int(it) for it in np.unique(trace.stream)))
        self.refused = 0
        self.calls: list[int] = []
        self.waits: list[int] = []
        self.reserved = self.live = 0
        with make(device, page_size, headroom) as allocator:
            for _ in range(passes):
                calls, waits = device.driver_calls, device.all_waits
                result = trace.replay(allocator)
                self.refused += result.failed
                self.calls.append(device.driver_calls - calls)
                self.waits.append(device.all_waits - waits)
                self.reserved = max(self.reserved, result.peak_bytes_reserved)
                self.live = max(self.live, result.peak_bytes_live)
            self.figures: dict[str, Any] = allocator.page_stats()
            allocator.check()

    @property
    def ratio(self) -> float:
        """What is reserved for each byte that is live."""
        return self.reserved / self.live

    @property
    def page(self) -> int:
        """MiB."""
        return int(self.figures["page_size"]) // MIB


def on_one_stream(trace: bfc.Trace) -> bfc.Trace:
    return bfc.Trace(trace.op, trace.id, trace.size)


def dealt(trace: bfc.Trace, streams: int) -> bfc.Trace:
    """Its blocks on several streams, by their sizes: each distinct size has one stream."""
    allocates = trace.op == 0
    rank = np.unique(trace.size[allocates], return_inverse=True)[1] % streams
    ids, first = np.unique(trace.id[allocates], return_index=True)
    return bfc.Trace(
        trace.op, trace.id, trace.size, rank[first[np.searchsorted(ids, trace.id)]].astype(np.int64)
    )


def usual_device(live: int) -> int:
    """The smallest usual device that holds so much, and 2.5 % more."""
    return next(it for it in USUAL if it * GIB >= live * 1.025) * GIB


def joined(counts: list[int]) -> str:
    return " / ".join(map(str, counts))


def report_one_stream(listed: dict[str, bfc.Trace], make: Make) -> None:
    chooses = make is stitching_bfc
    heading = f"{'one stream':30}{'reserved':>9}{'calls of passes 1 to 6':>34}{'stitches':>9}"
    say(f"{heading}{'waits':>6}{'most':>6}" + f"{'usual device':>24}{'80 GiB':>15}" * chooses)
    ratios = []
    for name, trace in listed.items():
        single = on_one_stream(trace)
        passes = Passes(single, ROOM, make)
        ratios.append(passes.ratio)
        figures = passes.figures
        title = f"{name} ({passes.live / GIB:.1f} GiB)"
        say(
            f"{title:30}{ratio_or_refused(passes):>9}{joined(passes.calls):>34}"
            f"{figures['stitches']:9}{sum(passes.waits):6}{figures['most_calls_of_a_request']:6}"
            + with_own_pages(single, passes.live)
            * chooses
        )
    say(f"{'geometric mean':30}{geometric_mean(ratios):9.4f}")
    say(f"{'worst':30}{max(ratios):9.4f}")


def with_own_pages(trace: bfc.Trace, live: int) -> str:
    """What is reserved with the page size that the allocator chooses."""
    device = usual_device(live)
    usual, large = (Passes(trace, room, page_size=None, passes=2) for room in (device, ROOM))
    own = f"{device // GIB} GiB, {usual.page} MiB: {ratio_or_refused(usual)}"
    return f"{own:>24}{f'{large.page} MiB: {ratio_or_refused(large)}':>15}"


def ratio_or_refused(passes: Passes) -> str:
    return "refused" if passes.refused else f"{passes.ratio:.4f}"


def report_streams(listed: dict[str, bfc.Trace], make: Make) -> None:
    say()
    say(f"{'by stream':34}{'device':>7}{'reserved':>9}{'calls':>50}{'waits of passes 1 to 6':>44}")
    for name, trace in listed.items():
        is_own = len(np.unique(trace.stream)) > 1
        played = trace if is_own else dealt(trace, DEALT)
        with_room = Passes(played, ROOM, make)
        share = FULL if is_own else FULL_DEALT
        full = Passes(played, int(with_room.live * share), make)
        title = name if is_own else f"{name}, dealt to {DEALT}"
        for device, passes in (("80 GiB", with_room), (f"{share:.2f}", full)):
            say(
                f"{title:34}{device:>7}{ratio_or_refused(passes):>9}{joined(passes.calls):>50}"
                f"{joined(passes.waits):>44}"
            )


def report_churn(make: Make) -> None:
    say()
    say(
        f"{'random churn':30}{'headroom':>9}{'reserved':>9}{'requests':>10}"
        f"{'stitches a request':>20}{'calls a request':>17}"
    )
    for live, smallest, largest in CHURNS:
        trace = churn(live, CHURN_EVENTS, smallest=smallest, largest=largest).closed()
        requests = int((trace.op == 0).sum())
        title = f"{live} live, {smallest >> 10} KiB to {largest // MIB} MiB"
        for headroom in HEADROOMS if make is stitching_bfc else (0.0,):
            passes = Passes(trace, ROOM, make, headroom=headroom, passes=1)
            say(
                f"{title:30}{headroom:9.0%}{ratio_or_refused(passes):>9}{requests:10}"
                f"{passes.figures['stitches'] / requests:20.3f}{passes.calls[0] / requests:17.2f}"
            )


def main(arguments: list[str] | None = None) -> None:
    shown = chosen(dict(traces()), __doc__, arguments)
    say(machine())
    for make in (stitching_bfc, stitching_caching):
        say()
        say(str(make.__doc__))
        report_one_stream(shown, make)
        report_streams(shown, make)
        report_churn(make)


if __name__ == "__main__":
    main()
