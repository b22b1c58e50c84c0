"""Random captures of graphs, private pools and MemPools, with the contents of every block verified
by `soak_table.cpp`: what a graph was given goes to nobody else until the graph is gone."""

from __future__ import annotations

import ctypes
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soak_native import POLICIES, STREAMS, Game, Streams, agrees_with, finish, habits

import bfc

BATCH = 200
#: Pools that are held at once: each stream of a pool has regions of its own.
MOST_HELD = 8
OUTSIDE = 0  # the number of no pool


@dataclass(frozen=True)
class ByHand:
    """A pool that PyTorch's functions make and release."""

    allocator: Any
    id: tuple[int, int]

    def release(self) -> None:
        self.allocator.release_pool(self.id)


@dataclass
class Scope:
    """An open use of a pool. One of a stream takes what that asks for, and any other all that the
    thread asks for, except for streams of an older capture."""

    pool: int
    stream: int | None
    is_capture: bool
    leave: Callable[[], None]

    def takes(self, stream: int) -> bool:
        return self.is_capture or self.stream in (None, stream)


@dataclass
class Captures:
    """Scopes that open and close on a pool, beside a model of who gets which memory."""

    policy: str
    dice: random.Random
    pool: Any
    game: Game
    scopes: list[Scope] = field(default_factory=list)
    graphs: list[tuple[int, bfc.GraphPool]] = field(default_factory=list)  # all that are there
    mem_pools: list[tuple[int, bfc.MemPool]] = field(default_factory=list)
    by_hand: list[tuple[int, ByHand]] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    named: int = 0  # pools so far

    def number(self) -> int:
        self.named += 1
        return self.named

    def pool_of(self, stream: int) -> int:
        begun_on_it = [it for it in self.scopes if it.is_capture and it.stream == stream]
        for scope in begun_on_it + self.scopes[::-1]:
            if scope.takes(stream):
                return scope.pool
        return OUTSIDE

    def opened(self, scope: Scope) -> None:
        self.scopes.append(scope)
        self.tell()

    def tell(self) -> None:
        for stream in range(STREAMS):
            self.game.call("pool", stream, self.pool_of(stream))

    def free_stream(self) -> int | None:
        used = {scope.stream for scope in self.scopes}
        left = [stream for stream in range(1, STREAMS) if stream not in used]
        return self.dice.choice(left) if left else None

    def capture(self) -> None:
        """Of a new graph, or of one that shares the pool of another."""
        stream, used = self.free_stream(), {scope.pool for scope in self.scopes}
        if stream is None:
            return
        shared = [it for it in self.graphs if it[0] not in used]
        number, owner = self.number(), None
        if shared and self.dice.random() < 0.4:
            number, owner = self.dice.choice(shared)
        entered = self.pool.capture(stream, pool=owner)
        self.graphs.append((number, entered.__enter__()))
        self.holders[number] += 1
        leave = functools.partial(entered.__exit__, None, None, None)
        self.opened(Scope(number, stream, True, leave))

    def begin_by_hand(self) -> None:
        """As PyTorch's function does, for one stream."""
        stream = self.free_stream()
        if stream is not None:
            number = self.number()
            pool = ByHand(self.pool, (7, number))
            self.pool.begin_allocate_to_pool(pool.id, stream)
            self.by_hand.append((number, pool))
            self.holders[number] += 1
            leave = functools.partial(self.pool.end_allocate_to_pool, pool.id)
            self.opened(Scope(number, stream, False, leave))

    def use_mem_pool(self) -> None:
        """Around all other scopes. TensorFlow's policy has none."""
        if self.policy in ("bfc", "pages") or self.scopes:
            return
        if not self.mem_pools or self.dice.random() < 0.3:
            self.mem_pools.append((self.number(), bfc.MemPool(self.pool)))
            self.holders[self.named] += 1
        number, pool = self.dice.choice(self.mem_pools)
        entered = bfc.use_mem_pool(pool)
        entered.__enter__()
        self.opened(
            Scope(number, None, False, functools.partial(entered.__exit__, None, None, None))
        )

    def end(self) -> None:
        if self.scopes:
            at = self.dice.randrange(len(self.scopes))
            if self.scopes[at].stream is None and len(self.scopes) > 1:
                return  # a MemPool is left last
            self.scopes.pop(at).leave()
            self.tell()

    def release(self) -> None:
        """What a pool was held for is gone."""
        used = {scope.pool for scope in self.scopes}
        lists: list[list[Any]] = [self.graphs, self.mem_pools, self.by_hand]
        idle = [(held, it) for held in lists for it in held if it[0] not in used]
        if idle:
            held, (number, pool) = self.dice.choice(idle)
            held.remove((number, pool))
            self.holders[number] -= 1
            if not self.holders[number]:
                self.game.call("released", number)
            pool.release()

    def empty(self) -> None:
        self.pool.empty_cache()

    def go_on(self) -> None:
        """Some of this, most often with a scope."""
        if len(self.graphs) + len(self.mem_pools) + len(self.by_hand) > MOST_HELD:
            self.release()
        works = [self.capture, self.begin_by_hand, self.use_mem_pool, self.end, self.release]
        self.dice.choices([*works, self.empty], [3, 1, 1, 5, 3, 1])[0]()

    def close(self) -> None:
        while self.scopes:
            self.scopes.pop().leave()
        self.tell()
        for _, pool in [*self.graphs, *self.mem_pools, *self.by_hand]:
            pool.release()
        for number in range(1, self.named + 1):
            self.game.call("released", number)


def captures(seed: int, steps: int = 100_000) -> int:
    dice = random.Random(seed)
    policy = dice.choice(list(POLICIES))
    source = Streams(bfc.HostSubAllocator("2 GiB"))
    pool = POLICIES[policy](source)
    game = Game("marks", pool, seed, 1, ctypes.byref(habits(policy, dice, STREAMS)))
    world = Captures(policy, dice, pool, game)
    for _ in range(steps // BATCH):
        world.go_on()
        game.call("play", dice.randrange(2 * BATCH))
        if dice.random() < 0.05:
            agrees_with(pool, game, source)
    world.close()
    return finish(game, pool, source)
