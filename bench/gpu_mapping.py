"""What mapped memory costs on a GPU: `python -m bench.gpu_mapping`. Each call is timed by the size
of a page, alone and beside a kernel that reads mapped memory and notes the longest time that it
stood still. Then handles, mappings and reservations are made until the driver refuses one.

`--emulated` runs all of it on the emulated driver, where there is no GPU. Its calls cost next to
nothing, so what is left is the share of bfc.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bfc
from bench import gpu
from bench.report import say, spread
from bfc.drivers.cuda import calls, nvrtc
from bfc.units import format_bytes

MIB = 1 << 20
SIZES = [n * MIB for n in (2, 4, 8, 16, 20, 32, 64)]
#: 60 MiB three times: (bytes of a page, how many pages).
PARTS = ((2 * MIB, 30), (20 * MIB, 3), (60 * MIB, 1))
ROUNDS, EMULATED_ROUNDS = 31, 3
MOST, EMULATED_MOST = 1 << 18, 200
MOST_RESERVATIONS = 20_000
SLOTS = 4096  # of a reservation in which mappings are counted
KERNEL_NS, EMULATED_NS = 20_000_000, 1_000_000
HEAD_START = 0.002  # seconds until the kernel runs for certain
NOT_READY, COMPUTE_MAJOR, COMPUTE_MINOR = 600, 75, 76

KERNEL = """
__device__ unsigned long long now()
{
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Reads where[0], which is 0, for so long. Leaves the longest time between two rounds in where[1].
// A round waits for what the one before has read.
extern "C" __global__ void watch(unsigned long long nanoseconds, volatile unsigned long long* where)
{
    unsigned long long begun = now(), last = begun, longest = 0;
    while (last - begun < nanoseconds) {
        unsigned long long time = now() + where[0];
        longest = time - last > longest ? time - last : longest;
        last = time;
    }
    where[1] = longest;
}
"""

Step = tuple[str, Callable[[], object]]


class Pages:
    """A reservation with pages, made and given back step by step."""

    def __init__(self, source: bfc.CUDASubAllocator, page: int, count: int = 1) -> None:
        self.source, self.page, self.count = source, page, count
        self.address = 0
        self.handles: list[int] = []

    def making(self) -> Iterator[Step]:
        source, nbytes = self.source, self.page * self.count
        yield "reserve", self.reserve
        yield "create", self.create
        yield "map", lambda: source.map(self.address, self.handles)
        yield "set_access", lambda: source.set_access(self.address, nbytes)

    def giving_back(self) -> Iterator[Step]:
        source, nbytes = self.source, self.page * self.count
        yield "unmap", lambda: source.unmap(self.address, nbytes)
        yield "release", self.release
        yield "unreserve", lambda: source.unreserve(self.address, nbytes)

    def steps(self) -> Iterator[Step]:
        yield from self.making()
        yield from self.giving_back()

    def reserve(self) -> None:
        self.address = given(self.source.reserve(self.page * self.count), "addresses")

    def create(self) -> None:
        for _ in range(self.count):
            self.handles.append(given(self.source.create(self.page), "memory"))

    def release(self) -> None:
        for handle in self.handles:
            self.source.release(handle)


def given(answer: int | None, what: str) -> int:
    if answer is None:
        raise SystemExit(f"the device has no {what} left: end what else uses it, and try again")
    return answer


class Block:
    """An ordinary allocation, for comparison."""

    def __init__(self, source: bfc.CUDASubAllocator, nbytes: int) -> None:
        self.source, self.nbytes = source, nbytes
        self.block: tuple[int, int] | None = None

    def steps(self) -> Iterator[Step]:
        yield "cuMemAlloc", self.take
        yield "cuMemFree", self.free

    def take(self) -> None:
        self.block = self.source.alloc(self.source.granularity, self.nbytes)

    def free(self) -> None:
        if self.block is not None:
            self.source.free(*self.block)


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1000


# -- alone -----------------------------------------------------------------------------------------


def time_steps(make: Callable[[], Pages | Block], rounds: int) -> dict[str, list[float]]:
    """Microseconds a step, by its name and round, after a round that is not counted."""
    times: dict[str, list[float]] = {}
    for count in range(rounds + 1):
        for name, call in make().steps():
            taken = microseconds(call)
            if count:
                times.setdefault(name, []).append(taken)
    return times


def report_sizes(source: bfc.CUDASubAllocator, rounds: int) -> None:
    for nbytes in SIZES:
        say(f"{f'one page of {format_bytes(nbytes)}':40}{'us, min / median / max':>24}")
        times = time_steps(partial(Pages, source, nbytes), rounds)
        times |= time_steps(partial(Block, source, nbytes), rounds)
        for name, samples in times.items():
            say(f"  {name:38}{spread(samples):>24}")


def report_parts(source: bfc.CUDASubAllocator, rounds: int) -> None:
    for page, count in PARTS:
        what = f"60 MiB as {count} x {format_bytes(page)}"
        say(f"{what:40}{'us, min / median / max':>24}")
        for name, samples in time_steps(partial(Pages, source, page, count), rounds).items():
            say(f"  {name:38}{spread(samples):>24}")


# -- beside a kernel -------------------------------------------------------------------------------


class Watch:
    """A kernel that reads mapped memory for a while, on a stream of its own."""

    def __init__(self, source: bfc.CUDASubAllocator, nanoseconds: int) -> None:
        self.device = calls.device(source.device.ordinal)
        self.nanoseconds, self.source = nanoseconds, source
        arch = self.device.attribute(COMPUTE_MAJOR) * 10 + self.device.attribute(COMPUTE_MINOR)
        image = nvrtc.compiled(KERNEL, arch)
        self.module = self.device.call("cuModuleLoadData", image)
        self.function = self.device.call("cuModuleGetFunction", self.module, b"watch")
        self.stream = int(self.device.call("cuStreamCreate", calls.NON_BLOCKING))
        self.pages = Pages(source, source.mapping_granularity)
        for _name, call in self.pages.making():
            call()
        self.device.call("cuMemsetD8", self.pages.address, 0, 16)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.call("cuStreamSynchronize", self.stream)
        for _name, call in self.pages.giving_back():
            call()
        self.device.call("cuStreamDestroy", self.stream)
        self.device.call("cuModuleUnload", self.module)

    def beside(self, call: Callable[[], object]) -> tuple[float, bool, float]:
        """The microseconds of a call, whether the kernel ran still after it, and the longest time
        that the kernel stood still, in microseconds."""
        values: Any = (self.nanoseconds, self.pages.address), (ctypes.c_uint64, ctypes.c_uint64)
        one = 1, 1, 1
        self.device.call("cuLaunchKernel", self.function, *one, *one, 0, self.stream, values, 0)
        time.sleep(HEAD_START)
        taken = microseconds(call)
        running = self.is_running()
        self.device.call("cuStreamSynchronize", self.stream)
        seen = (ctypes.c_uint64 * 2)()
        self.device.call("cuMemcpyDtoH", ctypes.addressof(seen), self.pages.address, 16)
        return taken, running, seen[1] / 1000

    def is_running(self) -> bool:
        try:
            self.device.call("cuStreamQuery", self.stream)
        except bfc.DriverError as error:
            if error.code != NOT_READY:
                raise
            return True
        return False


def report_beside(source: bfc.CUDASubAllocator, rounds: int, nanoseconds: int) -> None:
    """A call that waits for the kernel takes as long as the kernel, which is over by then."""
    try:
        watch = Watch(source, nanoseconds)
    except bfc.DeviceUnavailableError as error:
        say(f"beside a kernel: left out, {error}")
        return
    what = f"beside a kernel of {nanoseconds // 1000} us"
    heads = f"{'us, min / median / max':>24}{'kernel over':>13}{'kernel stood still, us':>26}"
    say(f"{what:40}{heads}")
    found: dict[str, list[tuple[float, bool, float]]] = {}
    with watch:
        watch.beside(int)  # its code is loaded at the first launch
        for _ in range(rounds):
            steps: list[Step] = [("no call", int)]
            steps += [*Pages(source, 20 * MIB).steps(), *Block(source, 20 * MIB).steps()]
            for name, call in steps:
                found.setdefault(name, []).append(watch.beside(call))
    for name, samples in found.items():
        taken, running, still = zip(*samples, strict=True)
        over = f"{running.count(False)} of {len(running)}"
        say(f"  {name:38}{spread(taken):>24}{over:>13}{spread(still):>26}")


# -- how many --------------------------------------------------------------------------------------


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def count_until_refused(make: Callable[[], object], most: int) -> tuple[int, str, list[float]]:
    """How many there were, why no more, and the microseconds of each."""
    times: list[float] = []
    made: list[object] = []
    while len(times) < most:
        try:
            times.append(microseconds(lambda: made.append(make())))
        except bfc.SubAllocatorError as error:
            return len(times), str(error).splitlines()[0], times
        if made.pop() is None:
            times.pop()
            return len(times), "the driver has no more", times
    return most, f"no refusal up to here (--most {most})", times


def report_count(what: str, found: tuple[int, str, list[float]]) -> None:
    count, why, times = found
    say(f"{count:,} {what}: {why}")
    if len(times) >= 200:
        say(f"  {'the first hundred, us':38}{spread(times[:100]):>24}")
        say(f"  {'the last hundred, us':38}{spread(times[-100:]):>24}")


def report_handles(source: bfc.CUDASubAllocator, most: int) -> None:
    handles: list[int] = []
    size, files = source.mapping_granularity, open_files()

    def create() -> int | None:
        handle = source.create(size)
        if handle is not None:
            handles.append(handle)
        return handle

    found = count_until_refused(create, most)
    report_count(f"handles of {format_bytes(size)} ({source.handle_type})", found)
    say(f"  file descriptors that they hold: {open_files() - files}")
    for handle in handles:
        source.release(handle)


def report_mappings(source: bfc.CUDASubAllocator, most: int) -> None:
    size = source.mapping_granularity
    handle = given(source.create(size), "memory")
    reserved: list[int] = []
    mapped: list[int] = []

    def map_once() -> int | None:
        if len(mapped) == SLOTS * len(reserved):
            address = source.reserve(SLOTS * size)
            if address is None:
                return None
            reserved.append(address)
        where = reserved[-1] + len(mapped) % SLOTS * size
        source.map(where, [handle])
        mapped.append(where)
        return where

    report_count("mappings of one handle", count_until_refused(map_once, most))
    whole = mapped[:SLOTS]
    verbs = (("set_access", source.set_access), ("unmap", source.unmap)) if whole else ()
    for name, call in verbs:
        taken = microseconds(partial(call, whole[0], len(whole) * size))
        say(f"  one {name} of {len(whole)} mappings: {taken:.0f} us")
    for where in mapped[SLOTS:]:
        source.unmap(where, size)
    for address in reserved:
        source.unreserve(address, SLOTS * size)
    source.release(handle)


def report_reservations(source: bfc.CUDASubAllocator, most: int) -> None:
    """Each as large as those of expandable segments: nine eighths of the device's memory."""
    step = source.mapping_granularity
    nbytes = source.total_bytes * 9 // 8 // step * step
    reserved: list[int] = []

    def reserve() -> int | None:
        address = source.reserve(nbytes)
        if address is not None:
            reserved.append(address)
        return address

    report_count(f"reservations of {format_bytes(nbytes)}", count_until_refused(reserve, most))
    for address in reserved:
        source.unreserve(address, nbytes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_mapping", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="without a GPU: no measure of one")
    parser.add_argument("--device", type=int, default=0, help="the device's ordinal")
    parser.add_argument("--most", type=int, help=f"handles and mappings at most ({MOST})")
    options = parser.parse_args(arguments)
    emulated: bool = options.emulated
    source = gpu.start("bench.gpu_mapping", options.device, emulated=emulated)
    if not source.supports_virtual_memory:
        raise SystemExit(f"there is nothing to measure: {source.supports_virtual_memory}")
    say(f"a page is a multiple of {format_bytes(source.mapping_granularity)}")
    rounds = EMULATED_ROUNDS if emulated else ROUNDS
    most = options.most or (EMULATED_MOST if emulated else MOST)
    report_sizes(source, rounds)
    report_parts(source, rounds)
    report_beside(source, rounds, EMULATED_NS if emulated else KERNEL_NS)
    report_handles(source, most)
    report_mappings(source, most)
    report_reservations(source, min(most, MOST_RESERVATIONS))


if __name__ == "__main__":
    main()
