"""The statistics and the trace of the slow model of PyTorch's allocator [3.1, 3.4]."""

from __future__ import annotations

from collections import defaultdict, deque

from bfc_slow_models.torch_records import Chunk, Stat, SubPool
from bfc_slow_models.torch_words import (
    DEFAULT_POOL,
    REJECTIONS,
    STATS,
    Pool,
    TraceEntry,
    pool_stats,
)


class Statistics:
    """What `torch.cuda.memory_stats` returns. `max_split_size` is what it was at the start."""

    def __init__(self, max_split_size: int, counts_private_pools: bool) -> None:
        self.max_split_size, self.counts_private_pools = max_split_size, counts_private_pools
        self.numbers: dict[str, Stat] = defaultdict(Stat)
        counted = (name for name in STATS if name.startswith("num_"))
        self.counters = dict.fromkeys([*counted, REJECTIONS], 0)
        #: The private pools that have had memory.
        self.seen: set[Pool] = set()

    @property
    def reserved(self) -> int:
        return self.numbers["reserved_bytes.all"].current

    def count(self, pool: SubPool, **changes: int) -> None:
        for group, amount in changes.items():
            self.numbers[f"{group}.all"].add(amount)
            self.numbers[f"{group}.{pool.kind}"].add(amount)
        if "reserved_bytes" in changes and pool.owner is not None:
            self.seen.add(pool.id)
            name = pool_stats(pool.id)[0].removesuffix(".all.current")
            self.numbers[f"{name}.all"].add(changes["reserved_bytes"])
            self.numbers[f"{name}.{pool.kind}"].add(changes["reserved_bytes"])

    def count_holes(self, chunk: Chunk, number: int, nbytes: int) -> None:
        """Counts free parts of split segments. Upstream leaves out those of ranges."""
        if chunk.range is None:
            self.count(chunk.pool, inactive_split=number, inactive_split_bytes=nbytes)

    def all(self) -> dict[str, int]:
        """All 122 counters; with 2.15 also the rejections, and those of private pools."""
        values = self.counters | {"max_split_size": self.max_split_size}
        names = list(STATS)
        if self.counts_private_pools:
            names += [REJECTIONS, *(key for pool in sorted(self.seen) for key in pool_stats(pool))]
        for name in names:
            group, _, figure = name.rpartition(".")
            if name not in values:
                values[name] = getattr(self.numbers[group], figure)
        return {name: values[name] for name in names}

    def reset_peaks(self) -> None:
        for number in self.numbers.values():
            number.peak = number.current

    def reset_accumulated(self) -> None:
        for number in self.numbers.values():
            number.allocated = number.freed = 0
        self.counters = dict.fromkeys(self.counters, 0)


class History:
    """The trace. Nothing is kept before it is recorded."""

    def __init__(self) -> None:
        self.entries: deque[TraceEntry] | None = None
        self.skipped: frozenset[str] = frozenset()

    def add(
        self, action: str, addr: int, size: int, stream: int, pool: Pool = DEFAULT_POOL
    ) -> None:
        if self.entries is not None and action not in self.skipped:
            entry = TraceEntry(action=action, addr=addr, size=size, stream=stream, pool_id=pool)
            self.entries.append(entry)

    def add_chunk(self, action: str, chunk: Chunk, size: int | None = None) -> None:
        size = chunk.requested if size is None else size
        self.add(action, chunk.address, size, chunk.stream, chunk.pool.id)
