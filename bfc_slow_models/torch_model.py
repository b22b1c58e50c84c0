"""A slow, obvious twin of PyTorch's caching allocator, 2.11 or 2.15: lists, `min()` and no bins.

It answers as `bench.peers.torch.TorchPeer` does, method for method, so that one history can be run
on both. No pools have an allocator of their own. Where upstream goes by the order of a hash table
(the streams of events, private pools), it goes by number: upstream does the same for the streams 0,
2, 4, 6 and the pools (0, 2), (0, 4), (0, 6), (0, 8).
Numbers in brackets are the sections of the description of PyTorch's allocator. The part that maps
and unmaps is `torch_ranges.py`.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bfc.pytorch.rules import NEWEST, rules_of
from bfc.pytorch.settings import CachingSettings
from bfc_slow_models.torch_device import Refused, Subject, answers
from bfc_slow_models.torch_events import Events
from bfc_slow_models.torch_pools import PrivatePools
from bfc_slow_models.torch_ranges import Ranges
from bfc_slow_models.torch_records import (
    LARGE_GRANULE,
    MIB,
    MIN_BLOCK,
    SMALL_SEGMENT,
    UNLIMITED,
    Chunk,
    PrivatePool,
    Request,
    SubPool,
    mapped_runs,
    round_up,
    segment_of,
)
from bfc_slow_models.torch_statistics import History, Statistics
from bfc_slow_models.torch_words import (
    ACTIONS,
    DEFAULT_POOL,
    REJECTIONS,
    Pool,
    Segment,
    TraceEntry,
)

#: The switch, which is not among our settings.
EXPANDABLE = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(True|False)\s*(?=,|$)")

# The allocator ---------------------------------------------------------------------------------


class TorchModel(Subject):
    """PyTorch's policy over a `StandIn`, with the methods and the answers of `TorchPeer`.

    Where the driver fails to map, upstream leaves what it has done so far; with `rolls_back` the
    model undoes that, and counts a private pool's pages and not its mappings, as ours does.
    `torch` is the version.
    """

    device: Any  # `model_runner` puts what records its answers in its place

    def __init__(
        self,
        *,
        settings: str | CachingSettings | None = None,
        rolls_back: bool = False,
        torch: str = NEWEST,
        **device: Any,
    ) -> None:
        super().__init__(**device)
        self.rules = rules_of(torch)
        self.ranges = Ranges(self)
        self.rolls_back = rolls_back
        self.expandable = False
        self.settings = CachingSettings()
        if isinstance(settings, CachingSettings):
            self.settings = settings
            self.expandable = bool(getattr(settings, "expandable_segments", False))
        else:
            self.apply(settings or "")
        #: The device's size at the start, of which a memory fraction is taken.
        self.device_bytes = self.device.total_bytes
        self.limit: int | None = None
        self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self.default_pools = SubPool("small_pool"), SubPool("large_pool")
        self.segments: list[list[Chunk]] = []
        self.live: dict[int, Chunk] = {}
        self.private = PrivatePools()
        #: Captures that were marked and not ended.
        self.captures = 0
        self.registered = itertools.count()
        self.events = Events(self)
        at_start = -1 if self.max_split == UNLIMITED else self.max_split
        self.statistics = Statistics(at_start, self.rules.counts_private_pools)
        self.history = History()
        #: What an observer of rejections is told.
        self.rejected: list[tuple[int, int, int]] = []

    # Sizes [2.2 to 2.4]

    @property
    def max_split(self) -> int:
        limit = self.settings.max_split_size
        return UNLIMITED if limit is None else limit

    def round_size(self, nbytes: int) -> int:
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        power = nbytes.bit_length() - 1
        divisions = self.settings.roundup_power2_divisions[min(max(power - 20, 0), 15)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return round_up(nbytes, (1 << power) // divisions or 2 << power)
        return round_up(nbytes, MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        if size <= MIB:
            return SMALL_SEGMENT
        if size < 10 * MIB:
            return self.settings.large_segment_size
        return round_up(size, LARGE_GRANULE)

    def pool_for(self, size: int, stream: int) -> SubPool:
        """The pool of the newest scope that takes the stream, else the default one [2.3]."""
        private = self.private.taking(stream)
        return (self.default_pools if private is None else private.sub_pools)[size > MIB]

    # Allocating [2.5 to 2.10]

    def _malloc(self, nbytes: int, stream: int) -> int:
        if nbytes == 0:
            return 0
        if nbytes >= 1 << 60:
            raise Refused("oom", "too much for any device")
        if not self.is_gated:
            self.events.process()
        elif self.settings.graph_capture_record_stream_reuse:
            self.events.free_what_the_graph_orders(stream)
        size = self.round_size(nbytes)
        pool = self.pool_for(size, stream)
        request = Request(nbytes, size, stream, pool, self.segment_size(size), self.expandable)
        chunk = self.search(request, pool) or self.try_harder(request)
        if chunk is None:
            self.statistics.counters["num_ooms"] += 1
            self.history.add("oom", self.device.free_bytes, size, stream, pool.id)
            raise Refused("oom", "out of memory")
        return self.hand_out(chunk, request).address

    def search(self, request: Request, pool: SubPool) -> Chunk | None:
        """The smallest that is large enough; among equals that of the oldest segment, or with 2.11
        the lowest address [2.6]; in ranges, holes come first."""
        if self.collects:
            pool.searches += 1
        fitting = [
            chunk
            for chunk in pool.in_order()
            if chunk.stream == request.stream and chunk.size >= request.size
        ]
        best = self.ranges.best_of(fitting, request.expandable)
        if best is None:
            return None
        if request.size < self.max_split <= best.size:
            return None
        slack = self.settings.max_non_split_rounding
        if request.size >= self.max_split and best.size >= request.size + slack:
            return None
        pool.free.remove(best)
        return best

    def try_harder(self, request: Request) -> Chunk | None:
        if self.collects:
            self.collect()
        chunk = self.grow(request) or self.borrow(request)
        if chunk is None and self.release_available(request):
            chunk = self.grow(request)
        if chunk is None and not self.is_gated:
            self.release_cached()
            chunk = self.grow(request, again=True)
        return chunk

    @property
    def is_gated(self) -> bool:
        """Whether no event is polled and nothing is waited for: while a scope is open [2.15], or
        with 2.15 while a capture is marked and the current stream captures."""
        if self.rules.scopes_gate:
            return bool(self.private.scopes)
        return self.captures > 0 and self.device.capture_id(self.current_stream) != 0

    def mark_capture(self, begins: bool) -> None:
        self.captures += 1 if begins else -1

    def next_number(self) -> int:
        """Of a new segment or range, where the order goes by it."""
        return next(self.registered) if self.rules.by_registration else 0

    @property
    def collects(self) -> bool:
        return self.limit is not None and self.settings.garbage_collection_threshold > 0

    def collect(self) -> None:
        """Gives back wholly free segments of the default large pool, the oldest first [2.8]."""
        assert self.limit is not None
        threshold = int(self.settings.garbage_collection_threshold * self.limit)
        wanted = self.statistics.reserved - threshold
        pool = self.default_pools[1]
        old = [chunk for chunk in pool.in_order() if not chunk.is_split]
        total_age = float(sum(chunk.age for chunk in old))
        while wanted > 0 and old:
            least = total_age / len(old)
            # A range that one free block fills counts in the average, and stays.
            passed = [chunk for chunk in old if chunk.age >= least and chunk.range is None]
            for chunk in passed:
                old.remove(chunk)
                total_age -= chunk.age
                wanted -= chunk.size
                self.release(chunk)
            if not passed:
                return

    def grow(self, request: Request, again: bool = False) -> Chunk | None:
        """A new segment, or more of an expandable one [2.9]."""
        if again:
            self.statistics.counters["num_alloc_retries"] += 1
        if self.limit is not None and self.statistics.reserved + request.grow_by > self.limit:
            return None
        self.reject_early(request)
        if request.expandable:
            return self.ranges.grow_range(request)
        address = self.device.malloc(request.grow_by)
        if address is None:
            return None
        if request.pool.owner is not None:
            request.pool.owner.segments += 1
        chunk = Chunk(address, self.device.live[address], request.stream, request.pool)
        chunk.number = self.next_number()
        chunk.segment.append(chunk)
        self.segments.append(chunk.segment)
        self.statistics.count(chunk.pool, segment=1, reserved_bytes=chunk.size)
        self.count_oversize("segments", chunk.size, 1)
        self.statistics.counters["num_device_alloc"] += 1
        self.history.add_chunk("segment_alloc", chunk, chunk.size)
        return chunk

    def reject_early(self, request: Request) -> None:
        """What throw_on_cudamalloc_oom does before the device is asked. It takes the fraction of
        the settings, not the limit."""
        total, reserved = self.device_bytes, self.statistics.reserved
        most = int(self.settings.per_process_memory_fraction * total)
        if self.settings.throw_on_cudamalloc_oom and reserved + request.grow_by > most:
            self.statistics.counters[REJECTIONS] += 1
            self.rejected.append((request.grow_by, reserved, total))
            raise Refused("oom", "preemptively rejected")

    def rejections(self) -> list[tuple[int, int, int]]:
        return list(self.rejected)

    def borrow(self, request: Request) -> Chunk | None:
        """Takes a block from a pool that lends to requests which would fail, as if expandable
        segments were off [2.14]."""
        if request.pool.owner is not None:
            return None
        plain = replace(request, expandable=False)
        for identity in sorted(self.private.lenders):
            if identity not in self.private.by_id:
                raise Refused("internal", "a lender that is gone")
            chunk = self.search(plain, self.private.by_id[identity].sub_pools[request.size > MIB])
            if chunk is not None:
                request.expandable = False
                return chunk
        return None

    def splits(self, chunk: Chunk, request: Request) -> bool:
        if chunk.pool.id in self.private.unsplit:
            return False
        rest = chunk.size - request.size
        if chunk.pool.kind == "small_pool" or request.expandable:
            return rest >= MIN_BLOCK
        return request.size < self.max_split and rest > MIB

    def hand_out(self, chunk: Chunk, request: Request) -> Chunk:
        """Split, and count [2.10]."""
        was_split = chunk.is_split
        if self.splits(chunk, request):
            chunk = self.split(chunk, request.size)
            rest = chunk.segment[chunk.segment.index(chunk) + 1]
            if was_split:
                self.statistics.count_holes(chunk, 0, -chunk.size)
            else:
                self.statistics.count_holes(chunk, 1, rest.size)
        elif was_split:
            self.statistics.count_holes(chunk, -1, -chunk.size)
        chunk.allocated, chunk.requested = True, request.nbytes
        self.live[chunk.address] = chunk
        self.history.add_chunk("alloc", chunk)
        self.statistics.count(chunk.pool, allocation=1, active=1)
        self.statistics.count(chunk.pool, allocated_bytes=chunk.size, active_bytes=chunk.size)
        self.statistics.count(chunk.pool, requested_bytes=chunk.requested)
        self.count_oversize("allocations", chunk.size, 1)
        return chunk

    def split(self, chunk: Chunk, size: int) -> Chunk:
        """Returns the low part, a new record. The rest goes back to the free blocks, and keeps the
        requested size of the whole."""
        low = self.ranges.beside(chunk, chunk.address, size, after=False)
        chunk.address += size
        chunk.size -= size
        chunk.pool.put(chunk)
        return low

    # Freeing [2.11, 2.12]

    def _free(self, address: int) -> None:
        chunk = self.chunk_at(address)
        del self.live[address]
        chunk.allocated = False
        self.statistics.count(chunk.pool, allocation=-1, allocated_bytes=-chunk.size)
        self.history.add_chunk("free_requested", chunk)
        self.count_oversize("allocations", chunk.size, -1)
        if not chunk.uses:
            self.free_chunk(chunk)
        elif self.is_gated:
            self.events.defer(chunk)
        else:
            self.events.record(chunk)

    def chunk_at(self, address: int) -> Chunk:
        if address not in self.live:
            raise Refused("internal", "invalid device pointer")
        return self.live[address]

    def free_chunk(self, chunk: Chunk) -> None:
        self.history.add_chunk("free_completed", chunk)
        pool, size = chunk.pool, chunk.size
        holes = hole_bytes = 0
        for neighbour in self.neighbours(chunk):
            merged = self.merge(chunk, neighbour)
            if merged:
                holes -= 1
                hole_bytes -= merged
        pool.put(chunk)
        if chunk.is_split:
            holes += 1
            hole_bytes += chunk.size
        # One step for the net change: a peak or a total never sees the parts.
        self.statistics.count_holes(chunk, holes, hole_bytes)
        self.statistics.count(pool, active=-1, active_bytes=-size, requested_bytes=-chunk.requested)

    def merge(self, chunk: Chunk, neighbour: Chunk) -> int:
        """Add a free neighbour to a block, if both have memory or neither has. Returns its bytes,
        or 0."""
        if neighbour.is_active or neighbour.mapped != chunk.mapped:
            return 0
        (chunk.pool.free if neighbour.mapped else chunk.pool.unmapped).remove(neighbour)
        chunk.segment.remove(neighbour)
        chunk.address = min(chunk.address, neighbour.address)
        chunk.size += neighbour.size
        return neighbour.size

    def neighbours(self, chunk: Chunk) -> list[Chunk]:
        at = chunk.segment.index(chunk)
        return chunk.segment[max(at - 1, 0) : at] + chunk.segment[at + 1 : at + 2]

    def _record_stream(self, address: int, stream: int) -> None:
        chunk = self.chunk_at(address)
        if stream == chunk.stream:
            return
        chunk.uses.add(stream)
        if self.is_gated:
            chunk.scope_uses.add(stream)

    def synchronize(self, owner: PrivatePool | None = None) -> None:
        self.statistics.counters["num_sync_all_streams"] += 1
        if self.is_gated:
            raise Refused("internal", "a scope is open")
        self.events.wait(owner)

    # Giving back [2.13]

    def release(self, chunk: Chunk) -> None:
        self.history.add_chunk("segment_free", chunk, chunk.size)
        self.device.free(chunk.address, chunk.size)
        if chunk.pool.owner is not None:
            chunk.pool.owner.segments -= 1
        self.statistics.count(chunk.pool, segment=-1, reserved_bytes=-chunk.size)
        self.count_oversize("segments", chunk.size, -1)
        self.statistics.counters["num_device_free"] += 1
        chunk.pool.free.remove(chunk)
        self.segments.remove(chunk.segment)

    def release_whole(self, pool: SubPool) -> None:
        for chunk in pool.in_order():
            if chunk.range is None and not chunk.is_split:
                self.release(chunk)
        self.ranges.unmap_free(pool)

    def release_cached(self, identity: Pool = DEFAULT_POOL) -> None:
        if identity == DEFAULT_POOL and not self.is_gated:
            self.synchronize()
            self.release_whole(self.default_pools[1])
            self.release_whole(self.default_pools[0])
        for pool in sorted(self.private.by_id.values(), key=lambda pool: pool.id):
            if pool.references or identity not in (DEFAULT_POOL, pool.id):
                continue
            if identity != DEFAULT_POOL:
                self.synchronize(pool)
            for sub_pool in pool.sub_pools:
                self.release_whole(sub_pool)
            if not pool.segments:
                del self.private.by_id[pool.id]

    def release_available(self, request: Request) -> bool:
        """Gives back oversize blocks: the smallest that suffices, else the largest ones. Ranges are
        passed over; where the smallest is of a range, so are all that are larger."""
        if self.max_split == UNLIMITED:
            return False
        wanted = max(request.size, self.max_split)
        ours = [chunk for chunk in request.pool.in_order() if chunk.stream == request.stream]
        enough = [chunk for chunk in ours if chunk.size >= wanted]
        if enough and enough[0].range is None:
            self.release(enough[0])
            return True
        for chunk in reversed(ours[: len(ours) - len(enough)]):
            if wanted <= 0 or chunk.size < self.max_split:
                break
            if chunk.range is None:
                wanted -= chunk.size
                self.release(chunk)
        return wanted <= 0

    @answers
    def empty_cache(self, pool: Pool = DEFAULT_POOL) -> None:
        self.release_cached(pool)

    # Settings and private pools [2.14, 2.18]

    @answers
    def set_settings(self, text: str) -> None:
        try:
            self.apply(text)
        except ValueError as error:
            raise Refused("value", str(error)) from error

    def apply(self, text: str) -> None:
        switches = EXPANDABLE.findall(text)
        rest = EXPANDABLE.sub("", text).lstrip(",") if switches else text
        self.settings = self.settings.apply(rest, strict=True, torch=self.rules.version)
        if switches:
            self.expandable = switches[-1] == "True"

    @answers
    def set_memory_fraction(self, fraction: float) -> None:
        if not 0 <= fraction <= 1:
            raise Refused("internal", "a fraction lies between 0 and 1")
        limit = fraction * self.device_bytes
        rounds_up = self.rules.rounds_limit and limit - int(limit) >= 0.5
        self.limit = None if fraction == 1 else int(limit) + rounds_up

    @answers
    def memory_fraction(self) -> float:
        return 1.0 if self.limit is None else self.limit / self.device_bytes

    @answers
    def create_pool(self, pool: Pool) -> None:
        self.private.refer(pool)

    @answers
    def begin_pool(self, pool: Pool, streams: str | int = "all") -> None:
        self.private.begin(pool, streams)

    @answers
    def end_pool(self, pool: Pool) -> None:
        self.private.end(pool)
        if self.settings.graph_capture_record_stream_reuse and not self.rules.scopes_gate:
            self.events.record_deferred(pool)

    @answers
    def release_pool(self, pool: Pool) -> None:
        released = self.private.known(pool)
        released.references -= 1
        if self.rules.forgets_unsplit and not released.references:
            self.private.unsplit.discard(pool)

    @answers
    def pool_use_count(self, pool: Pool) -> int:
        return self.private.known(pool).references

    @answers
    def set_use_on_oom(self, pool: Pool, use: bool = True) -> None:
        (self.private.lenders.add if use else self.private.lenders.discard)(pool)

    def set_no_split(self, pool: Pool) -> None:
        self.private.unsplit.add(pool)

    # Statistics, snapshots and the trace [3.1, 3.4]

    def count_oversize(self, what: str, size: int, amount: int) -> None:
        if size >= self.max_split:
            self.statistics.numbers[f"oversize_{what}"].add(amount)

    def stats(self) -> dict[str, int]:
        return self.statistics.all()

    @answers
    def reset_peak_stats(self) -> None:
        self.statistics.reset_peaks()

    @answers
    def reset_accumulated_stats(self) -> None:
        self.statistics.reset_accumulated()

    def snapshot(self, pool: Pool = DEFAULT_POOL) -> list[Segment]:
        """All segments, or one private pool's, by address. Of one pool, upstream leaves out the
        runs of a range that do not begin where the range does."""
        runs = [
            run
            for segment in self.segments
            for run in mapped_runs(segment)
            if pool == DEFAULT_POOL or self.rolls_back or run[0] is segment[0]
        ]
        chosen = [
            segment_of(chunks)
            for chunks in sorted(runs, key=lambda chunks: chunks[0].address)
            if pool in (DEFAULT_POOL, chunks[0].pool.id)
        ]
        active = sum(segment["active_size"] for segment in chosen)
        self.history.add("snapshot", 0, active, 0, pool)
        return chosen

    @answers
    def record_history(
        self, enabled: bool, max_entries: int = 1 << 20, skip_actions: Sequence[str] = ()
    ) -> None:
        if not set(skip_actions) <= set(ACTIONS):
            raise Refused("internal", "no such action")
        self.history.entries = deque(maxlen=max(max_entries, 1)) if enabled else None
        self.history.skipped = frozenset(skip_actions)

    def trace(self) -> list[TraceEntry]:
        """What was kept; asking adds an entry."""
        entries = list(self.history.entries or ())
        self.snapshot()
        return entries
