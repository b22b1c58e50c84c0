"""A slow and plain model of PyTorch's caching host allocator, over a simulated source.

It follows PyTorch's behaviour, 4.
"""

from __future__ import annotations

import math

from bfc import PinnedSettings

PAGE = 4096


class Block:
    def __init__(self, size: int, reserve_offset: int | None) -> None:
        self.size = size
        self.reserve_offset = reserve_offset
        self.ptr = 0
        self.streams: list[int] = []
        self.waits = 0

    @property
    def bucket(self) -> int:
        return math.ceil(math.log2(self.size))

    def place(self, ptr: int) -> bool:
        """Whether the allocator's block is this one. The first address that it has is taken."""
        self.ptr = self.ptr or ptr
        return self.ptr == ptr


class Figure:
    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def take(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount


class Model:
    def __init__(self, text: str, capacity: int) -> None:
        settings = PinnedSettings().apply(text)
        self.threshold = settings.pinned_max_round_threshold or math.inf
        self.cap = settings.pinned_max_cached_size or math.inf
        self.reserve_size = settings.pinned_reserve_segment_size
        self.reserve_used: int | None = None
        self.capacity = capacity
        self.taken = 0
        self.free_lists: dict[int, list[Block]] = {}
        self.queue: list[tuple[int, int, Block]] = []  # stream, its round, the block
        self.held: set[int] = set()
        self.rounds: dict[int, int] = {}
        names = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
        self.figures = {name: Figure() for name in names}

    def stats(self) -> dict[str, int]:
        found = {
            f"{name}.{field}": value
            for name, figure in self.figures.items()
            for field, value in vars(figure).items()
        }
        owned = self.figures["allocations"]
        return found | {"num_host_alloc": owned.allocated, "num_host_free": owned.freed}

    # -- streams

    def hold(self, stream: int) -> None:
        self.held.add(stream)

    def finish(self, stream: int) -> None:
        self.held.discard(stream)
        self.rounds[stream] = self.rounds.get(stream, 0) + 1

    def is_done(self, stream: int, since: int) -> bool:
        return stream not in self.held or self.rounds.get(stream, 0) > since

    def record(self, block: Block, stream: int) -> None:
        if stream not in block.streams:
            block.streams.append(stream)

    def process_events(self) -> None:
        while self.queue and self.is_done(*self.queue[0][:2]):
            _stream, _since, block = self.queue.pop(0)
            block.waits -= 1
            if block.waits == 0:
                self.shelve(block)

    # -- blocks

    def rounded(self, nbytes: int) -> int:
        if nbytes <= self.threshold and nbytes <= self.cap:
            size = 1
            while size < nbytes:
                size *= 2
            return size
        return nbytes

    def allocate(self, nbytes: int) -> Block | None:
        self.process_events()
        size = self.rounded(nbytes)
        block = self.cached(size) or self.new(size)
        if block is None:
            self.drop_cache()
            block = self.new(size)
        if block is None:
            for stream, since, _block in list(self.queue):  # to wait lets a stream finish
                if not self.is_done(stream, since):
                    self.finish(stream)
            self.process_events()
            block = self.cached(size)
            if block is None:
                self.drop_cache()
                block = self.new(size)
        if block is not None:
            self.figures["active_requests"].add(1)
            self.figures["active_bytes"].add(block.size)
        return block

    def cached(self, size: int) -> Block | None:
        stack = self.free_lists.get(math.ceil(math.log2(size)), [])
        for block in reversed(stack):
            if block.size >= size:
                stack.remove(block)
                return block
        return None

    def new(self, size: int) -> Block | None:
        offset = None
        if self.reserve_size:
            if self.reserve_used is None:
                self.reserve_used, self.taken = 0, self.taken + self.reserve_size
            if self.reserve_used + size <= self.reserve_size:
                offset = self.reserve_used
                self.reserve_used += math.ceil(size / PAGE) * PAGE
        if offset is None:
            if self.taken + size > self.capacity:
                return None
            self.taken += size
        self.figures["allocations"].add(1)
        self.figures["allocated_bytes"].add(size)
        return Block(size, offset)

    def free(self, block: Block) -> None:
        streams, block.streams = block.streams, []
        if not streams or not self.held:  # the source says that nothing is queued anywhere
            self.shelve(block)
            return
        block.waits = len(streams)
        for stream in streams:
            self.queue.append((stream, self.rounds.get(stream, 0), block))
        # a mark on a stream without work is done, whatever comes later
        self.queue = [
            (stream if stream in self.held or other is not block else -1, since, other)
            for stream, since, other in self.queue
        ]

    def shelve(self, block: Block) -> None:
        self.figures["active_requests"].take(1)
        self.figures["active_bytes"].take(block.size)
        if block.size > self.cap:
            self.give_back(block)
        else:
            self.free_lists.setdefault(block.bucket, []).append(block)

    def give_back(self, block: Block) -> None:
        self.figures["allocations"].take(1)
        self.figures["allocated_bytes"].take(block.size)
        if block.reserve_offset is None:
            self.taken -= block.size

    def drop_cache(self) -> None:
        dropped = [block for stack in self.free_lists.values() for block in stack]
        self.free_lists.clear()
        for block in dropped:
            self.give_back(block)

    def empty_cache(self) -> int:
        before = self.figures["allocated_bytes"].current
        self.process_events()
        self.drop_cache()
        return before - self.figures["allocated_bytes"].current
