"""No memory is used again, through whichever address, while work that was queued for its last owner
is unfinished.

Random histories over several streams. Every block is filled with a byte of its own when it is
allocated, and read back when it is freed, by work that is queued and may be held back. At the end
every read must have seen its block's byte: had the memory gone to another too early, it would not.
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
from bfc.testing import Misbehaving

KIB, MIB = 1 << 10, 1 << 20
SEED = int(os.environ.get("BFC_SEED", "0"))
HISTORIES = int(os.environ.get("BFC_HISTORIES", "12"))
STEPS = 200
READ = 8  # bytes
Make = Callable[..., bfc.BFCAllocator]

#: How memory is had, the sizes of blocks, and a limit that runs out and one that does not.
PLAIN = {}, (256, 1024, 5000), (64 * KIB, MIB)
STITCHED = (
    {"virtual_memory": True, "page_size": "2 MiB"},
    (1024, 300_000, 3 * MIB, 4 * MIB, 7 * MIB, 12 * MIB),
    (24 * MIB, 64 * MIB),
)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators over a device. After the test each is checked and closed."""
    allocators: list[bfc.BFCAllocator] = []

    def start(source: bfc.CUDASubAllocator | None = None, **options: object) -> bfc.BFCAllocator:
        source = source or bfc.CUDASubAllocator(0)
        if options.get("virtual_memory") and not source.supports_virtual_memory:
            pytest.skip(str(source.supports_virtual_memory))
        allocators.append(bfc.BFCAllocator(source, **options))
        return allocators[-1]

    yield start
    close_all(allocators)


class History:
    """One run: what is live, and what the queued reads are to see."""

    def __init__(
        self,
        allocator: bfc.BFCAllocator,
        sizes: tuple[int, ...],
        streams: list[int],
        seed: int,
        driver,
    ) -> None:
        self.allocator, self.sizes, self.streams, self.driver = allocator, sizes, streams, driver
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
        with contextlib.suppress(bfc.OutOfMemoryError):
            buffer = self.allocator.allocate(self.dice.choice(self.sizes), stream=stream)
            self.next_byte = self.next_byte % 250 + 1
            raw_cuda.fill(buffer.ptr, self.next_byte, buffer.nbytes, stream)
            self.live.append((buffer, self.next_byte, stream))

    def free(self, block: tuple[bfc.Buffer, int, int]) -> None:
        buffer, byte, stream = block
        if self.dice.random() < 0.35:  # somebody else reads it last
            other = self.dice.choice(self.streams)
            self.wait_for(stream, other)
            self.allocator.record_stream(buffer, other)
            stream = other
        with raw_cuda.current():
            for place in (buffer.ptr, buffer.ptr + buffer.nbytes - READ):
                address = self.seen.address + READ * len(self.expected)
                raw_cuda.call("cuMemcpyDtoHAsync", address, place, READ, stream)
                self.expected.append(byte)
        if self.dice.random() < 0.5:  # or it is collected
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
        machine.set_patience(0.005)
    yield
    if machine is not None:
        machine.set_patience(10.0)
        assert [text for text in machine.complaints if "held work" not in text] == []
        machine.clear()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
@pytest.mark.parametrize(
    ("kind", "home"),
    [(PLAIN, 0), (PLAIN, 1), (PLAIN, 3), (STITCHED, 0)],
    ids=["plain", "plain, of a stream", "plain, of one that blocks", "stitched"],
)
def test_no_memory_is_used_again_too_early(make, streams, machine, kind, home, seed) -> None:
    """BFC_SEED=<seed> BFC_HISTORIES=1 runs one history again."""
    options, sizes, limits = kind
    limit = random.Random(seed).choice(limits)
    allocator = make(memory_limit=limit, stream=streams[home], **options)
    History(allocator, sizes, streams, seed, machine).run()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("broken", "kind"),
    [("order", PLAIN), ("fence", PLAIN), ("order", STITCHED)],
)
def test_a_source_that_leaves_something_out_is_found(
    make, streams, emulated, broken: str, kind
) -> None:
    """The test above can fail."""
    options, sizes, limits = kind

    def is_found(seed: int) -> bool:
        source = Misbehaving(bfc.CUDASubAllocator())
        source.on(broken, returns=None)
        allocator = make(source, memory_limit=limits[-1 if kind is PLAIN else 0], **options)
        try:
            History(allocator, sizes, streams, seed, emulated).run()
        except AssertionError:
            return True
        return False

    assert any(is_found(seed) for seed in range(HISTORIES))
