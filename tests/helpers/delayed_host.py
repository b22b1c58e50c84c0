"""Host memory whose streams run late: as on a GPU, what is queued runs when its time has come.

`LateHost` is a source of real memory. A test queues writes and reads on streams and lets them run
later, one by one, in any order that `order` allows. A read that does not see what was written by
its block's own writes is a fault, and so is unmapping memory that queued work will touch.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bfc
from bfc.testing import Misbehaving

WORD = 8
STRIDE = 1 << 20


def spots(address: int, nbytes: int) -> list[int]:
    """Where a block is written and read: at both ends, and once in each MiB."""
    if nbytes < WORD:
        return []
    return [*range(address, address + nbytes - WORD, STRIDE), address + nbytes - WORD]


@dataclass(frozen=True)
class Mark:
    """The place in a stream behind so many pieces of work."""

    stream: int
    number: int


@dataclass
class Work:
    """Something that is queued: a mark to wait for, or a call that touches memory."""

    run: Callable[[], None]
    awaits: Mark | None = None
    address: int = 0
    nbytes: int = 0


class LateFence:
    def __init__(self, source: LateHost, mark: Mark) -> None:
        self.source = source
        self.mark = mark

    def done(self) -> bool:
        return self.source.has_run(self.mark)

    def wait(self) -> None:
        self.source.run_to(self.mark)


class LateHost(bfc.HostSubAllocator):
    """Host memory, mapped and in blocks, with streams that run late. For one thread."""

    asynchronous = True

    def __init__(self, capacity: int | str) -> None:
        super().__init__(capacity)
        self.queues: dict[int, deque[Work]] = {}
        self.ran: dict[int, int] = {}
        #: What went wrong.
        self.faults: list[str] = []
        self.orders = 0

    # -- what a program does ----------------------------------------------------------------------

    def write(self, stream: int, address: int, nbytes: int, number: int) -> None:
        """Queue that a block is filled with a number of its own."""

        def run() -> None:
            for spot in spots(address, nbytes):
                ctypes.memmove(spot, number.to_bytes(WORD, "little"), WORD)

        self._queue(stream, Work(run, None, address, nbytes))

    def read(self, stream: int, address: int, nbytes: int, number: int) -> None:
        """Queue a look whether the block still has its number."""

        def run() -> None:
            for spot in spots(address, nbytes):
                seen = int.from_bytes(ctypes.string_at(spot, WORD), "little")
                if seen != number:
                    self.faults.append(
                        f"block {number} of stream {stream}: at {spot:#x} stands {seen}"
                    )

        self._queue(stream, Work(run, None, address, nbytes))

    def make_wait(self, then: int, first: int) -> None:
        """What a program does that hands memory from one stream to another."""
        mark = self._mark(first)
        if then != first and not self.has_run(mark):
            self._queue(then, Work(lambda: None, mark))

    def _queue(self, stream: int, work: Work) -> None:
        self.queues.setdefault(stream, deque()).append(work)

    # -- time -------------------------------------------------------------------------------------

    def _mark(self, stream: int) -> Mark:
        return Mark(stream, self.ran.get(stream, 0) + len(self.queues.get(stream, ())))

    def has_run(self, mark: Mark) -> bool:
        return self.ran.get(mark.stream, 0) >= mark.number

    def run_one(self, stream: int) -> bool:
        """Run the next piece of work of a stream, unless it waits for another stream."""
        queue = self.queues.get(stream)
        if not queue or (queue[0].awaits is not None and not self.has_run(queue[0].awaits)):
            return False
        queue.popleft().run()
        self.ran[stream] = self.ran.get(stream, 0) + 1
        return True

    def run_to(self, mark: Mark) -> None:
        """Run what is needed until a mark is passed: marks lie behind others only in time."""
        while not self.has_run(mark):
            if not self.run_one(mark.stream):
                awaits = self.queues[mark.stream][0].awaits
                assert awaits is not None
                self.run_to(awaits)

    def run_all(self) -> None:
        for stream in list(self.queues):
            self.run_to(self._mark(stream))

    # -- the source -------------------------------------------------------------------------------

    def order(self, first: int, then: int) -> None:
        self.orders += 1
        self.make_wait(then, first)

    def fence(self, stream: int) -> LateFence | None:
        mark = self._mark(stream)
        return None if self.has_run(mark) else LateFence(self, mark)

    def free(self, address: int, nbytes: int) -> None:
        """As cuMemFree: when all streams have finished."""
        self.run_all()
        super().free(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        for stream, queue in self.queues.items():
            for work in queue:
                if work.address < address + nbytes and address < work.address + work.nbytes:
                    self.faults.append(f"{address:#x} is unmapped under work of stream {stream}")
                    self.run_all()  # it would crash later
                    return super().unmap(address, nbytes)
        return super().unmap(address, nbytes)


class LateProgram:
    """A random program over several streams. Each block is written when it is allocated and read
    before it is freed, now and then by another stream that was made to wait and was recorded."""

    STREAMS = (0, 3, 5, 8)

    def __init__(self, allocator: Any, source: LateHost, dice: random.Random) -> None:
        self.allocator, self.source, self.dice = allocator, source, dice
        self.live: list[tuple[bfc.Buffer, int, int]] = []  # with its number, and its stream
        self.numbers = 0

    def draw_size(self) -> int:
        kind = self.dice.random()
        if kind < 0.3:
            return int(2 ** self.dice.uniform(4, 20))
        if kind < 0.5:
            return (2 << 20) * self.dice.randrange(1, 4)
        return int(2 ** self.dice.uniform(20, 23))

    def step(self) -> None:
        choice = self.dice.random()
        if choice < 0.35 or not self.live:
            self.allocate()
        elif choice < 0.65:
            self.free(self.live.pop(self.dice.randrange(len(self.live))))
        elif choice < 0.67:
            self.dice.choice((self.allocator.release_free_regions, self.allocator.stats))()
        else:
            self.source.run_one(self.dice.choice(self.STREAMS))

    def allocate(self) -> None:
        stream = self.dice.choice(self.STREAMS)
        try:
            buffer = self.allocator.allocate(self.draw_size(), stream=stream)
        except bfc.OutOfMemoryError:
            if self.live:
                self.free(self.live.pop(0))
            return
        self.numbers += 1
        self.source.write(stream, buffer.ptr, buffer.nbytes, self.numbers)
        self.live.append((buffer, self.numbers, stream))

    def free(self, block: tuple[bfc.Buffer, int, int]) -> None:
        buffer, number, stream = block
        self.source.read(stream, buffer.ptr, buffer.nbytes, number)
        if self.dice.random() < 0.3:
            other = self.dice.choice(self.STREAMS)
            self.source.make_wait(other, stream)
            self.source.read(other, buffer.ptr, buffer.nbytes, number)
            self.allocator.record_stream(buffer, other)
        buffer.free()

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.step()
            if step % 50 == 0:
                self.allocator.check()

    def end(self) -> list[str]:
        """Free all, close, and let the rest run. Returns the faults."""
        while self.live:
            self.free(self.live.pop())
        self.allocator.check()
        self.allocator.close()
        self.source.run_all()
        return self.source.faults


def without(*calls: str) -> Callable[[int], Misbehaving]:
    """Makes late hosts of a capacity that leave something out: what is freed is used too early."""

    def make(capacity: int) -> Misbehaving:
        source = Misbehaving(LateHost(capacity))
        for call in calls:
            source.on(call, returns=None)
        return source

    return make
