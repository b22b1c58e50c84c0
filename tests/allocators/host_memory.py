"""Runs each public operation with the n-th allocation of host memory failing, for every n, and
looks whether anything is lost. A crash ends this process: `test_host_memory.py` runs it.

    python host_memory.py python|native [operation [n]]

"python" fails one allocation of Python's, and "native" one malloc, realloc or operator new of ours
(with fail_nth.cpp preloaded). Where all fail from the n-th on, CPython 3.11 itself hangs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

import bfc

MIB = 1 << 20
#: So many attempts in a row without a failure end an operation: n has passed its last allocation.
QUIET = 25
MOST = 2000

# -- what fails ------------------------------------------------------------------------------------


class PythonMemory:
    def __init__(self) -> None:
        import _testcapi

        self.hooks = _testcapi

    def start(self, n: int) -> None:
        self.hooks.set_nomemory(n, n + 1)

    def stop(self) -> bool | None:
        self.hooks.remove_mem_hooks()
        return None  # whether it failed any: unknown


class NativeMemory:
    def __init__(self) -> None:
        self.shim = ctypes.CDLL(None)
        self.shim.bfc_fail_at.argtypes = [ctypes.c_long, ctypes.c_long]

    def start(self, n: int) -> None:
        self.shim.bfc_fail_at(n + 1, 1)

    def stop(self) -> bool | None:
        failed = self.shim.bfc_failed() > 0
        self.shim.bfc_fail_at(0, 1)
        return failed


# -- what is there before, and what must be left behind --------------------------------------------


class World:
    """An allocator with something live, something free, and something freed that waits."""

    def __init__(self, make: Callable[..., bfc.SubAllocator], allocator: type, **options) -> None:
        self.source = make("64 MiB")
        self.make = lambda: allocator(self.source, **options)
        self.pinned = allocator is bfc.PinnedAllocator
        # what goes back when the allocator closes
        self.reserve = MIB if "pinned_reserve" in str(options.get("settings")) else 0
        self.allocator = self.make()
        self.kept: list[object] = []
        self.ptrs: list[int] = []
        if self.simulated:
            self.source.hold(5)
        self.ptrs += [self.allocator.allocate_raw(n * 700) for n in range(1, 9)]
        for ptr in self.ptrs[2:6]:
            self.allocator.deallocate_raw(ptr)
        del self.ptrs[2:6]
        self.buffer = self.allocator.allocate(4096)
        self.far = self.allocator.allocate(5000, 5 if self.simulated else None)
        self.allocator.allocate(3000, 5 if self.simulated else None).free()

    @property
    def simulated(self) -> bool:
        return isinstance(self.source, bfc.SimulatedSubAllocator)

    def in_use(self) -> int:
        if self.pinned:
            return self.allocator.host_memory_stats()["active_bytes.current"]
        return self.allocator.stats().bytes_in_use

    def keep(self, found: object) -> None:
        """What an operation has made stays alive until the end."""
        if isinstance(found, np.ndarray) and found.dtype == np.uint64 and found.base is None:
            self.ptrs += [int(ptr) for ptr in found]
        elif type(found) is int:
            self.ptrs.append(found)
        else:
            self.kept.append(found)

    def owner_here(self) -> str:
        """Whose memory is that is allocated now."""
        if self.pinned:
            return ""
        ptr = self.allocator.allocate_raw(300)
        found = {leak.ptr: leak.owner for leak in self.allocator.leaks()}
        self.allocator.deallocate_raw(ptr)
        return found[ptr]

    def free_all(self) -> None:
        """As a program would that gave all up: nothing is in use then, and nothing is taken."""
        self.kept.clear()
        self.buffer.free()
        self.far.free()
        for ptr in self.ptrs:
            with suppress(bfc.InvalidPointerError):  # an operation has freed it
                self.allocator.requested_size(ptr)
                self.allocator.deallocate_raw(ptr)
        if self.simulated:
            self.source.finish(5)
            self.source.finish(6)
        self.allocator.empty_cache()
        self.allocator.empty_cache()

    def faults(self) -> Iterator[str]:
        if not self.allocator.closed:
            self.allocator.check()
            if owner := self.owner_here():
                yield f"the scope of {owner!r} is still open"
            self.free_all()
            self.allocator.check()
            if self.in_use():
                yield f"{self.in_use()} bytes stay in use"
            if self.source.live_bytes > self.reserve:
                yield f"{self.source.live_bytes} bytes stay taken"
        self.kept.clear()
        self.allocator.close()
        if self.source.live_bytes:
            yield f"{self.source.live_bytes} bytes of the source are live after close"
        if self.simulated and self.source.reservations:
            yield f"{len(self.source.reservations)} reservations are left after close"


def bfc_world() -> World:
    return World(bfc.SimulatedSubAllocator, bfc.BFCAllocator, allow_growth=True)


def bfc_host_world() -> World:
    return World(bfc.HostSubAllocator, bfc.BFCAllocator, allow_growth=True)


def caching_world() -> World:
    return World(bfc.SimulatedSubAllocator, bfc.CachingAllocator)


def recorded_world() -> World:
    world = World(bfc.SimulatedSubAllocator, bfc.CachingAllocator)
    world.allocator.record_history()
    return world


def strict_world() -> World:
    """With a scope of a private pool open: frees are put off."""
    world = World(bfc.SimulatedSubAllocator, bfc.CachingAllocator, strict=True)
    pool = bfc.MemPool(world.allocator)
    scope = bfc.use_mem_pool(pool)
    scope.__enter__()
    faults = world.faults

    def all_faults() -> Iterator[str]:
        if not world.allocator.closed:
            scope.__exit__(None, None, None)
            world.kept.clear()
            pool.release()
        yield from faults()

    world.faults = all_faults
    return world


def expandable_world() -> World:
    return World(
        bfc.SimulatedSubAllocator, bfc.CachingAllocator, settings="expandable_segments:True"
    )


def strict_expandable_world() -> World:
    world = World(
        bfc.SimulatedSubAllocator,
        bfc.CachingAllocator,
        settings="expandable_segments:True",
        strict=True,
    )
    world.allocator.record_history()
    return world


def stitching_world() -> World:
    return World(
        bfc.SimulatedSubAllocator, bfc.BFCAllocator, virtual_memory=True, page_size="8 MiB"
    )


def stitching_host_world() -> World:
    return World(bfc.HostSubAllocator, bfc.BFCAllocator, virtual_memory=True, page_size="8 MiB")


def pinned_world() -> World:
    return World(bfc.SimulatedSubAllocator, bfc.PinnedAllocator)


def pinned_host_world() -> World:
    return World(bfc.HostSubAllocator, bfc.PinnedAllocator)


def reserve_world() -> World:
    return World(
        bfc.SimulatedSubAllocator,
        bfc.PinnedAllocator,
        settings="pinned_reserve_segment_size_mb:1,pinned_max_cached_size_mb:1",
    )


# -- what is done ----------------------------------------------------------------------------------

ON_HOST = [bfc_host_world, pinned_host_world, stitching_host_world]
EXPANDABLE = [expandable_world, strict_expandable_world]
STITCHING = [stitching_world, stitching_host_world]
LEDGERS = [
    bfc_world, caching_world, recorded_world, strict_world, *EXPANDABLE, stitching_world,
]  # fmt: skip
CACHING = [caching_world, recorded_world, *EXPANDABLE]
PINNED = [pinned_world, reserve_world]
POOLS = [*LEDGERS, *PINNED]

#: Where it is done, what prepares it with memory enough, and the operation.
OPERATIONS: dict[str, tuple[list[Callable[[], World]], Callable, Callable]] = {}


def on(worlds: list[Callable[[], World]], before: Callable = lambda _world: None) -> Callable:
    def add(function: Callable) -> Callable:
        OPERATIONS[function.__name__] = worlds, before, function
        return function

    return add


@on(POOLS + ON_HOST)
def construct(world: World) -> object:
    return world.make().allocate(1000)


@on(POOLS + ON_HOST)
def allocate(world: World) -> object:
    return world.allocator.allocate(1000)


@on(POOLS + ON_HOST)
def allocate_a_region(world: World) -> object:
    return world.allocator.allocate_raw(24 * MIB)


@on(POOLS)
def allocate_on_a_stream(world: World) -> object:
    return world.allocator.allocate("2 KiB", stream=5)


@on(POOLS)
def allocate_raw_on_a_stream(world: World) -> object:
    return world.allocator.allocate_raw(1000, 6)


@on(LEDGERS)
def allocate_many(world: World) -> object:
    return world.allocator.allocate_many([1000, 0, 24 * MIB, 3 * MIB, 500])


@on(LEDGERS)
def allocate_many_on_a_stream(world: World) -> object:
    return world.allocator.allocate_many(np.array([1000, 3 * MIB, 500]), stream=5)


OF_OWNERS = [*LEDGERS, stitching_host_world]


@on(OF_OWNERS)
def allocate_for_an_owner(world: World) -> object:
    with bfc.owner("an owner"), bfc.owner("another"):
        return world.allocator.allocate_raw(1000)


@on(OF_OWNERS)
def allocate_many_for_an_owner(world: World) -> object:
    with bfc.owner("an owner"):
        return world.allocator.allocate_many([1000, 0, 24 * MIB, 3 * MIB, 500])


@on([*EXPANDABLE, *STITCHING])
def allocate_in_a_tag(world: World) -> object:
    with world.allocator.tag("a tag"):
        return world.allocator.allocate(1000)


@on(OF_OWNERS)
def say_whose_memory_it_is(world: World) -> object:
    with bfc.owner("an owner"):
        kept = world.allocator.allocate(1000)
    assert sum(world.allocator.stats().by_owner.values()) == world.in_use()
    assert "an owner" in str(world.allocator.leaks())
    return kept


@on(OF_OWNERS)
def tell_tracemalloc(world: World) -> object:
    world.allocator.set_tracemalloc_domain(7)
    kept = world.allocator.allocate(1000)
    world.allocator.allocate(3 * MIB).free()
    return kept


@on(POOLS)
def allocate_too_much(world: World) -> object:
    with suppress(bfc.OutOfMemoryError):
        return world.allocator.allocate_raw(1 << 40)


@on(POOLS)
def try_to_allocate(world: World) -> object:
    kept = world.allocator.try_allocate(3 * MIB)
    with bfc.use_stream(7):
        return kept, world.allocator.try_allocate(1 << 40)


def with_full_reports(_world: World) -> None:
    bfc.set_oom_report("full")


@on([bfc_world, caching_world, pinned_world], with_full_reports)
def show_the_memory_that_is_full(world: World) -> object:
    try:
        return world.allocator.allocate(1 << 40)
    except bfc.OutOfMemoryError as error:
        return str(error)


@on(POOLS)
def free_a_buffer(world: World) -> object:
    return world.buffer.free()


@on(POOLS)
def free_a_buffer_of_a_stream(world: World) -> object:
    return world.far.free()


@on(POOLS + ON_HOST)
def free_an_address(world: World) -> object:
    return world.allocator.deallocate_raw(world.ptrs[0])


@on(LEDGERS)
def free_many(world: World) -> object:
    return world.allocator.deallocate_many([0, *world.ptrs])


@on(POOLS)
def drop_a_buffer(world: World) -> object:
    world.allocator.allocate(1000)


@on(POOLS)
def drop_a_buffer_of_a_stream(world: World) -> object:
    world.allocator.allocate(1000, 5)


@on(POOLS)
def drop_an_allocator(world: World) -> object:
    other = world.make()
    other.allocate_raw(1000)
    other.allocate(1000)


@on(POOLS)
def free_an_invalid_address(world: World) -> object:
    with suppress(bfc.InvalidPointerError):
        world.allocator.deallocate_raw(world.ptrs[0] + 256)


@on(POOLS)
def record_a_stream(world: World) -> object:
    world.allocator.record_stream(world.buffer, 5)
    world.allocator.record_stream(world.ptrs[0], 6)
    world.buffer.free()


@on(POOLS)
def settle_streams(world: World) -> object:
    world.far.free()
    world.source.finish(5)
    return world.allocator.allocate(1000)


@on(POOLS)
def use_a_stream(world: World) -> object:
    with bfc.use_stream(5):
        return world.allocator.allocate(1000)


@on(POOLS + ON_HOST)
def empty_the_cache(world: World) -> object:
    return world.allocator.empty_cache() and None


@on(POOLS + ON_HOST)
def close(world: World) -> object:
    return world.allocator.close()


@on(LEDGERS)
def read_it(world: World) -> object:
    ptr = world.ptrs[0]
    allocator = world.allocator
    figures = allocator.stats(), allocator.requested_size(ptr), allocator.allocated_size(ptr)
    return figures, allocator.allocation_id(ptr), repr(allocator), allocator.bookkeeping_bytes


@on(LEDGERS)
def take_a_snapshot(world: World) -> object:
    return str(world.allocator.snapshot())


@on(LEDGERS)
def write_a_snapshot(world: World) -> object:
    """With entries, where they are recorded, and objects that are made late."""
    world.allocator.allocate(1000).free()
    snapshot = world.allocator.snapshot()
    snapshot.dump(os.devnull)
    return snapshot.to_torch(), snapshot.history, snapshot.regions


@on(CACHING)
def read_pytorchs_figures(world: World) -> object:
    return world.allocator.memory_stats(), world.allocator.memory_summary()


@on([bfc_world, stitching_world, *CACHING])
def record_history(world: World) -> object:
    world.allocator.record_history()
    with bfc.owner("weights", step=17):
        world.allocator.allocate(1000).free()
    return world.allocator.history(), world.allocator.snapshot().to_tensorflow()


@on(CACHING)
def change_settings(world: World) -> object:
    world.allocator.set_settings("max_split_size_mb:32,garbage_collection_threshold:0.5")
    world.allocator.set_memory_fraction(0.9)
    return world.allocator.settings


@on(CACHING)
def use_a_private_pool(world: World) -> object:
    pool = bfc.MemPool(world.allocator, use_on_oom=True, no_split=True)
    with bfc.use_mem_pool(pool):
        world.allocator.allocate(1000).free()
    pool.release()


@on([*EXPANDABLE, caching_world, bfc_world])
def give_back_and_ask_again(world: World) -> object:
    for size in (20 * MIB, 30 * MIB, 50 * MIB):
        world.allocator.allocate(size).free()


@on(EXPANDABLE)
def grow_into_holes(world: World) -> object:
    """Two streams, holes, and a retry that unmaps for another stream."""
    allocator = world.allocator
    for size in (1, 3, 1):
        world.ptrs.append(allocator.allocate_raw(size * MIB))
    allocator.deallocate_raw(world.ptrs[-2])
    allocator.empty_cache()
    allocator.allocate(5 * MIB).free()
    allocator.allocate(30 * MIB, 7).free()
    allocator.allocate(30 * MIB, 8).free()
    return allocator.page_stats()


def with_room_for_addresses(world: World) -> None:
    world.ptrs += [0] * 6  # the operation makes no list longer: it would lose what it has got


@on(STITCHING, before=with_room_for_addresses)
def stitch(world: World) -> object:
    """A view over holes, which is kept, taken again, and given up; pages of another stream."""
    allocator, ptrs = world.allocator, world.ptrs
    for i in range(-6, 0):
        ptrs[i] = allocator.allocate_raw(8 * MIB)
    for i in range(-6, 0, 2):
        allocator.deallocate_raw(ptrs[i])
    for size in (20, 12, 20):
        allocator.allocate(size * MIB).free()
    allocator.allocate(14 * MIB, 7).free()
    return allocator.page_stats()


@on(STITCHING)
def trim(world: World) -> object:
    allocator = world.allocator
    allocator.allocate(20 * MIB).free()
    allocator.trim(8 * MIB)
    return allocator.trim(wait=True) and None


@on(STITCHING)
def extend(world: World) -> object:
    buffer = world.allocator.allocate(3 * MIB)
    world.allocator.try_extend(buffer, 9 * MIB)
    return buffer


def with_a_clock(world: World) -> np.ndarray:
    world.allocator.set_timing_counter(bfc.SharedCounter())
    ptrs = world.allocator.allocate_many([1000] * 20)
    world.keep(ptrs)
    return ptrs


@on([bfc_world], before=with_a_clock)
def free_with_timestamps(world: World, ptrs: np.ndarray) -> object:
    world.allocator.deallocate_many(ptrs)
    world.allocator.set_safe_frontier(100)
    return world.allocator.allocate(30_000)


def a_trace(_world: World) -> bfc.Trace:
    """Nothing is live at its end."""
    op, ids = [0, 0, 0, 1, 0, 1, 0], [1, 2, 3, 2, 4, 1, 5]
    sizes = [1000, 2000, 3 * MIB, 0, 700, 0, 24 * MIB]
    return bfc.Trace(op, ids, sizes, stream=[0, 0, 0, 0, 5, 0, 0]).closed()


@on(LEDGERS, before=a_trace)
def replay(world: World, trace: bfc.Trace) -> object:
    return trace.replay(world.allocator)


@on(LEDGERS, before=a_trace)
def replay_with_a_timeline(world: World, trace: bfc.Trace) -> object:
    return trace.replay(world.allocator, samples=5)


@on(PINNED)
def use_pinned_blocks(world: World) -> object:
    allocator, ptr = world.allocator, world.ptrs[0]
    allocator.record_event(ptr, None, 5)
    allocator.mark_event(allocator.find(ptr + 8), 5)
    allocator.deallocate_raw(ptr)
    allocator.set_settings("pinned_max_cached_size_mb:2")
    return repr(allocator), allocator.host_memory_stats(), allocator.requested_size(world.ptrs[1])


@on([bfc_host_world, pinned_host_world])
def view_a_buffer(world: World) -> object:
    view = world.buffer.view("f4", (2, -1), read_only=True)
    return memoryview(view), memoryview(world.buffer), view.view("u1"), repr(view)


@on([bfc_host_world, pinned_host_world])
def make_an_array(world: World) -> object:
    return np.asarray(world.buffer.view("f4")), np.asarray(world.buffer.view("M8[s]"))


@on([bfc_host_world, pinned_host_world])
def export_a_buffer(world: World) -> object:
    view = world.buffer.view("f4")
    copied = view.__dlpack__(copy=True)
    return np.from_dlpack(view), view.__dlpack__(max_version=(1, 0)), copied


@on([bfc_host_world, pinned_host_world])
def copy_bytes(world: World) -> object:
    world.buffer.view("f4", 1024).from_host(range(1024))
    return world.buffer.from_host(bytes(4096)).to_host(), bytes(world.buffer)


def source_faults(make: Callable[[], bfc.SubAllocator], failing, n: int) -> Iterator[str]:
    """A source that raises has kept nothing, and one that does not free is asked again."""
    source = make()
    block = None
    failing.start(n)
    try:
        block = source.alloc(256, 3 * MIB)
    except MemoryError:
        pass
    failing.stop()
    if source.live_bytes != (0 if block is None else block[1]):
        yield f"alloc gave {block}, and {source.live_bytes} bytes are live"
    block = block or source.alloc(256, 3 * MIB)
    freed = False
    failing.start(n)
    try:
        source.free(*block)
        freed = True
    except MemoryError:
        pass
    failing.stop()
    if not freed:
        source.free(*block)
    if source.live_bytes:
        yield f"{source.live_bytes} bytes are live after free"


# -- every n ---------------------------------------------------------------------------------------


#: Others say in their own words that they have no memory.
NO_MEMORY = (
    "MemoryError",
    "numpy.ufunc",
    "the buffer protocol has no format for",
    "can't allocate read lock",
)


def before_call(before: Callable, world: World) -> tuple[object, ...]:
    prepared = before(world)
    return () if prepared is None else (prepared,)


def attempt(
    make: Callable[[], World], before: Callable, operation: Callable, failing, n: int
) -> tuple[bool, list[str]]:
    """Whether the n-th allocation mattered, and what is wrong."""
    world = make()
    prepared = before_call(before, world)
    found, fault, unexpected = None, None, []
    failing.start(n)
    try:
        found = operation(world, *prepared)
    except (MemoryError, bfc.SubAllocatorError) as error:
        fault = type(error)
    except BaseException as error:
        fault = type(error)
        failing.stop()
        if not any(words in repr(error) for words in NO_MEMORY):
            unexpected.append(f"raised {error!r}")
    failed = failing.stop()
    if found is not None:
        world.keep(found)
    del found, prepared
    try:
        unexpected += list(world.faults())
    except Exception as error:
        unexpected.append(f"afterwards: {error!r}")
    vars(world).clear()  # it holds itself, and no garbage is collected here
    return fault is not None if failed is None else failed, unexpected


def run(kind: str, only: str = "", at: int = -1) -> int:
    failing = NativeMemory() if kind == "native" else PythonMemory()
    faults = 0
    for name, (worlds, before, operation) in OPERATIONS.items():
        for make in worlds:
            case = f"{name}:{make.__name__}"
            if only and only not in (name, case):
                continue
            warm = make()
            operation(warm, *before_call(before, warm))  # what is imported once is no part of it
            quiet = 0
            for n in range(MOST) if at < 0 else [at]:
                print(f"{kind} {case} {n}", file=sys.stderr, flush=True)
                mattered, wrong = attempt(make, before, operation, failing, n)
                for text in wrong:
                    faults += 1
                    print(f"host_memory.py {kind} {case} {n}: {text}", flush=True)
                quiet = 0 if mattered else quiet + 1
                if quiet == QUIET:
                    break
    return faults


def run_sources(kind: str) -> int:
    failing = NativeMemory() if kind == "native" else PythonMemory()
    faults = 0
    for make in (bfc.SimulatedSubAllocator, bfc.HostSubAllocator):
        for n in range(100):
            print(f"{kind} {make.__name__} {n}", file=sys.stderr, flush=True)
            for text in source_faults(lambda make=make: make("64 MiB"), failing, n):
                faults += 1
                print(f"host_memory.py {kind} {make.__name__} {n}: {text}", flush=True)
    return faults


if __name__ == "__main__":
    faulthandler.enable()
    gc.disable()
    sys.unraisablehook = lambda _report: None
    kind, *rest = sys.argv[1:]
    wrong = run(kind, *rest[:1], *map(int, rest[1:2]))
    wrong += 0 if rest else run_sources(kind)
    print("faults", wrong)
