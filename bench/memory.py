"""How much memory the recorded traces take: `python -m bench.memory`, half a minute for all nine.

For each trace under PyTorch's policy, with its default settings and with expandable segments, with
stitching (pages of 2 MiB), and under TensorFlow's policy, growing and fixed: what is reserved for
each byte that is live, the smallest device on which two passes complete, and the calls of the
driver. Ours is strict, but for stitching, which no original has. PyTorch's compiled allocator
replays the same on the same devices, and every address and the calls of every kind are compared.
Nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import bfc
from bench.histories import chosen, traces
from bench.peers import torch
from bench.peers.tensorflow import PeerUnavailable
from bench.peers.torch import TorchPeer
from bench.report import geometric_mean, machine, say
from bfc_tools.study.counting import CountedSimulated

GIB = 1 << 30
#: The device with room.
ROOM = 80 * GIB
PASSES = 2
#: The search goes in steps of this part of the peak that is live.
STEP = 0.0025
#: How PyTorch's driver names what our sources call "alloc".
KINDS = {"malloc": "alloc"}
COUNTED = ("alloc", "free", "reserve", "unreserve", "create", "release", "map", "access", "unmap")


@dataclass(frozen=True)
class Contender:
    """A policy with settings."""

    name: str
    make: Callable[[CountedSimulated], bfc.Allocator]
    #: PyTorch's settings, where its compiled allocator stands beside ours.
    settings: str | None = None
    #: Whether it takes the whole device at once, so that what it reserves says nothing.
    takes_all: bool = False


def caching(settings: str) -> Callable[[CountedSimulated], bfc.Allocator]:
    return lambda device: bfc.CachingAllocator(device, settings=settings, strict=True)


def tensorflow(allow_growth: bool) -> Callable[[CountedSimulated], bfc.Allocator]:
    return lambda device: bfc.BFCAllocator(device, allow_growth=allow_growth, strict=True)


def stitching(device: CountedSimulated) -> bfc.Allocator:
    return bfc.BFCAllocator(device, virtual_memory=True, page_size="2 MiB")


def stitching_caching(device: CountedSimulated) -> bfc.Allocator:
    return bfc.CachingAllocator(device, stitch=True)


EXPANDABLE = "expandable_segments:True"
CONTENDERS = (
    Contender("PyTorch, default", caching(""), settings=""),
    Contender("PyTorch, expandable", caching(EXPANDABLE), settings=EXPANDABLE),
    Contender("bfc, stitching", stitching),
    Contender("bfc, stitch=True", stitching_caching),
    Contender("TensorFlow, growing", tensorflow(True)),
    Contender("TensorFlow, fixed", tensorflow(False), takes_all=True),
)


@dataclass
class Run:
    """Passes of a trace on one device. They end with the one in which a request is refused."""

    completed: bool
    peak_reserved: int
    addresses: list[np.ndarray]
    #: The calls of each pass by kind.
    calls: list[Counter[str]]
    #: The most bytes that the trace has asked for and not freed. PyTorch's is not asked.
    live: int = 0

    def counts(self) -> str:
        """Calls of the passes, without waits."""
        return " / ".join(str(calls.total()) for calls in self.calls)

    def equals(self, other: Run) -> bool:
        return (
            self.peak_reserved == other.peak_reserved
            and self.calls == other.calls
            and len(self.addresses) == len(other.addresses)
            and all(map(np.array_equal, self.addresses, other.addresses))
        )


def run_ours(contender: Contender, trace: bfc.Trace, capacity: int) -> Run:
    device = CountedSimulated(capacity)
    run = Run(True, 0, [], [])
    with contender.make(device) as allocator:
        while run.completed and len(run.calls) < PASSES:
            before = device.calls_by_kind.copy()
            result = trace.replay(allocator)
            run.addresses.append(result.addresses)
            run.calls.append(device.calls_by_kind - before)
            run.completed = not result.failed
            run.peak_reserved = max(run.peak_reserved, result.peak_bytes_reserved)
            run.live = result.peak_bytes_live
    return run


def run_pytorch(settings: str, trace: bfc.Trace, capacity: int) -> Run:
    """The same by the compiled original."""
    run = Run(True, 0, [], [])
    stream = trace.stream.astype(np.uint64) * 2  # handles, which are even
    asks = (trace.op == 0) & (trace.size > 0)
    with TorchPeer(capacity=capacity, settings=settings) as peer:
        before: Counter[str] = Counter()
        while run.completed and len(run.calls) < PASSES:
            addresses, _seconds = peer.replay(trace.op, trace.id, trace.size, stream)
            kinds = Counter(KINDS.get(kind, kind) for kind, *_ in peer.calls)
            counted = Counter({kind: kinds[kind] for kind in COUNTED})
            run.addresses.append(addresses)
            run.calls.append(counted - before)
            run.completed = bool(addresses[asks].all())
            before = counted
        run.peak_reserved = peer.stats()["reserved_bytes.all.peak"]
    return run


def device_of(live: int, steps: int) -> int:
    """The bytes of a device that is so many steps larger than what is live."""
    return round(live * (1 + steps * STEP))


def smallest(contender: Contender, trace: bfc.Trace, live: int) -> int:
    """The fewest steps with which a trace completes. Each is tried, from none upwards: a device can
    be large enough where a larger one is not."""
    steps = 0
    while not run_ours(contender, trace, device_of(live, steps)).completed:
        steps += 1
    return steps


@dataclass(frozen=True)
class Row:
    """What is known about a trace under one contender."""

    contender: str
    #: Reserved on the device with room, for each byte that is live; None of one that takes all.
    reserved: float | None
    smallest: float
    with_room: Run
    on_smallest: Run
    #: Whether PyTorch's compiled allocator did the same; None where it was not asked.
    is_equal: bool | None


def measure(contender: Contender, trace: bfc.Trace, beside_pytorch: bool) -> Row:
    """Raises ValueError if the trace does not fit on the device with room."""
    with_room = run_ours(contender, trace, ROOM)
    if not with_room.completed:
        raise ValueError(f"{contender.name} refuses a request on {ROOM >> 30} GiB")
    live = with_room.live
    steps = smallest(contender, trace, live)
    sizes = [ROOM, *(device_of(live, at) for at in (steps, steps - 1) if at >= 0)]
    ours = [run_ours(contender, trace, nbytes) for nbytes in sizes]
    is_equal = None
    if beside_pytorch and contender.settings is not None:
        settings = contender.settings
        theirs = (run_pytorch(settings, trace, nbytes) for nbytes in sizes)
        is_equal = all(mine.equals(other) for mine, other in zip(ours, theirs, strict=True))
    return Row(
        contender.name,
        None if contender.takes_all else with_room.peak_reserved / live,
        device_of(live, steps) / live,
        with_room,
        ours[1],
        is_equal,
    )


HEADINGS = ("trace", "allocator", "reserved", "calls 1 / 2", "smallest", "calls 1 / 2", "compiled")


def cells(name: str, row: Row) -> tuple[str, ...]:
    compiled = {None: "-", True: "equal", False: "DIFFERS"}[row.is_equal]
    return (
        name,
        row.contender,
        "-" if row.reserved is None else f"{row.reserved:.3f}",
        row.with_room.counts(),
        f"{row.smallest:.4f}",
        row.on_smallest.counts(),
        compiled,
    )


def line(texts: tuple[str, ...]) -> str:
    widths = (30, 20, -8, -15, -8, -15, 8)
    padded = (
        text.ljust(width) if width > 0 else text.rjust(-width)
        for text, width in zip(texts, widths, strict=True)
    )
    return "  ".join(padded).rstrip()


def summaries(rows: list[Row]) -> Iterator[str]:
    """The geometric mean and the worst of each contender."""
    for contender in dict.fromkeys(row.contender for row in rows):
        mine = [row for row in rows if row.contender == contender]
        reserved = [row.reserved for row in mine if row.reserved is not None]
        smallest = [row.smallest for row in mine]
        for what, of in (("geometric mean", geometric_mean), ("worst", max)):
            yield line(
                (
                    what,
                    contender,
                    f"{of(reserved):.3f}" if reserved else "-",
                    "",
                    f"{of(smallest):.4f}",
                    "",
                    "",
                )
            )


def pytorch_is_there() -> bool:
    try:
        torch.build()
    except PeerUnavailable as error:
        say(f"without PyTorch 2.11: {error}")
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    listed = chosen(dict(traces()), __doc__, arguments)
    say(machine())
    beside_pytorch = pytorch_is_there()
    say(line(HEADINGS))
    rows = []
    for name, trace in listed.items():
        for number, contender in enumerate(CONTENDERS):
            row = measure(contender, trace, beside_pytorch)
            rows.append(row)
            shown = f"{name} ({row.with_room.live / GIB:.1f} GiB)" if number == 0 else ""
            say(line(cells(shown, row)))
    for text in summaries(rows):
        say(text)
    if any(row.is_equal is False for row in rows):
        raise SystemExit("ours differs from PyTorch's compiled allocator")


if __name__ == "__main__":
    main()
