"""Stitching over the CUDA driver: no memory is used again, through whichever address, while work
that was queued for its last owner is unfinished.

Each block is filled with a byte of its own when it is allocated, and read back when it is freed, by
work that is queued and may be held back.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator

import pytest
import raw_cuda
from closing import close_all

import bfc

MIB = 1 << 20
SEED = int(os.environ.get("BFC_SEED", "0"))
HISTORIES = int(os.environ.get("BFC_HISTORIES", "8"))
STEPS = 200
READ = 8  # bytes
Make = Callable[..., bfc.BFCAllocator]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators over a device. After the test each is checked and closed."""
    allocators: list[bfc.BFCAllocator] = []

    def start(source: bfc.CUDASubAllocator | None = None, **options: object) -> bfc.BFCAllocator:
        source = source or bfc.CUDASubAllocator(0)
        if not source.supports_virtual_memory:
            pytest.skip(str(source.supports_virtual_memory))
        options.setdefault("memory_limit", "64 MiB")
        allocators.append(
            bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB", **options)
        )
        return allocators[-1]

    yield start
    close_all(allocators)


class History:
    """One run: what is live, and what the queued reads are to see."""

    def __init__(self, allocator: bfc.BFCAllocator, streams: list[int], seed: int, driver) -> None:
        self.allocator, self.streams, self.driver = allocator, streams, driver
        self.dice = random.Random(seed)
        self.live: list[tuple[bfc.Buffer, int, int]] = []  # with its byte, and where it was used
        self.expected: list[int] = []
        self.seen = raw_cuda.Seen(2 * READ * STEPS, 0)
        self.next_byte = 0

    def step(self) -> None:
        choice = self.dice.random()
        if choice < 0.5 or not self.live:
            self.allocate()
        elif choice < 0.85:
            self.free(self.live.pop(self.dice.randrange(len(self.live))))
        elif choice < 0.87:
            if self.driver is not None:
                self.driver.release_all()  # it waits for streams
            self.allocator.release_free_regions()
        elif self.driver is not None:
            stream = self.dice.choice(self.streams)
            self.dice.choice([self.driver.hold, self.driver.release])(stream)

    def allocate(self) -> None:
        stream = self.dice.choice(self.streams)
        nbytes = self.dice.choice([1024, 300_000, 3 * MIB, 4 * MIB, 7 * MIB, 12 * MIB])
        with contextlib.suppress(bfc.OutOfMemoryError):
            buffer = self.allocator.allocate(nbytes, stream=stream)
            self.next_byte = self.next_byte % 250 + 1
            raw_cuda.fill(buffer.ptr, self.next_byte, buffer.nbytes, stream)
            self.live.append((buffer, self.next_byte, stream))

    def free(self, block: tuple[bfc.Buffer, int, int]) -> None:
        buffer, byte, stream = block
        if self.dice.random() < 0.3:  # somebody else reads it last
            other = self.dice.choice(self.streams)
            self.wait_for(stream, other)
            self.allocator.record_stream(buffer, other)
            stream = other
        with raw_cuda.current():
            for place in (buffer.ptr, buffer.ptr + buffer.nbytes - READ):
                address = self.seen.address + READ * len(self.expected)
                raw_cuda.call("cuMemcpyDtoHAsync", address, place, READ, stream)
                self.expected.append(byte)
        buffer.free()

    def wait_for(self, first: int, then: int) -> None:
        """What a user does who hands memory from stream to stream."""
        with raw_cuda.current():
            event = raw_cuda.call("cuEventCreate", 2)
            raw_cuda.call("cuEventRecord", event, first)
            raw_cuda.call("cuStreamWaitEvent", then, event, 0)
            raw_cuda.call("cuEventDestroy", event)

    def run(self) -> None:
        for _ in range(STEPS):
            try:
                self.step()
            except bfc.DriverError as error:
                if error.name != "CUDA_ERROR_LAUNCH_TIMEOUT":
                    raise
                # memory ran out, and the work that was waited for is held back
        if self.driver is not None:
            self.driver.release_all()
        self.live.clear()
        self.allocator.check()
        self.allocator.close()  # while its streams are there
        with raw_cuda.current():
            raw_cuda.call("cuCtxSynchronize")
        read = bytes(self.seen)
        self.seen.free()
        for number, byte in enumerate(self.expected):
            assert read[READ * number : READ * (number + 1)] == bytes([byte] * READ), number


@pytest.fixture
def streams() -> Iterator[list[int]]:
    with raw_cuda.stream() as a, raw_cuda.stream() as b, raw_cuda.stream(flags=0) as blocking:
        yield [raw_cuda.LEGACY, a, b, blocking]


@pytest.fixture
def patience(machine) -> Iterator[None]:
    """Held work that is waited for is not waited for long, and is no fault here."""
    if machine is not None:
        machine.set_patience(0.02)
    yield
    if machine is not None:
        machine.set_patience(10.0)
        assert [text for text in machine.complaints if "held work" not in text] == []
        machine.clear()


@pytest.mark.sampled
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
def test_no_memory_is_used_again_too_early(make, streams, machine, seed) -> None:
    """BFC_SEED=<seed> BFC_HISTORIES=1 runs one history again."""
    limit = random.Random(seed).choice(["24 MiB", "64 MiB"])  # the small one runs out
    History(make(memory_limit=limit), streams, seed, machine).run()


class WithoutOrder(bfc.CUDASubAllocator):
    def order(self, first: int, then: int) -> None:
        pass


@pytest.mark.usefixtures("patience")
def test_a_source_that_orders_no_streams_is_found(make, streams, emulated) -> None:
    """The test above can fail."""

    def is_found(seed: int) -> bool:
        try:
            History(make(WithoutOrder(), memory_limit="24 MiB"), streams, seed, emulated).run()
        except AssertionError:
            return True
        return False

    assert any(is_found(seed) for seed in range(HISTORIES))
