"""Random histories of a BFCAllocator whose memory goes to graphs and to others, each beside an
allocator that has nothing else to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import bfc

MIB = 1 << 20
LIMIT = 1 << 36  # so much that nothing is ever refused
OTHERS = 0
Key = tuple[int, int]  # the number of a graph's pool, or OTHERS, and a stream, or 0


class Alone(Protocol):
    """An allocator over a device of its own, with regions that grow."""

    def allocate(self, nbytes: int) -> int | None: ...
    def free(self, address: int) -> None: ...
    def chunks(self) -> list[tuple[int, int, bool]]: ...
    def calls(self) -> list[tuple[str, int, int | None]]: ...


def base_of(key: Key) -> int:
    """The first address of the part of a device that belongs to a pool's stream."""
    return (key[0] * 16 + key[1] + 1) << 40


class Parts(bfc.SimulatedSubAllocator):
    """A device whose answers depend only on what was asked of it for the same pool and stream."""

    def __init__(self, **habits: Any) -> None:
        super().__init__(1 << 60, **habits)
        self.habits = habits
        self.here: Key = (OTHERS, 0)
        self.parts: dict[int, bfc.SimulatedSubAllocator] = {}

    def part(self, base: int) -> bfc.SimulatedSubAllocator:
        if base not in self.parts:
            self.parts[base] = bfc.SimulatedSubAllocator(1 << 60, base=base, **self.habits)
        return self.parts[base]

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        return self.part(base_of(self.here)).alloc(alignment, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self.part(address >> 40 << 40).free(address, nbytes)


@dataclass
class Scope:
    """An open use of a pool: a capture takes all that this thread asks for."""

    pool: int
    stream: int
    is_capture: bool
    entered: AbstractContextManager[Any] | None = None

    def takes(self, stream: int) -> bool:
        return self.is_capture or self.stream == stream


@dataclass
class GraphHistory:
    """One history, with every answer compared."""

    rng: random.Random
    alone: Callable[[Key, dict[str, Any], dict[str, Any]], Alone]
    streams: tuple[int, ...] = (0, 7, 8)
    release: Callable[[Alone], None] | None = None
    live: list[tuple[int, Key]] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    graphs: dict[int, list[bfc.GraphPool]] = field(default_factory=dict)
    beside: dict[Key, Alone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        joins = self.rng.random() < 0.4
        self.habits: dict[str, Any] = {
            "alignment": self.rng.choice([256, 4096, 2 * MIB]),
            "gap": 0 if joins else self.rng.choice([0, 256, 4096]),
            "supports_coalescing": joins,
        }
        self.options: dict[str, Any] = {
            "memory_limit": LIMIT,
            "fragmentation_fraction": self.rng.choice([0.0, 1e-7, 1e-5, 1e-4]),
            "garbage_collection": self.rng.random() < 0.5,
        }
        self.device = Parts(**self.habits)
        self.allocator = bfc.BFCAllocator(self.device, allow_growth=True, **self.options)

    def key_of(self, stream: int) -> Key:
        begun_on_it = [s for s in self.scopes if s.is_capture and s.stream == stream]
        for scope in begun_on_it + self.scopes[::-1]:
            if scope.takes(stream):
                return scope.pool, stream
        return OTHERS, 0

    def twin(self, key: Key) -> Alone:
        if key not in self.beside:
            self.beside[key] = self.alone(key, self.options, self.habits)
        return self.beside[key]

    def take(self) -> None:
        stream = self.rng.choice(self.streams)
        nbytes = self.rng.choice([2400, 70_000, MIB, 5 * MIB]) + self.rng.randrange(5000)
        key = self.device.here = self.key_of(stream)
        address = self.allocator.allocate_raw(nbytes, stream=stream)
        assert address == self.twin(key).allocate(nbytes), (key, nbytes)
        self.live.append((address, key))

    def drop(self) -> None:
        if self.live:
            address, key = self.live.pop(self.rng.randrange(len(self.live)))
            self.allocator.deallocate_raw(address)
            self.twin(key).free(address)

    def begin(self) -> None:
        stream = self.rng.choice([it for it in self.streams if it])
        if any(scope.stream == stream for scope in self.scopes):
            return
        used = {scope.pool for scope in self.scopes}
        shared = [n for n, held in self.graphs.items() if n not in used and held]
        if shared and self.rng.random() < 0.4:
            number, is_capture = self.rng.choice(shared), True
            entered = self.allocator.capture(stream, pool=self.graphs[number][0])
        else:
            number, is_capture = len(self.graphs) + 1, self.rng.random() < 0.5
            self.graphs[number] = []
            entered = self.allocator.capture(stream) if is_capture else None
        if entered is None:
            self.allocator.begin_allocate_to_pool((0, number), stream)
        else:
            self.graphs[number].append(entered.__enter__())
        self.scopes.append(Scope(number, stream, is_capture, entered))

    def end(self) -> None:
        if not self.scopes:
            return
        scope = self.scopes.pop(self.rng.randrange(len(self.scopes)))
        if scope.entered is None:
            self.allocator.end_allocate_to_pool((0, scope.pool))
        else:
            scope.entered.__exit__(None, None, None)

    def empty(self) -> None:
        """Gives back what others have freed, and what belonged to graphs that are gone."""
        if self.release is None:
            return
        open_pools = {scope.pool for scope in self.scopes}
        for number, held in self.graphs.items():
            if held and number not in open_pools and self.rng.random() < 0.3:
                for pool in held:
                    pool.release()
                held.clear()
                self.live_of(number)
        self.allocator.empty_cache()
        gone = [n for n, held in self.graphs.items() if not held and n not in self.by_hand()]
        for key, alone in self.beside.items():
            if key[0] == OTHERS or key[0] in gone:
                self.release(alone)

    def by_hand(self) -> set[int]:
        """Pools that were begun with begin_allocate_to_pool: nobody has released them."""
        uses = self.allocator._pool_use_count
        return {number for number in self.graphs if uses((0, number))}

    def live_of(self, number: int) -> None:
        """Half of what a graph has kept goes with it, the rest later."""
        for address, key in [it for it in self.live if it[1][0] == number]:
            if self.rng.random() < 0.5:
                self.live.remove((address, key))
                self.allocator.deallocate_raw(address)
                self.twin(key).free(address)

    def compare(self) -> None:
        self.allocator.check()
        found: dict[int, list[tuple[int, int, bool]]] = {}
        for chunk in self.allocator.snapshot().chunks():
            row = chunk.ptr, chunk.size, chunk.in_use
            found.setdefault(chunk.ptr >> 40 << 40, []).append(row)
        for key, alone in self.beside.items():
            assert found.pop(base_of(key), []) == alone.chunks(), key
            assert self.device.part(base_of(key)).calls == alone.calls(), key
        assert not found

    def play(self, steps: int) -> None:
        actions = [self.take, self.drop, self.begin, self.end, self.empty]
        for step in range(steps):
            self.rng.choices(actions, [10, 8, 1, 1, 0.5])[0]()
            if step % 20 == 0:
                self.compare()
        while self.scopes:
            self.end()
        self.compare()
        for pools in self.graphs.values():
            for pool in pools:
                pool.release()
        self.allocator.close()
