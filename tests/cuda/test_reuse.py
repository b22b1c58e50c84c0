"""No memory is used again while work that was queued for its last owner is unfinished.

Random histories over several streams. Every block is filled with a byte of its own when it is
allocated, and read back when it is freed, by work that is queued and may be held back. At the end
every read must have seen its block's byte: had the memory gone to another too early, it would not.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import pytest
import raw_cuda

import bfc

SEED = int(os.environ.get("BFC_SEED", "0"))
HISTORIES = int(os.environ.get("BFC_HISTORIES", "12"))
STEPS = 150
READ = 8  # bytes


class History:
    """One run: what is live, and what the queued reads are to see."""

    def __init__(self, allocator: bfc.BFCAllocator, streams: list[int], seed: int, driver) -> None:
        self.allocator, self.streams, self.driver = allocator, streams, driver
        self.dice = random.Random(seed)
        self.live: list[tuple[bfc.Buffer, int, int]] = []  # with its byte, and where it was used
        self.expected: list[int] = []
        self.seen = raw_cuda.Seen(READ * STEPS, 0)
        self.next_byte = 0

    def step(self) -> None:
        choice = self.dice.random()
        if choice < 0.5 or not self.live:
            self.allocate()
        elif choice < 0.85:
            self.free(self.live.pop(self.dice.randrange(len(self.live))))
        elif self.driver is not None:
            stream = self.dice.choice(self.streams)
            self.dice.choice([self.driver.hold, self.driver.release])(stream)

    def allocate(self) -> None:
        stream = self.dice.choice(self.streams)
        with contextlib.suppress(bfc.OutOfMemoryError):
            buffer = self.allocator.allocate(self.dice.choice([256, 1024, 5000]), stream=stream)
            self.next_byte = self.next_byte % 250 + 1
            raw_cuda.fill(buffer.ptr, self.next_byte, buffer.nbytes, stream)
            self.live.append((buffer, self.next_byte, stream))

    def free(self, block: tuple[bfc.Buffer, int, int]) -> None:
        buffer, byte, stream = block
        if self.dice.random() < 0.4:  # somebody else reads it last
            other = self.dice.choice(self.streams)
            self.wait_for(stream, other)
            self.allocator.record_stream(buffer, other)
            stream = other
        address = self.seen.address + READ * len(self.expected)
        with raw_cuda.current():
            raw_cuda.call("cuMemcpyDtoHAsync", address, buffer.ptr, READ, stream)
        self.expected.append(byte)
        if self.dice.random() < 0.5:
            buffer.free()

    def wait_for(self, first: int, then: int) -> None:
        """What a user does who hands memory from stream to stream."""
        with raw_cuda.current():
            event = raw_cuda.call("cuEventCreate", 2)
            raw_cuda.call("cuEventRecord", event, first)
            raw_cuda.call("cuStreamWaitEvent", then, event, 0)
            raw_cuda.call("cuEventDestroy", event)

    def end(self) -> None:
        if self.driver is not None:
            self.driver.release_all()
        self.live.clear()
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


def run_history(allocator: bfc.BFCAllocator, streams: list[int], seed: int, driver) -> None:
    history = History(allocator, streams, seed, driver)
    for _ in range(STEPS):
        try:
            history.step()
        except bfc.DriverError as error:
            if error.name != "CUDA_ERROR_LAUNCH_TIMEOUT":
                raise
            # memory ran out, and the work that was waited for is held back
    history.end()


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


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
@pytest.mark.parametrize("home", [0, 1, 3])
def test_no_memory_is_used_again_too_early(make_cuda, streams, machine, home, seed) -> None:
    """BFC_SEED=<seed> BFC_HISTORIES=1 runs one history again."""
    limit = random.Random(seed).choice(["64 KiB", "1 MiB"])  # the small one runs out
    run_history(make_cuda(memory_limit=limit, stream=streams[home]), streams, seed, machine)


class WithoutOrder(bfc.CUDASubAllocator):
    def order(self, first: int, then: int) -> None:
        pass


class WithoutFences(bfc.CUDASubAllocator):
    def fence(self, stream: int) -> None:
        return None


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("broken", [WithoutOrder, WithoutFences])
def test_a_source_that_leaves_something_out_is_found(streams, emulated, broken: type) -> None:
    """The test above can fail."""
    found = 0
    for seed in range(HISTORIES):
        with bfc.BFCAllocator(broken(), memory_limit="1 MiB") as allocator:
            try:
                run_history(allocator, streams, seed, emulated)
            except AssertionError:
                found += 1
    assert found > 0
