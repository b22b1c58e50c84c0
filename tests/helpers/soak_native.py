"""Random histories through the C table, played and verified by `soak_table.cpp` without the GIL.

Each function plays one history of a seed and returns how many calls were made whose outcome was
verified. A call that the source failed is not among them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from cpp import built_library
from torch_table import Table
from waiting import PATIENCE

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
STREAMS = 4
POLICIES: dict[str, Callable[..., Any]] = {
    "bfc": functools.partial(bfc.BFCAllocator, allow_growth=True),
    "caching": bfc.CachingAllocator,
    "expandable": functools.partial(bfc.CachingAllocator, settings="expandable_segments:True"),
    "stitching": functools.partial(bfc.CachingAllocator, stitch=True),
    "pages": functools.partial(bfc.BFCAllocator, virtual_memory=True),
}
MAPPED = ("expandable", "stitching", "pages")
#: Calls of a source that may fail at any time.
FRAGILE = ("alloc", "free", "reserve", "create", "map", "set_access", "unmap", "release")

#: Answers of a source that cannot be true. (A block that lies elsewhere cannot be told from one.)
LIES = [(address, 1 << 21) for address in (0, 8, -256, 2**64 - 256, 2**200, None, "ab", 0.5)] + [
    None,
    (),
    (256,),
    "ab",
    0.5,
    (256, 8),
    (256, -256),
    (256, 2**64),
    (256, "ab"),
    (256, 0.5),
]


class Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("calls", "refused", "allocated", "freed", "live", "live_bytes")
    )


class Habits(ctypes.Structure):
    _fields_ = (
        ("streams", ctypes.c_int32),
        ("may_refuse", ctypes.c_int32),
        ("alignment", ctypes.c_uint64),
        ("large", ctypes.c_uint64),
        ("most_live", ctypes.c_uint64),
    )


class Setting(ctypes.Structure):
    _fields_ = (
        ("policy", ctypes.c_int32),
        ("grows", ctypes.c_int32),
        ("limit", ctypes.c_uint64),
        ("slack", ctypes.c_uint64),
        ("large", ctypes.c_uint64),
        ("most_live", ctypes.c_uint64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    source = Path(__file__).with_name("soak_table.cpp")
    with tempfile.TemporaryDirectory() as folder:
        found = ctypes.CDLL(str(built_library(source, Path(folder), ["-O2"])))
    for name in ("marks", "places"):
        getattr(found, f"{name}_new").restype = ctypes.c_void_p
        getattr(found, f"{name}_fault").restype = ctypes.c_char_p
        getattr(found, f"{name}_counts").restype = Counts
    return found


class Game:
    """A game of `soak_table.cpp` on one table."""

    def __init__(self, name: str, pool: Any, *arguments: Any) -> None:
        self.name, self.pool, self.table = name, pool, Table(pool)
        seed, *others = arguments
        self.game = ctypes.c_void_p(
            getattr(library(), f"{name}_new")(self.table.address, ctypes.c_uint64(seed), *others)
        )

    def call(self, name: str, *arguments: int) -> None:
        getattr(library(), f"{self.name}_{name}")(self.game, *map(ctypes.c_int64, arguments))
        fault = getattr(library(), f"{self.name}_fault")(self.game)
        assert fault is None, fault.decode()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """The players play in native threads meanwhile."""
        self.call("start")
        try:
            yield
        finally:
            getattr(library(), f"{self.name}_stop")(self.game)
        self.call("play", 0)

    @property
    def counts(self) -> Any:
        return getattr(library(), f"{self.name}_counts")(self.game)

    def end(self) -> int:
        """How many calls were verified."""
        calls: int = self.counts.calls
        getattr(library(), f"{self.name}_delete")(self.game)
        return calls


# -- places: every address, refusal and statistic as a model of the policy says --------------------


def places(seed: int, steps: int = 2_000_000) -> int:
    dice = random.Random(seed)
    policy = dice.choice(["bfc", "growing", "caching"])
    limit = MIB * dice.choice([8, 24, 64, 200, 1024])
    large = MIB * dice.choice([1, 4, 16]) if limit > 8 * MIB else MIB
    fraction = dice.choice([0.0, 0.01, 0.3])
    slack = 128 * MIB if fraction == 0 else max(int(fraction * limit), 256)
    grows = policy == "growing"
    setting = Setting(policy == "caching", grows, limit, slack, large, dice.choice([16, 200, 2000]))
    source = bfc.SimulatedSubAllocator(2 * limit)
    if policy == "caching":
        pool: Any = bfc.CachingAllocator(
            source, memory_limit=limit, strict=dice.choice([True, False])
        )
    else:
        pool = bfc.BFCAllocator(
            source, memory_limit=limit, allow_growth=grows, fragmentation_fraction=fraction
        )
    game = Game("places", pool, seed, ctypes.byref(setting))
    for _ in range(8):
        game.call("play", steps // 8)
        pool.check()
    return game.end()


# -- marks: memory that only one block can own -----------------------------------------------------


class Streams(Misbehaving):
    """Tells the game which streams have finished, also where the allocator waits for one, and what
    memory goes."""

    game: Game | None = None

    def hold(self, stream: Any) -> None:
        super().hold(stream)
        if self.game is not None:
            self.game.call("hold", stream)

    def finish(self, stream: Any) -> None:
        if self.game is not None and stream in self._held:
            self.game.call("finish", stream)
        super().finish(stream)

    def _gone(self, address: int, nbytes: int) -> None:
        if self.game is not None:
            self.game.call("gone", address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._gone(address, nbytes)
        super().free(address, nbytes)

    def free_idle(self, address: int, nbytes: int) -> None:
        self._gone(address, nbytes)
        super().free_idle(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._gone(address, nbytes)
        super().unmap(address, nbytes)


def habits(policy: str, dice: random.Random, streams: int = 1) -> Habits:
    alignment = 256 if policy in ("bfc", "pages") else 512
    large = dice.choice([16 << 10, 64 << 10, 256 << 10, 2 * MIB])
    return Habits(streams, 0, alignment, large, dice.choice([8, 60, 400]))


def agrees_with(pool: Any, game: Game, source: Any) -> None:
    """The allocator's books: what is in use is what the game has, in regions of the source."""
    pool.check()
    snapshot, counts = pool.snapshot(), game.counts
    chunks = [chunk for chunk in snapshot.chunks() if chunk.state == "in use"]
    assert len(chunks) == counts.live, (len(chunks), counts.live)
    assert sum(chunk.requested_size for chunk in chunks) == counts.live_bytes
    assert all(chunk.size >= chunk.requested_size for chunk in chunks)
    assert pool.stats().pool_bytes <= source.live_bytes


def finish(game: Game, pool: Any, source: Any) -> int:
    """Everything goes back: the allocator's books, and then the source's, are empty."""
    game.call("drain")
    agrees_with(pool, game, source)
    for _ in range(3):  # a free that the source refuses is made again
        pool.release_free_regions()
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.pool_bytes) == (0, 0), stats
    pool.close()
    assert source.live_bytes == 0, source.live_bytes
    return game.end()


def opened(policy: str, dice: random.Random, **options: Any) -> tuple[Any, Streams]:
    capacity = "256 MiB"
    source = Streams(bfc.HostSubAllocator(capacity))
    return POLICIES[policy](source, **options), source


def marks(seed: int, steps: int = 1_000_000) -> int:
    """One thread, on a source that does as it should, with one stream."""
    dice = random.Random(seed)
    policy = dice.choice(list(POLICIES))
    pool, source = opened(policy, dice)
    game = Game("marks", pool, seed, 1, ctypes.byref(habits(policy, dice)))
    for _ in range(8):
        game.call("play", steps // 8)
        agrees_with(pool, game, source)
        if dice.random() < 0.3:
            pool.release_free_regions()
    return finish(game, pool, source)


def hostile(seed: int, steps: int = 200_000) -> int:
    """Streams that are held, limits that are narrow, and sources that refuse, raise and lie."""
    dice = random.Random(seed)
    policy = dice.choice(list(POLICIES))
    options = {} if dice.random() < 0.5 else {"memory_limit": MIB * dice.choice([40, 60, 100])}
    pool, source = opened(policy, dice, **options)
    wanted = habits(policy, dice, STREAMS)
    wanted.may_refuse = 1
    game = Game("marks", pool, seed, 1, ctypes.byref(wanted))
    source.game, batch = game, 2000
    for _ in range(steps // batch):
        disturb(dice, source)
        with contextlib.suppress(KeyboardInterrupt):  # the table passes one on
            game.call("play", batch)
        if dice.random() < 0.05:
            calm(source)
            agrees_with(pool, game, source)
    calm(source)
    for stream in range(STREAMS):
        source.finish(stream)
    game.call("drain")
    source.game = None
    return finish(game, pool, source)


def disturb(dice: random.Random, source: Streams) -> None:
    for _ in range(dice.randrange(4)):
        call, n = dice.choice(FRAGILE), dice.randrange(1, 6)
        kind = dice.random()
        if kind < 0.4 and call in ("alloc", "reserve", "create"):
            source.on(call, n, returns=None)
        elif kind < 0.4:
            source.on(call, n, raises=bfc.SubAllocatorError("ordered"))
        elif kind < 0.7:
            error = dice.choice([MemoryError, KeyboardInterrupt, OSError, SystemError])
            source.on(call, n, raises=error("ordered"))
        elif kind < 0.8:
            source.on("alloc", n, returns=dice.choice(LIES))
    stream = dice.randrange(1, STREAMS)
    dice.choice([source.hold, source.finish, lambda _: None])(stream)


def calm(source: Streams) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(0)  # where one is pending, it is raised here
    source.off()


def threads(seed: int, steps: int = 100_000) -> int:
    """Native threads on one allocator, which also free each other's blocks."""
    dice = random.Random(seed)
    policy = dice.choice(list(POLICIES))
    pool, source = opened(policy, dice)
    count = dice.choice([2, 3, 5])
    game = Game("marks", pool, seed, count, ctypes.byref(habits(policy, dice)))
    for _ in range(8):
        if dice.random() < 0.5:
            game.call("play", steps // 8)
        else:  # Python looks and gives back meanwhile
            with game.going_on():
                for _ in range(dice.randrange(1, 30)):
                    dice.choice(
                        [pool.check, pool.stats, pool.snapshot, pool.release_free_regions]
                    )()
        agrees_with(pool, game, source)
    return finish(game, pool, source)


def forks(seed: int, steps: int = 100_000) -> int:
    """Children that are forked while native threads allocate, and go on with the same allocator."""
    dice = random.Random(seed)
    policy = dice.choice(list(POLICIES))
    pool, source = opened(policy, dice)
    count = dice.choice([1, 2, 3])
    game = Game("marks", pool, seed, count, ctypes.byref(habits(policy, dice)))
    calls = 0
    for number in range(8):
        game.call("play", steps // 8)
        with game.going_on():
            calls += in_a_child(functools.partial(go_on, policy, pool, seed + number))
        agrees_with(pool, game, source)
    return calls + finish(game, pool, source)


def go_on(policy: str, pool: Any, seed: int) -> int:
    """What a forked child does: it allocates beside what the threads have left behind, unless the
    memory is the parent's, too."""
    pool.check()
    calls = 0
    if policy not in MAPPED:
        dice = random.Random(seed)
        game = Game("marks", pool, seed, 1, ctypes.byref(habits(policy, dice)))
        game.call("play", 5000)
        game.call("drain")
        calls = game.end()
        pool.check()
        pool.release_free_regions()
    pool.close()
    return calls


#: In Python 3.11, a child hangs before its first line if another thread made or dropped its thread
#: state just when the parent forked: the child takes the lock of these states before it makes that
#: lock anew. Since 3.12 it makes it anew first.
FORKS_MAY_HANG = sys.version_info < (3, 12)


#: Seconds until a child of such a fork is given up, and another is forked.
BEGINNING = 60 if FORKS_MAY_HANG else PATIENCE


def in_a_child(work: Callable[[], int], tries: int = 5) -> int:
    """What it returns, in a child that is given `PATIENCE`."""
    for _ in range(tries):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            answer_from_child(work, writing)
        os.close(writing)
        with os.fdopen(reading) as answer:
            begun = bool(select.select([answer], [], [], BEGINNING)[0])
            if not begun:
                os.kill(child, signal.SIGKILL)
            text = answer.read()
        status = os.waitpid(child, 0)[1]
        if begun or not FORKS_MAY_HANG:
            break
    assert status == 0, f"a child ended with {os.waitstatus_to_exitcode(status)}: {text}"
    return int(text)


def answer_from_child(work: Callable[[], int], writing: int) -> NoReturn:
    try:
        signal.alarm(PATIENCE)
        os.write(writing, b" ")  # it has begun
        os.write(writing, str(work()).encode())
        os._exit(0)
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(1)


warnings.filterwarnings("error", message=".*is not live.*")
