"""Our `PinnedAllocator` as a subject that answers as `bench.peers.torch_host.TorchHostPeer` does,
over a device in Python that does what `simulated_device.hpp` does."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import bfc
from bench.peers.server import Call, Operation
from bench.peers.torch_host import FIELDS, FIGURES, TIMERS, TIMES, microseconds

MIB = 1 << 20


class Clock(types.SimpleNamespace):
    """Stands for `time`: it moves when the device is called."""

    now = 0

    def perf_counter_ns(self) -> int:
        return self.now


class Stream:
    def __init__(self) -> None:
        self.recorded = self.finished = 0
        self.held = False


class Event:
    def __init__(self, device: Device, number: int, stream: int) -> None:
        self.device, self.number, self.stream = device, number, device.stream(stream)
        self.stream.recorded += 1
        self.position = self.stream.recorded
        if not self.stream.held:
            self.stream.finished = self.position

    def done(self) -> bool:
        over = self.position <= self.stream.finished
        self.device.calls.append(("event_query", self.number, int(over)))
        return over

    def wait(self) -> None:
        self.stream.finished, self.stream.held = self.stream.recorded, False


class Device(bfc.SubAllocator):
    """The simulated device of the peer: the same addresses, and the same log."""

    device = bfc.Device("simulated")
    asynchronous = True

    def __init__(self, clock: Clock, capacity: int = 1 << 50) -> None:
        self.clock, self.total_bytes = clock, capacity
        self.calls: list[Call] = []
        self.live: dict[int, int] = {}
        self.events = 0
        self.streams: dict[int, Stream] = {}
        self.next = 1 << 40

    def __repr__(self) -> str:
        return "<the simulated device>"

    def stream(self, number: int) -> Stream:
        return self.streams.setdefault(number, Stream())

    def note(self, call: Call) -> None:
        self.calls.append(call)
        self.clock.now += 1000 * microseconds(len(self.calls))

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        if sum(self.live.values()) + nbytes > self.total_bytes:
            self.calls.append(("host_malloc", nbytes, None))
            return None
        address = -(-self.next // 4096) * 4096
        self.next = address + nbytes
        self.live[address] = nbytes
        self.note(("host_malloc", nbytes, address))
        return address, nbytes

    def free(self, address: int, nbytes: int) -> None:
        assert self.live.pop(address) == nbytes
        self.note(("host_free", nbytes, address))

    def fence(self, stream: int) -> Event:
        self.events += 1
        self.calls.append(("event_record", self.events, stream))
        return Event(self, self.events, stream)


class Ours:
    """The operations of the peer, by their names, on ours. `clock` must stand for its `time`."""

    def __init__(self, clock: Clock, capacity: int = 1 << 50) -> None:
        self.device = Device(clock, capacity)
        self.allocator = bfc.PinnedAllocator(self.device)
        self.slots: dict[int, tuple[int, object]] = {}

    def run(self, operations: Iterable[Operation]) -> list[Any]:
        return [getattr(self, name)(*arguments) for name, *arguments in operations]

    def limit(self, round_at_most: int, cached_at_most: int) -> None:
        self.allocator.set_settings(
            f"pinned_max_round_threshold_mb:{round_at_most // MIB},"
            f"pinned_max_cached_size_mb:{cached_at_most // MIB}"
        )

    def reserve(self, nbytes: int) -> None:
        self.allocator.set_settings(f"pinned_reserve_segment_size_mb:{nbytes // MIB}")

    def allocate(self, nbytes: int, slot: int) -> int:
        ptr = self.allocator.allocate_raw(nbytes)
        self.slots[slot] = ptr, self.allocator.find(ptr)
        return ptr

    def free(self, slot: int) -> None:
        self.allocator.deallocate_raw(self.slots[slot][0])
        self.allocator.check()

    def record_event(
        self, slot: int, stream: int, offset: int = 0, owner: int | None = None
    ) -> int:
        context = None if owner is None else self.slots[owner][1]
        ptr = self.slots[slot][0] + offset
        return self.allocator.record_event(ptr, context, stream)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def stats(self) -> dict[str, int]:
        ours = self.allocator.host_memory_stats()
        names = [f"{figure}.{field}" for figure in FIGURES for field in FIELDS]
        names += [f"{timer}.{time}" for timer in TIMERS for time in TIMES]
        return {name: ours[name] for name in (*names, "num_host_alloc", "num_host_free")}

    def reset_peak_stats(self) -> None:
        self.allocator.reset_peak_stats()

    def reset_accumulated_stats(self) -> None:
        self.allocator.reset_accumulated_stats()

    def calls(self) -> list[Call]:
        return self.device.calls

    def live_bytes(self) -> int:
        return sum(self.device.live.values())

    def hold(self, stream: int) -> None:
        self.device.stream(stream).held = True

    def finish(self, stream: int) -> None:
        it = self.device.stream(stream)
        it.finished, it.held = it.recorded, False

    def finish_events(self, stream: int, count: int) -> None:
        it = self.device.stream(stream)
        it.finished += min(count, it.recorded - it.finished)
