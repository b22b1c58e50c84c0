"""`bfc.CachingAllocator` behind the methods of `bench.peers.torch.TorchPeer`, so that one history
can be run on ours, the peer and the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import bfc
from bench.peers.server import Operation
from bench.peers.torch import NEWEST, TorchPeer
from bfc_slow_models.model_runner import segments_of
from bfc_slow_models.torch_device import Refused, Subject, answers
from bfc_slow_models.torch_words import DEFAULT_POOL, Call, Pool, Segment, TraceEntry


def calls_by_stream(calls: Iterable[Call]) -> list[Call]:
    """The peer's log as `StandIn` keeps it: the number that upstream gives an event says nothing of
    the policy."""
    stream: dict[int, int] = {}
    named: list[Call] = []
    for name, first, second in calls:
        if name == "event_record":
            assert second is not None
            stream[first] = second
        if name.startswith("event_"):
            over = bool(second) if name == "event_query" else None
            named.append((name, stream[first], over))
        else:
            named.append((name, first, second))
    return named


class Peer(TorchPeer):
    """The compiled original, whose log names events as ours does."""

    def run(self, operations: Iterable[Operation]) -> list[Any]:
        listed = list(operations)
        return [
            calls_by_stream(answer) if operation == ("calls",) else answer
            for operation, answer in zip(listed, super().run(listed), strict=True)
        ]


class CommonPeer(Peer):
    """On a device as most are: without fabric handles, so that upstream raises any error of the
    driver at once but a lack of memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fabric=False, **options)


class KeepingPeer(CommonPeer):
    """One that gives no record of a block the address of an earlier one: see `keep_records`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.keep_records()


class Ours(Subject):
    """`bfc.CachingAllocator(strict=True)` with the methods and the answers of `TorchPeer`."""

    def __init__(self, *, settings: str | None = None, torch: str = NEWEST, **device: Any) -> None:
        super().__init__(**device)
        self.allocator = bfc.CachingAllocator(
            self.device, settings=settings or "", strict=True, torch=torch
        )

        self.rejected: list[tuple[int, int, int]] = []
        self.allocator.attach_oom_rejection_observer(
            lambda _ordinal, *figures: self.rejected.append(figures)
        )

    def rejections(self) -> list[tuple[int, int, int]]:
        return list(self.rejected)

    def run(self, operations: Iterable[Operation]) -> list[Any]:
        found = []
        for operation in operations:
            if operation[0] == "allocate":
                self.current_stream = operation[2] if len(operation) > 2 else 0
            with bfc.use_stream(self.current_stream):
                found.append(self._one(*operation))
        return found

    def mark_capture(self, begins: bool) -> None:
        if begins:
            self.allocator.mark_capture_begin()
        else:
            self.allocator.mark_capture_end()

    def close(self) -> None:
        """Its books must be in order. Nothing is freed."""
        self.allocator.check()

    def _malloc(self, nbytes: int, stream: int) -> int:
        return self.allocator.allocate_raw(nbytes, stream)

    def _free(self, address: int) -> None:
        self.allocator.deallocate_raw(address)

    def _record_stream(self, address: int, stream: int) -> None:
        self.allocator.record_stream(address, stream)

    @answers
    def empty_cache(self, pool: Pool = DEFAULT_POOL) -> None:
        if pool == DEFAULT_POOL:
            self.allocator.empty_cache()
        else:
            self.allocator._empty_pool(pool)

    @answers
    def set_settings(self, text: str) -> None:
        self.allocator.set_settings(text)

    @answers
    def set_memory_fraction(self, fraction: float) -> None:
        try:
            self.allocator.set_memory_fraction(fraction)
        except ValueError as error:
            raise Refused("internal", str(error)) from error

    def memory_fraction(self) -> float:
        return self.allocator.memory_fraction

    @answers
    def create_pool(self, pool: Pool) -> None:
        self.allocator._create_pool(pool)

    @answers
    def begin_pool(self, pool: Pool, streams: str | int = "all") -> None:
        self.allocator.begin_allocate_to_pool(pool, streams)

    @answers
    def end_pool(self, pool: Pool) -> None:
        self.allocator.end_allocate_to_pool(pool)

    @answers
    def release_pool(self, pool: Pool) -> None:
        self.allocator.release_pool(pool)

    @answers
    def pool_use_count(self, pool: Pool) -> int:
        return self.allocator._pool_use_count(pool)

    @answers
    def set_use_on_oom(self, pool: Pool, use: bool = True) -> None:
        self.allocator._set_use_on_oom(pool, use)

    @answers
    def set_no_split(self, pool: Pool) -> None:
        self.allocator._set_no_split(pool)

    def stats(self) -> dict[str, int]:
        return self.allocator.memory_stats()

    def reset_peak_stats(self) -> None:
        self.allocator.reset_peak_stats()

    def reset_accumulated_stats(self) -> None:
        self.allocator.reset_accumulated_stats()

    def snapshot(self, pool: Pool = DEFAULT_POOL) -> list[Segment]:
        return [
            segment
            for segment in segments_of(self.allocator.snapshot(history=False))
            if pool in (DEFAULT_POOL, segment["segment_pool_id"])
        ]

    @answers
    def record_history(
        self, enabled: bool, max_entries: int = 1 << 20, skip_actions: Sequence[str] = ()
    ) -> None:
        recorded = "all" if enabled else None
        try:
            self.allocator.record_history(
                # upstream does not write down what happens to pools
                recorded,
                max_entries=max_entries,
                skip_actions=(*skip_actions, "annotate"),
            )
        except ValueError as error:
            raise Refused("internal", str(error)) from error

    def trace(self) -> list[TraceEntry]:
        entries = self.allocator.history()
        self.allocator.snapshot()  # the peer's answer is a part of one
        return [
            TraceEntry(
                action=entry.action,
                addr=entry.addr,
                size=entry.size,
                stream=entry.stream,
                pool_id=entry.pool_id,
            )
            for entry in entries
        ]
